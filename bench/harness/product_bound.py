"""Time of the slowest stage's matrix products alone, with every other core equally busy."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from bench.harness.peer import Peer
from stageline_rpc.v1 import cluster_pb2


@dataclass(frozen=True, slots=True)
class StageWork:
    """Products of one stage: number of layers, and whether it has the head."""

    num_layers: int
    has_head: bool


def stages_of(status: cluster_pb2.GetStatusResponse) -> list[StageWork]:
    """Stages of the current plan, FIRST to LAST."""
    with_head = (cluster_pb2.STAGE_ROLE_LAST, cluster_pb2.STAGE_ROLE_ONLY)
    return [
        StageWork(worker.layer_end - worker.layer_begin, worker.role in with_head)
        for worker in status.workers
        if worker.role != cluster_pb2.STAGE_ROLE_UNSPECIFIED
    ]


def slowest_candidates(stages: Iterable[StageWork]) -> list[StageWork]:
    """Stages whose work no other stage exceeds in full."""
    distinct = set(stages)
    return [
        stage
        for stage in sorted(distinct, key=lambda stage: (stage.num_layers, stage.has_head))
        if not any(
            other != stage and other.num_layers >= stage.num_layers and other.has_head >= stage.has_head
            for other in distinct
        )
    ]


@dataclass(frozen=True, slots=True)
class ProductTime:
    """Seconds of one pass with plain and with packed weights; the bound is the faster one."""

    plain_s: float
    packed_s: float

    @property
    def best_s(self) -> float:
        return min(self.plain_s, self.packed_s)


class ProductBound:
    """One peer per core, each with one thread and all weights."""

    def __init__(self, *, num_peers: int = 2) -> None:
        self._peers = [Peer("bench.harness.products", str(core)) for core in range(num_peers)]
        self._exit = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for peer in self._peers:
                await stack.enter_async_context(peer)
            await self._ask(self._peers, StageWork(1, has_head=False), batch=1, head_rows=0, seconds=0.01)
            self._exit = stack.pop_all()
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._exit.__aexit__(exception_type, exception, traceback)

    async def slowest_stage(
        self, stages: Iterable[StageWork], *, batch: int, head_rows: int, seconds: float = 1.0
    ) -> ProductTime:
        """The stage with the slowest products; all peers compute that stage's at the same time."""
        times = [
            await self._ask(self._peers, stage, batch=batch, head_rows=head_rows, seconds=seconds)
            for stage in slowest_candidates(stages)
        ]
        return max(times, key=lambda product: product.best_s)

    async def one_after_another(
        self, stages: Iterable[StageWork], *, batch: int, head_rows: int, seconds: float = 0.5
    ) -> ProductTime:
        """Sum over the stages, each alone on an idle machine: the bound of one stream."""
        times = [
            await self._ask(self._peers[:1], stage, batch=batch, head_rows=head_rows, seconds=seconds)
            for stage in stages
        ]
        return ProductTime(
            sum(pass_time.plain_s for pass_time in times), sum(pass_time.packed_s for pass_time in times)
        )

    async def _ask(
        self, peers: Sequence[Peer], stage: StageWork, *, batch: int, head_rows: int, seconds: float
    ) -> ProductTime:
        question = {
            "batch": batch,
            "layers": stage.num_layers,
            "head_rows": head_rows if stage.has_head else 0,
            "seconds": seconds,
        }
        answers = await asyncio.gather(*(peer.ask(question) for peer in peers))
        return ProductTime(
            statistics.mean(answer["plain_s"] for answer in answers),
            statistics.mean(answer["packed_s"] for answer in answers),
        )
