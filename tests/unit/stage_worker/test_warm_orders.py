"""Orders to keep layers in memory: what they end, and what frees the memory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from stage_worker.assignment import Prefetch
from stage_worker.backends.backend import LoadedStage, LoadProgress, StageBackend
from stage_worker.stage_manager import StageManager
from stageline_rpc.internal.v1 import join_pb2
from stageline_rpc.v1 import cluster_pb2

LAYERS = [join_pb2.PrefetchedLayers(layer_begin=1, layer_end=2)]
WANTED = join_pb2.PrefetchWeights(layers=LAYERS, dtype=cluster_pb2.DTYPE_BF16)
NOTHING = join_pb2.PrefetchWeights()


@dataclass
class Backend:
    """Notes the calls of orders; weights and spare of its own."""

    keeps_warm: bool = True
    has_weights: bool = True
    calls: list[str] = field(default_factory=list)

    @property
    def weights(self) -> Backend | None:
        return self if self.has_weights else None

    @property
    def warm_spare(self) -> Backend | None:
        return self if self.keeps_warm else None

    async def prefetch(self, order: Prefetch, progress: LoadProgress) -> None:
        self.calls.append("prefetch")

    async def drop_warm(self) -> None:
        self.calls.append("drop")


async def execute(backend: Backend, *orders: join_pb2.PrefetchWeights, is_stage: bool) -> StageManager:
    manager = StageManager(
        coordinator="127.0.0.1:1", backend=cast("StageBackend", backend), on_serving=lambda serving: None
    )
    manager._loaded = cast("LoadedStage", object()) if is_stage else None
    for order in orders:
        await manager._execute(order, _ignore)
        if (task := manager._prefetch._task) is not None:
            await asyncio.wait_for(task, 10)
    return manager


def _ignore(message: Any) -> None:
    pass


@pytest.mark.parametrize("is_stage", [False, True])
async def test_layers_to_keep_end_a_stage_that_the_plan_does_not_have(is_stage: bool) -> None:
    backend = Backend()
    manager = await execute(backend, WANTED, is_stage=is_stage)
    assert (manager.loaded, backend.calls) == (None, ["prefetch"])


async def test_memory_is_freed_when_no_plan_wants_layers() -> None:
    backend = Backend()
    manager = await execute(backend, WANTED, NOTHING, is_stage=False)
    assert backend.calls == ["prefetch", "drop"]
    assert manager.heartbeat().fetch_detail == "" and manager._prefetch.progress is None


async def test_a_stage_of_the_plan_stays_when_its_old_order_ends() -> None:
    backend = Backend()
    manager = await execute(backend, NOTHING, is_stage=True)
    assert manager.loaded is not None and backend.calls == []


async def test_without_the_flag_a_former_stage_stays() -> None:
    backend = Backend(keeps_warm=False)
    manager = await execute(backend, WANTED, NOTHING, is_stage=True)
    assert manager.loaded is not None and backend.calls == ["prefetch"]


async def test_a_backend_without_weights_prefetches_nothing_and_keeps_its_stage(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = Backend(has_weights=False)
    manager = await execute(backend, WANTED, is_stage=True)
    assert manager.loaded is not None and backend.calls == []
    assert caplog.messages == ["weights are not prefetched: a mock stage has none"]
