"""A self-check without numbers: a step goes through all stages, and a machine is bad or it is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from coordinator.planner.plan import Plan
from coordinator.recovery.self_check import CheckedEpoch, ReferenceSource
from coordinator.recovery.self_check_verdict import CheckOutcome, NoReference, Verdict
from wire.steps import Step, StepResult
from wire.tensors import WireDType

ANSWER_TIMEOUT_S = 3.0
INTERVAL_S = 0.3
"""Idle moments are short here."""


class SimCheck:
    """In the place of `SelfCheck`. `is_bad` returns whether a worker has bad weights; the bad worker
    is named where every stage returns its hidden states.
    """

    def __init__(self, is_bad: Callable[[str], bool]) -> None:
        self.verdict = Verdict(outcome=CheckOutcome.NOT_RUN)
        self._is_bad = is_bad
        self._answer: asyncio.Future[StepResult] | None = None
        self._checked_at_s = 0.0

    def begin(self) -> None:
        pass

    async def reference(
        self, plan: Plan, wire_dtype: WireDType, sources: Sequence[ReferenceSource]
    ) -> NoReference:
        return NoReference("nothing is computed")

    async def run(self, epoch: CheckedEpoch, known: NoReference) -> Verdict:
        self._answer = asyncio.get_running_loop().create_future()
        epoch.send(Step(epoch=epoch.epoch, step_id=epoch.first_step_id, digest=epoch.kv.digest))
        async with asyncio.timeout(None if epoch.is_watched else ANSWER_TIMEOUT_S):
            await self._answer
        self._checked_at_s = asyncio.get_running_loop().time()
        bad = [stage for stage in epoch.plan.stages if self._is_bad(stage.worker)]
        if not bad:
            return Verdict(outcome=CheckOutcome.PASSED)
        names = ", ".join(stage.worker for stage in bad)
        is_reported = epoch.ask_states is not None and len(bad) % 2
        stage = bad[0].stage if is_reported else None
        return Verdict(outcome=CheckOutcome.FAILED, detail=names, stage=stage)

    async def keep_reference(self) -> None:
        pass

    def record_failure(self, worker: str) -> bool:
        return False

    def source_left(self, worker: str) -> bool:
        return False

    def is_due(self) -> bool:
        return asyncio.get_running_loop().time() - self._checked_at_s >= INTERVAL_S

    def take(self, result: StepResult) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(result)

    def take_states(self, stage: int, states: bytes) -> None:
        pass

    def close(self) -> None:
        pass
