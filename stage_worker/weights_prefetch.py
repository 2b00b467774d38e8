"""Fetches layers that later assignments may want, while the worker has nothing else to load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from checkpoint.errors import CheckpointError
from stage_worker.assignment import Prefetch
from stage_worker.backends.backend import LoadCancelled, LoadProgress, StageLoadError, StageWeights
from stageline_rpc.internal.v1 import join_pb2

log = logging.getLogger(__name__)

Reply = Callable[[join_pb2.JoinRequest], None]


class WeightsPrefetch:
    """At most one prefetch, which a load ends."""

    def __init__(self, on_change: Callable[[Reply], Awaitable[None]]) -> None:
        """`on_change` is awaited when the worker has more weights than before."""
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None
        self._order: Prefetch | None = None
        self.progress: LoadProgress | None = None
        """Of the present prefetch, or the last one until a load begins."""

    def start(self, order: Prefetch | None, weights: StageWeights, reply: Reply) -> None:
        """Replace the prefetch, unless it is the same; None ends it."""
        if order is not None and order == self._order:
            return
        self.cancel()
        if order is not None:
            self._order, self.progress = order, LoadProgress()
            run = self._run(weights, order, self.progress, reply)
            self._task = asyncio.create_task(run, name="weights-prefetch")

    def cancel(self) -> None:
        """Let the prefetch end soon."""
        if self.progress is not None:
            self.progress.cancel()
        self._order = None

    def end(self) -> None:
        """Cancel the prefetch, and forget it; a load waits until it has ended."""
        self.cancel()
        self.progress = None

    async def _run(
        self, weights: StageWeights, order: Prefetch, progress: LoadProgress, reply: Reply
    ) -> None:
        try:
            await weights.prefetch(order, progress)
        except LoadCancelled:
            log.info("the prefetch of weights was cancelled")
        except (StageLoadError, CheckpointError, OSError) as error:
            log.warning("weights are not prefetched: %s", error)
            self._fail(order, progress, str(error))
        except Exception as error:
            log.exception("weights are not prefetched")
            self._fail(order, progress, f"{type(error).__name__}, see the log of the worker")
        else:
            await self._on_change(reply)

    def _fail(self, order: Prefetch, progress: LoadProgress, problem: str) -> None:
        """Show the problem, and let the same order begin again."""
        progress.fetch_detail = f"prefetch failed: {problem}"
        if self._order is order:
            self._order = None
