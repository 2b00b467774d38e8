"""Workers are sent to others that hold what they lack, of the same model only."""

from __future__ import annotations

from pathlib import Path

import pytest

from builtin_model import MODEL_DIRECTORY
from checkpoint import Checkpoint, DType
from coordinator.cluster.connections import Connections, WorkerConnection
from coordinator.cluster.weight_tracker import WeightTracker
from coordinator.model import ServedModel, model_of
from coordinator.planner.plan import StagePlan
from stage_worker.assignment import decode_assignment, decode_prefetch
from stageline_rpc.internal.v1 import join_pb2
from stageline_rpc.v1 import cluster_pb2
from tests.unit.coordinator.cluster.cluster_driver import identity_of
from wire.ids import StageRole

TRACKER = "other:7485"


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return model_of(Checkpoint.open(Path(MODEL_DIRECTORY)))


def stage(begin: int, end: int, role: StageRole = StageRole.MIDDLE) -> StagePlan:
    return StagePlan(
        stage=1,
        worker="c",
        role=role,
        layer_begin=begin,
        layer_end=end,
        weight_bytes=0,
        kv_bytes=0,
        activation_bytes=0,
        memory_bytes=0,
        cost=0,
    )


def tracked(model: ServedModel, **held: join_pb2.HeldWeights) -> WeightTracker:
    connections = Connections()
    tracker = WeightTracker(model, connections, [TRACKER])
    for name, message in held.items():
        connections.put(WorkerConnection(identity_of(name), now_s=0.0))
        tracker.take(connections[name], message)
    return tracker


def held(model: ServedModel, address: str, *layers: int, fingerprint: str = "") -> join_pb2.HeldWeights:
    return join_pb2.HeldWeights(
        fingerprint=fingerprint or model.fingerprint,
        address=address,
        units=[f"model.layers.{layer}" for layer in layers],
        is_complete=not layers,
    )


def test_a_worker_is_sent_to_those_that_hold_its_layers(model: ServedModel) -> None:
    tracker = tracked(
        model,
        a=held(model, "10.0.0.1:7485", 0, 1),
        b=held(model, "10.0.0.2:7485", 2),
        c=held(model, "10.0.0.3:7485", 1),
        d=held(model, "10.0.0.4:7485"),
        e=held(model, "10.0.0.5:7485", 1, fingerprint="1-2-3"),
        f=held(model, "10.0.0.6", 1),
    )
    sources = tracker.sources("c", [stage(1, 2)])
    assert [(peer.worker, list(peer.units), peer.is_complete) for peer in sources.peers] == [
        ("a", ["model.layers.1"], False),
        ("d", [], True),
    ]
    assert list(sources.trackers) == [TRACKER]
    assert {peer.name for peer in tracker.peers()} == {"a", "b", "c", "d"}


def test_a_coordinator_without_a_host_is_the_one_that_was_joined(model: ServedModel) -> None:
    tracker = tracked(model)
    tracker.coordinator = ":7485"
    sources = tracker.sources("c", [stage(1, 2)])
    files = [join_pb2.PinnedFile(name="model.safetensors", size_bytes=8, validator="1")]
    reference = join_pb2.ModelRef(directory="/models/llama", fingerprint="1-2-3", files=files)
    layers = [join_pb2.PrefetchedLayers(layer_begin=1, layer_end=2)]
    order = join_pb2.PrefetchWeights(
        model=reference, layers=layers, sources=sources, dtype=cluster_pb2.DTYPE_BF16
    )
    decoded = decode_prefetch(order, coordinator="[::1]:7480")
    assert decoded is not None and decoded.model is not None
    assert decoded.dtype is DType.BF16 and decoded.model.sources.coordinator == "[::1]:7485"
    assert decoded.model.pins.is_of_coordinator and decoded.model.pins.source == "/models/llama"
    assert decode_prefetch(join_pb2.PrefetchWeights(model=reference), coordinator="[::1]:7480") is None
    sources.peers.add(worker="x", address="no address")
    with pytest.raises(ValueError, match="no address"):
        decode_prefetch(
            order.__class__(model=reference, layers=layers, sources=sources, dtype=order.dtype),
            coordinator="h:1",
        )
    with pytest.raises(ValueError, match="number 0 is not known"):
        decode_prefetch(order.__class__(model=reference, layers=layers), coordinator="h:1")
    with pytest.raises(ValueError, match="number 0 is not known"):
        decode_assignment(join_pb2.AssignStage(model=reference))
