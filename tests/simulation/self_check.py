"""A self-check without numbers: a step goes through all stages, and a machine is bad or it is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from coordinator.cluster.self_check import Verdict
from coordinator.cluster.self_check_references import ReferenceSource
from coordinator.planning.plan import Plan
from coordinator.scheduling.kv_log import KvLog
from wire.steps import Step, StepResult

ANSWER_TIMEOUT_S = 3.0


class SimCheck:
    """In the place of `SelfCheck`. `is_bad` says of a worker whether its weights are."""

    def __init__(self, is_bad: Callable[[str], bool]) -> None:
        self.text = "not run yet"
        self._is_bad = is_bad
        self._answer: asyncio.Future[StepResult] | None = None

    async def run(
        self, plan: Plan, epoch: int, send: Callable[[Step], None], sources: Sequence[ReferenceSource]
    ) -> Verdict:
        self._answer = asyncio.get_running_loop().create_future()
        kv = KvLog(num_blocks=plan.num_blocks, block_size=plan.block_size)
        send(Step(epoch=epoch, step_id=0, digest=kv.digest))
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await self._answer
        bad = [stage.worker for stage in plan.stages if self._is_bad(stage.worker)]
        return Verdict(not bad, f"failed: {', '.join(bad)}" if bad else "passed")

    def take(self, result: StepResult) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(result)
