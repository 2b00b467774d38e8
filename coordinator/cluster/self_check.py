"""The self-check of a plan before it serves: its logits against a reference."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.cluster.self_check_references import (
    KnownReference,
    NoReference,
    References,
    ReferenceSource,
)
from coordinator.cluster.self_check_step import BadAnswer, answered_rows, check_step, prompt_for
from coordinator.cluster.self_check_tolerance import deviation, tolerance
from coordinator.planning.plan import Plan
from wire.steps import Step, StepResult, TokenLogprobs

ANSWER_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """`text` says in a sentence how it went."""

    is_good: bool
    text: str


class SelfCheck:
    """One per coordinator; checks one plan at a time. `text` is what status says of the last check."""

    def __init__(
        self, references: References, *, vocab_size: int, answer_timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        self.text = "not run yet"
        self._references = references
        self._vocab_size = vocab_size
        self._answer_timeout_s = answer_timeout_s
        self._answer: asyncio.Future[StepResult] | None = None
        self._is_disputed = False

    async def run(
        self, plan: Plan, epoch: int, send: Callable[[Step], None], sources: Sequence[ReferenceSource]
    ) -> Verdict:
        """Sends the one step of `epoch`, and judges what is answered. Raises TimeoutError when nothing is."""
        prompt = prompt_for(plan, self._vocab_size)
        self.text = "under way"
        try:
            known: KnownReference | NoReference = await self._references.get(plan.dtype, prompt, sources)
        except NoReference as error:
            known = error
        self._answer = asyncio.get_running_loop().create_future()
        send(check_step(plan, epoch, prompt))
        async with asyncio.timeout(self._answer_timeout_s):
            result = await self._answer
        verdict = judge(result, len(prompt), known)
        if isinstance(known, KnownReference) and known.worker and (self._is_disputed or not verdict.is_good):
            verdict = await self._outvoted(result, known, plan, sources)
        self.text = verdict.text
        return verdict

    async def _outvoted(
        self, result: StepResult, known: KnownReference, plan: Plan, sources: Sequence[ReferenceSource]
    ) -> Verdict:
        """A worker whose reference differs may be what is wrong: others are asked, and most decide."""
        opinions = [known, *await self._references.others(plan.dtype, known, sources)]
        judged = [(each, judge(result, len(known.reference.tokens), each)) for each in opinions]
        passed = [each for each in judged if each[1].is_good]
        failed = [each for each in judged if not each[1].is_good]
        self._is_disputed = len(passed) == len(failed)
        if len(passed) > len(failed):
            self._references.settle(plan.dtype, passed[0][0])
            return Verdict(
                True, passed[0][1].text + "".join(f"; not so from {each.origin}" for each, _ in failed)
            )
        return Verdict(
            False, failed[0][1].text + "".join(f", but not from {each.origin}" for each, _ in passed)
        )

    def take(self, result: StepResult) -> None:
        """What the pipeline answers."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(result)


def judge(result: StepResult, num_tokens: int, known: KnownReference | NoReference) -> Verdict:
    """Whether an answer to the check's prompt of `num_tokens` tokens is that of a good pipeline. Pure."""
    try:
        rows = answered_rows(result, num_tokens)
    except BadAnswer as error:
        return Verdict(False, f"failed: {error}")
    if isinstance(known, NoReference):
        return _judge_alone(rows, known)
    found, allowed = deviation(rows, known.reference), tolerance(known.reference)
    text = (
        f"the log-probabilities of {num_tokens} tokens differ from {known.origin} by {found:.2g} of the "
        f"spread of the logits, and {allowed:.2g} is allowed"
    )
    return Verdict(True, f"passed: {text}") if found <= allowed else Verdict(False, f"failed: {text}")


def _judge_alone(rows: Sequence[TokenLogprobs], reason: NoReference) -> Verdict:
    values = [value for row in rows for value in (row.logprob, *(value for _, value in row.top))]
    if all(map(math.isfinite, values)):
        return Verdict(True, f"finite only, because there is no reference: {reason}")
    return Verdict(False, "failed: log-probabilities are not finite")
