"""A small sharded checkpoint behind a range server, and fetches of its tensors into a cache."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from checkpoint.pins import Pins
from tests.range_server import RangeServer
from weights.cache import TensorCache
from weights.cached_model import CachedModel
from weights.fetching import NO_MANIFEST, Sha256s, TensorFetcher
from weights.http_source import HttpSource
from weights.location import remote_model
from weights.metadata import pin
from weights.pieces import TransferPolicy
from weights.progress import FetchProgress

SMALL = TransferPolicy(
    num_connections=4,
    range_bytes=64 * 1024,
    gap_bytes=1024,
    piece_bytes=16 * 1024,
    give_up_s=20.0,
    first_wait_s=0.01,
    max_wait_s=0.05,
)


def write_shards(directory: Path, *, num_layers: int = 6, seed: int = 0) -> Path:
    """Two files with tensors of layers, of 40 and 130 kB, and an index; a config that nothing parses."""
    directory.mkdir(exist_ok=True)
    generator = np.random.default_rng(seed)
    weight_map: dict[str, str] = {}
    for shard in range(2):
        file = f"model-0000{shard + 1}-of-00002.safetensors"
        tensors = {}
        for layer in range(shard * num_layers // 2, (shard + 1) * num_layers // 2):
            tensors[f"model.layers.{layer}.a"] = generator.random(10_000, np.float32)
            tensors[f"model.layers.{layer}.b"] = generator.random(32_500, np.float32)
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def layer_names(*layers: int) -> list[str]:
    return [f"model.layers.{layer}.{part}" for layer in layers for part in "ab"]


@dataclass
class Fetch:
    """A cache of the server's files."""

    server: RangeServer
    directory: Path
    policy: TransferPolicy = SMALL
    limit_bytes: int | None = None
    timeout_s: float = 10.0
    sha256s: Sha256s = field(default_factory=lambda: NO_MANIFEST)

    def __post_init__(self) -> None:
        self.source = HttpSource(remote_model(self.server.url), timeout_s=self.timeout_s)
        self.pins: Pins = pin(self.source)
        self.cache = TensorCache(self.directory, limit_bytes=self.limit_bytes, policy=self.policy)
        self.model: CachedModel = self.cache.model(self.source, self.pins)
        self.progress = FetchProgress()

    def __enter__(self) -> Fetch:
        return self

    def __exit__(self, *error: object) -> None:
        self.cache.close()
        self.source.close()

    def run(self, tensors: list[str], *, keeps_served: bool = False) -> int:
        """Fetch tensors; return the number of bytes of weights that the server sent for them."""
        before = self.server.sent_bytes
        fetcher = TensorFetcher(
            self.cache,
            self.source,
            self.pins,
            sha256s=self.sha256s,
            progress=self.progress,
            check=lambda: None,
            policy=self.policy,
            keeps_served=keeps_served,
        )
        fetcher.fetch(self.model, tensors)
        return self.server.sent_bytes - before

    def wrong(self, tensors: list[str]) -> list[str]:
        """Tensors whose bytes in the cache are not those of the server's files."""
        found = []
        for tensor in tensors:
            entry = self.model.headers.tensors[tensor]
            expected = (self.server.directory / entry.file).read_bytes()[entry.begin : entry.end]
            if (self.model.directory / entry.file).read_bytes()[entry.begin : entry.end] != expected:
                found.append(tensor)
        return found

    def size(self, tensors: list[str]) -> int:
        return sum(self.model.headers.tensors[tensor].num_bytes for tensor in tensors)
