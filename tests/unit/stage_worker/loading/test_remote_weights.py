"""Which sources a load and a prefetch ask for the tensors of a remote model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest

from builtin_model import MODEL_DIRECTORY
from checkpoint import Checkpoint, DType, stage_tensor_names
from stage_worker.assignment import Prefetch, PrefetchedLayers, Sources, WantedModel
from stage_worker.backends.backend import LoadProgress
from stage_worker.loading.remote_weights import RemoteWeights
from tests.range_server import RangeServer, range_server
from tests.unit.weights.peer_files import peer, serving
from weights.http_source import HttpSource
from weights.location import remote_model
from weights.metadata import fetch_metadata, pin
from weights.serving import DirectoryFiles

Fetch: TypeAlias = Callable[[RemoteWeights, WantedModel, int, LoadProgress], None]


def model_of(server: RangeServer, directory: Path, address: str) -> WantedModel:
    """The model of the server, which a peer has, too."""
    source = HttpSource(remote_model(server.url))
    pins = pin(source)
    fetched = fetch_metadata(source, pins, directory, has_text=True)
    source.close()
    return WantedModel(
        pins=pins,
        fingerprint=Checkpoint.open(fetched, pins=pins).fingerprint,
        manifest={},
        sources=Sources(peers=(peer("a", address),)),
    )


def prefetch(remote: RemoteWeights, model: WantedModel, num_layers: int, progress: LoadProgress) -> None:
    layers = PrefetchedLayers(layer_begin=0, layer_end=num_layers, has_embeddings=False, has_head=False)
    order = Prefetch(model=model, layers=(layers,), fingerprint=model.fingerprint, dtype=DType.F32)
    remote.prefetch(order, model, progress)


def load(remote: RemoteWeights, model: WantedModel, num_layers: int, progress: LoadProgress) -> None:
    files = remote.open(model, progress, has_head=False)
    config = files.checkpoint.config
    files.prepare(stage_tensor_names(config, 0, num_layers, has_embeddings=False, has_head=False))


@pytest.mark.parametrize("fetch", [prefetch, load])
def test_tensors_that_were_wrong_come_from_their_origin_and_from_no_peer(
    tmp_path: Path, fetch: Fetch
) -> None:
    wrong = "model.layers.0.mlp.up_proj.weight"
    with range_server(MODEL_DIRECTORY) as server:
        known = model_of(server, tmp_path / "known", "127.0.0.1:1")
        tensors = Checkpoint.open(tmp_path / "known" / "files", pins=known.pins).tensors
        held = DirectoryFiles(MODEL_DIRECTORY, tensors, known.fingerprint)
        with serving(held) as address:
            model = replace(known, sources=Sources(peers=(peer("a", address),)))
            remote = RemoteWeights(tmp_path / "cache")
            fetch(remote, model, 1, LoadProgress())
            entry = tensors[wrong]
            assert not weights_sent(server), "the peer had everything"
            assert remote.refetch(model.pins, [wrong])
            progress = LoadProgress()
            fetch(remote, model, 2, progress)
            assert weights_sent(server) == entry.num_bytes
            assert progress.fetch is not None
            state = progress.fetch.snapshot()
            assert state.done_bytes == state.total_bytes > entry.num_bytes, "layer 1 is from the peer"
            remote.close()


def weights_sent(server: RangeServer) -> int:
    requests = [request for request in server.requests if request.path.endswith(".safetensors")]
    return sum(request.sent_bytes for request in requests if request.begin > 8)
