"""The self-check of a plan: what it computes against a reference, before it serves and when it is idle."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from coordinator.cluster.self_check_references import ReferenceQuestion, References, ReferenceSource
from coordinator.cluster.self_check_script import Script, texts_for, write_script
from coordinator.cluster.self_check_verdict import (
    CheckOutcome,
    KnownReference,
    NoReference,
    Verdict,
    judge,
)
from coordinator.planning.plan import Plan
from coordinator.scheduling.kv_log import KvLog
from wire.clock import wall_clock_us
from wire.reference import decode_states
from wire.steps import Step, StepResult
from wire.wire_dtypes import WireDType

ANSWER_TIMEOUT_S = 30.0
"""For the answer to each step of a plan's first check, after that to the one before: kernels may be cold."""
STATES_TIMEOUT_S = 5.0
"""For what all stages have handed on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedEpoch:
    """What a check needs of the epoch that it runs in: its empty or idle ledger, and the way in.

    `ask_states` has all stages tell what they have handed on, of which `SelfCheck.take_states` is told; None
    where they have not kept it. With `is_watched`, the caller gives up overdue steps and cancels the check;
    without, `SelfCheck.run` raises TimeoutError.
    """

    epoch: int
    plan: Plan
    kv: KvLog
    first_step_id: int
    send: Callable[[Step], None]
    ask_states: Callable[[], None] | None
    is_watched: bool = False


class SelfCheck:
    """One per coordinator; checks one epoch at a time. `verdict` is that of the last check."""

    def __init__(
        self,
        references: References,
        *,
        vocab_size: int,
        interval_s: float = 0.0,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
        states_timeout_s: float = STATES_TIMEOUT_S,
        now_us: Callable[[], int] = wall_clock_us,
    ) -> None:
        """A check is due again after `interval_s`; never, if that is 0. `now_us`: microseconds since 1970."""
        self.verdict = Verdict(outcome=CheckOutcome.NOT_RUN)
        self._references = references
        self._vocab_size = vocab_size
        self._interval_s = interval_s
        self._answer_timeout_s = answer_timeout_s
        self._states_timeout_s = states_timeout_s
        self._now_us = now_us
        self._question: ReferenceQuestion | None = None
        self._passed: ReferenceQuestion | None = None
        self._results = asyncio.Queue[StepResult]()
        self._states = asyncio.Queue[tuple[int, bytes]]()
        self._checked_at_s = 0.0

    async def reference(
        self, plan: Plan, wire_dtype: WireDType, sources: Sequence[ReferenceSource]
    ) -> KnownReference | NoReference:
        """What the next `run` compares with."""
        texts = texts_for(plan, self._vocab_size)
        self._question = ReferenceQuestion(plan.dtype, wire_dtype, texts)
        try:
            return await self._references.get(self._question, sources)
        except NoReference as error:
            return error

    async def run(self, epoch: CheckedEpoch, known: KnownReference | NoReference) -> Verdict:
        """Sends the steps of a check, and judges what is answered. Raises TimeoutError where an answer does
        not come. After it, `keep_reference` is due.
        """
        script, results = await self._play(epoch)
        states = None
        if epoch.ask_states is not None and isinstance(known, KnownReference):
            states = await self._all_states(len(epoch.plan.stages) - 1, script, epoch.ask_states)
        verdict = judge(script, epoch.plan, results, states, known)
        if isinstance(known, KnownReference) and self._question is not None:
            if verdict.is_good:
                self._passed = self._question
            else:
                self._references.distrust(self._question)
        self._checked_at_s = asyncio.get_running_loop().time()
        self.verdict = replace(verdict, at_us=self._now_us())
        return self.verdict

    async def keep_reference(self) -> None:
        """Keeps the reference that the last check has passed with, if it has. Writes to disk: no request
        should wait for it.
        """
        question, self._passed = self._passed, None
        if question is not None:
            await self._references.confirm(question)

    def begin(self) -> None:
        """The first check is about to run."""
        if self.verdict.outcome is CheckOutcome.NOT_RUN:
            self.verdict = Verdict(outcome=CheckOutcome.RUNNING)

    def is_due(self) -> bool:
        """The last check is long ago, or what it could not be compared with is here by now."""
        if not self._interval_s or self.verdict.at_us == 0:
            return False
        is_incomplete = self.verdict.outcome is CheckOutcome.FINITE_ONLY
        if is_incomplete and self._question is not None and self._references.has(self._question):
            return True
        return asyncio.get_running_loop().time() - self._checked_at_s >= self._interval_s

    def take(self, result: StepResult) -> None:
        """What the pipeline answers."""
        self._results.put_nowait(result)

    def take_states(self, stage: int, states: bytes) -> None:
        """What a stage has handed on."""
        self._states.put_nowait((stage, states))

    def close(self) -> None:
        """Nobody waits for references any more."""
        self._references.close()

    async def _play(self, epoch: CheckedEpoch) -> tuple[Script, list[StepResult]]:
        self._results = asyncio.Queue()
        texts = texts_for(epoch.plan, self._vocab_size)
        script = write_script(epoch.plan, epoch.epoch, texts, epoch.kv, first_step_id=epoch.first_step_id)
        for each in script.steps:
            epoch.send(each.step)
        results = []
        timeout_s = None if epoch.is_watched else self._answer_timeout_s
        for _ in script.steps:
            async with asyncio.timeout(timeout_s):
                results.append(await self._results.get())
        return script, results

    async def _all_states(
        self, num_stages: int, script: Script, ask: Callable[[], None]
    ) -> dict[int, Sequence[float]]:
        """Those that come in time and are of the right size."""
        num_tokens = sum(each.step.num_tokens for each in script.steps)
        self._states = asyncio.Queue()
        states: dict[int, Sequence[float]] = {}
        if num_stages:
            ask()
        with contextlib.suppress(TimeoutError, ValueError):
            async with asyncio.timeout(self._states_timeout_s):
                for _ in range(num_stages):
                    stage, data = await self._states.get()
                    states[stage] = decode_states(data, num_tokens)
        return states
