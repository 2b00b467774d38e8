"""Judges the results of a self-check; tolerances and their reasons. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from coordinator.planner.plan import Plan, StagePlan
from coordinator.recovery.self_check_script import CheckedSlice, Script
from wire.reference import NUM_PROJECTIONS, STATE_WIDTH, LayerReference, Reference
from wire.steps import SliceError, SliceResult, StepResult, TokenLogprobs

LEAST_TOLERANCE = 3e-5
"""Measured in float32, where another order of sums is all that differs: at most 2.4e-6."""

_ROUNDINGS = 2.0
"""Measured in bfloat16 and float16: 0.67 to 1.58 times what the reference says of rounding."""

_LEAST_SPREAD = 1e-3
"""Logits of a model that prefers nothing have no spread, and what rounding makes of it is no measure."""

_CLEAR_GAPS = 4.0
"""A most likely token that leads by so many tolerances must be sampled."""

Pair = tuple[TokenLogprobs, TokenLogprobs]
"""What a pipeline says after a token, and what the reference says."""


def tolerance(reference: Reference) -> float:
    """The largest `deviation` that a good pipeline may have."""
    return max(LEAST_TOLERANCE, _ROUNDINGS * reference.rounding / _spread(reference))


def deviation(pairs: Sequence[Pair], reference: Reference) -> float:
    """The root mean square of the differences, as a fraction of the spread of the logits; not a number where
    one of them is not.

    A token that only one side lists is at most as likely as the last that the other lists: it counts with
    what it is above that.
    """
    squares = [
        difference * difference for row, expected in pairs for difference in _differences(row, expected)
    ]
    if not all(map(math.isfinite, squares)):
        return math.nan
    return math.sqrt(math.fsum(squares) / len(squares)) / _spread(reference) if squares else 0.0


def clearly_expected(expected: TokenLogprobs, reference: Reference) -> int | None:
    """The token that a greedy sampler must choose; None where rounding may decide."""
    if len(expected.top) < 2:
        return expected.top[0][0] if expected.top else None
    (token, first), (_, second) = expected.top[:2]
    return token if first - second > _CLEAR_GAPS * tolerance(reference) * _spread(reference) else None


def state_tolerance(layer: LayerReference) -> float:
    """The largest `state_deviation` that a good stage may have."""
    return max(LEAST_TOLERANCE, _ROUNDINGS * layer.rounding)


def state_deviation(
    states: Sequence[float], layer: LayerReference, places: Sequence[tuple[int, int]]
) -> float:
    """The root mean square of how far hidden states are from those of the reference, as a fraction of their
    norms; not a number where one of them is not. `places`: where each begins in `states`, and in the layer's.
    """
    squares = []
    for here, there in places:
        ends = here + NUM_PROJECTIONS, there + NUM_PROJECTIONS
        distance = math.dist(states[here : ends[0]], layer.states[there : ends[1]])
        norm = max(layer.states[ends[1]], _LEAST_SPREAD)
        squares.append(distance * distance / NUM_PROJECTIONS / (norm * norm))
    if not all(map(math.isfinite, squares)):
        return math.nan
    return math.sqrt(math.fsum(squares) / len(squares)) if squares else 0.0


def _spread(reference: Reference) -> float:
    return max(reference.logit_spread, _LEAST_SPREAD)


def _differences(row: TokenLogprobs, expected: TokenLogprobs) -> list[float]:
    """Of every token that one of them lists."""
    here, there = dict(row.top), dict(expected.top)
    last_here, last_there = min(here.values()), min(there.values())
    here[row.token], there[expected.token] = row.logprob, expected.logprob
    both = [here[token] - there[token] for token in here.keys() & there.keys()]
    only_here = [max(0.0, here[token] - last_there) for token in here.keys() - there.keys()]
    only_there = [max(0.0, there[token] - last_here) for token in there.keys() - here.keys()]
    return both + only_here + only_there


class CheckOutcome(Enum):
    """The value is how it is called in the log. FINITE_ONLY: there was nothing to compare with."""

    NOT_RUN = "not run yet"
    RUNNING = "under way"
    PASSED = "passed"
    FINITE_ONLY = "finite only"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`detail` gives numbers or the reason. `stage` deviates first, where that is known. `at_us`: when it was
    given, in microseconds since 1970.
    """

    outcome: CheckOutcome
    detail: str = ""
    deviation: float | None = None
    allowed: float | None = None
    stage: int | None = None
    at_us: int = 0

    @property
    def is_good(self) -> bool:
        return self.outcome is not CheckOutcome.FAILED

    @property
    def text(self) -> str:
        """The whole in a sentence."""
        return f"{self.outcome.value}: {self.detail}" if self.detail else self.outcome.value


class BadAnswer(ValueError):
    """The pipeline has not answered with what is owed; the text says with what."""


@dataclass(frozen=True, slots=True)
class KnownReference:
    """`origin`, as in "the recorded reference"; `worker` has computed it, "" if it was read from a file.
    `is_confirmed`: a plan has passed with it.
    """

    reference: Reference
    origin: str
    worker: str = ""
    is_confirmed: bool = False


class NoReference(Exception):
    """There is nothing to compare with; the text says why."""


@dataclass(frozen=True, slots=True)
class AnsweredRow:
    """What the pipeline says after a token; `sampled` is what it has chosen to follow, if it chooses."""

    part: CheckedSlice
    position: int
    logprobs: TokenLogprobs
    sampled: int | None


@dataclass(frozen=True, slots=True)
class _Hop:
    """How far what a stage hands on is from the reference, and may be."""

    stage: StagePlan
    deviation: float
    allowed: float

    @property
    def is_good(self) -> bool:
        return self.deviation <= self.allowed

    def __str__(self) -> str:
        return (
            f"the hidden states of stage {self.stage.stage} (worker {self.stage.worker}) differ by "
            f"{self.deviation:.2g} of their norm, and {self.allowed:.2g} is allowed"
        )


def judge(
    script: Script,
    plan: Plan,
    results: Sequence[StepResult],
    states: Mapping[int, Sequence[float]] | None,
    known: KnownReference | NoReference,
) -> Verdict:
    """Whether these are the answers of a good pipeline. `states`: what each stage but LAST has handed on, of
    those that have told; None where they do not keep it.
    """
    try:
        rows = list(_answered_rows(script, results))
    except BadAnswer as error:
        return Verdict(outcome=CheckOutcome.FAILED, detail=str(error))
    if isinstance(known, NoReference):
        return _judge_alone(rows, known)
    verdict = _compare(script, rows, known)
    if states is None:
        return verdict
    hops = _hops(script, plan, states, known.reference)
    return _with_stage(verdict, plan, hops)


def _with_stage(verdict: Verdict, plan: Plan, hops: Sequence[_Hop]) -> Verdict:
    """A stage that hands on what is wrong is enough for a failure, and the first such stage is its cause."""
    bad, last = next((hop for hop in hops if not hop.is_good), None), plan.stages[-1]
    if bad is not None and verdict.is_good:
        return Verdict(
            outcome=CheckOutcome.FAILED,
            detail=str(bad),
            deviation=bad.deviation,
            allowed=bad.allowed,
            stage=bad.stage.stage,
        )
    if bad is not None:
        return replace(verdict, stage=bad.stage.stage, detail=f"{verdict.detail}; first, {bad}")
    if len(hops) < len(plan.stages) - 1:
        told = {hop.stage.stage for hop in hops}
        silent = ", ".join(str(stage.stage) for stage in plan.stages[:-1] if stage.stage not in told)
        return replace(verdict, detail=f"{verdict.detail}; no hidden states of stage {silent} to compare")
    if verdict.is_good:
        return verdict
    detail = f"{verdict.detail}; stage {last.stage} (worker {last.worker}) gets the right hidden states"
    return replace(verdict, stage=last.stage, detail=detail)


def _hops(
    script: Script, plan: Plan, states: Mapping[int, Sequence[float]], reference: Reference
) -> list[_Hop]:
    """Of the stages that have told what they handed on."""
    fresh, cached = _places(script, reference)
    hops = []
    for stage in plan.stages[:-1]:
        found, layer = states.get(stage.stage), reference.layers[stage.layer_end - 1]
        if found is not None and len(found) == STATE_WIDTH * (len(fresh) + len(cached)):
            deviations = [state_deviation(found, layer, places) for places in (fresh, cached)]
            hops.append(_Hop(stage, _larger(*deviations), state_tolerance(layer)))
    return hops


def _places(script: Script, reference: Reference) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Of all tokens in the order of the steps: where its state begins in what a stage tells, and in the
    reference. First those that see nothing of the cache.
    """
    fresh: list[tuple[int, int]] = []
    cached: list[tuple[int, int]] = []
    here = 0
    for part in (part for checked_step in script.steps for part in checked_step.slices):
        for position in range(part.first, part.first + part.num_tokens):
            place = (here, reference.state_index(part.text, position))
            (cached if part.reads_cache else fresh).append(place)
            here += STATE_WIDTH
    return fresh, cached


def _compare(script: Script, rows: Sequence[AnsweredRow], known: KnownReference) -> Verdict:
    reference = known.reference
    allowed = tolerance(reference)
    prompts = deviation([_pair(row, reference) for row in rows if not row.part.reads_cache], reference)
    cached = deviation([_pair(row, reference) for row in rows if row.part.reads_cache], reference)
    found = _larger(prompts, cached)
    detail = (
        f"the log-probabilities of {len(rows)} tokens in {len(script.steps)} steps differ from "
        f"{known.origin} by {found:.2g} of the spread of the logits, and {allowed:.2g} is allowed"
        f"{_left_out(script)}"
    )
    outcome = CheckOutcome.PASSED if found <= allowed else CheckOutcome.FAILED
    if outcome is CheckOutcome.PASSED and (wrong := _wrongly_sampled(rows, reference)) is not None:
        outcome, detail = CheckOutcome.FAILED, f"{wrong}; {detail}"
    return Verdict(outcome=outcome, detail=detail, deviation=found, allowed=allowed)


def _larger(one: float, other: float) -> float:
    """Not a number is more than anything."""
    return one if math.isnan(one) or one > other else other


def _left_out(script: Script) -> str:
    return f"; not checked: {', '.join(script.left_out)}" if script.left_out else ""


def _pair(row: AnsweredRow, reference: Reference) -> Pair:
    return row.logprobs, reference.texts[row.part.text].rows[row.position]


def _wrongly_sampled(rows: Sequence[AnsweredRow], reference: Reference) -> str | None:
    for row in rows:
        expected = clearly_expected(_pair(row, reference)[1], reference)
        if row.sampled is not None and expected is not None and row.sampled != expected:
            return f"token {row.sampled} was sampled where {expected} is by far the most likely"
    return None


def _judge_alone(rows: Sequence[AnsweredRow], reason: NoReference) -> Verdict:
    values = [
        value for row in rows for value in (row.logprobs.logprob, *(value for _, value in row.logprobs.top))
    ]
    if all(map(math.isfinite, values)):
        return Verdict(outcome=CheckOutcome.FINITE_ONLY, detail=f"there is no reference: {reason}")
    return Verdict(outcome=CheckOutcome.FAILED, detail="log-probabilities are not finite")


def _answered_rows(script: Script, results: Sequence[StepResult]) -> Iterator[AnsweredRow]:
    """Raises BadAnswer."""
    for checked_step, result in zip(script.steps, results, strict=True):
        owed = [part for part in checked_step.slices if part.num_scored or part.is_sampled]
        sequences = [entry.sequence for entry in result.results]
        if result.step_id != checked_step.step.step_id or sequences != [part.sequence for part in owed]:
            raise BadAnswer(
                f"an answer to step {result.step_id} with {len(sequences)} results, "
                f"where {len(owed)} of step {checked_step.step.step_id} are due"
            )
        for part, entry in zip(owed, result.results, strict=True):
            yield from _rows_of(part, entry)


def _rows_of(part: CheckedSlice, entry: SliceResult) -> Iterator[AnsweredRow]:
    outcome, sampled = entry.outcome, entry.logprobs
    if isinstance(outcome, SliceError):
        raise BadAnswer(outcome.message.replace(f" of {part.sequence}", ""))
    if len(entry.prompt_logprobs) != part.num_scored:
        raise BadAnswer(f"{len(entry.prompt_logprobs)} log-probabilities for {part.num_scored} tokens")
    for offset, row in enumerate(entry.prompt_logprobs):
        yield _row(part, part.first + offset, row, None)
    if part.is_sampled:
        if sampled is None or outcome is None or sampled.token != outcome:
            raise BadAnswer(f"token {outcome} without its log-probability")
        yield _row(part, part.first + part.num_tokens - 1, sampled, outcome)


def _row(part: CheckedSlice, position: int, row: TokenLogprobs, sampled: int | None) -> AnsweredRow:
    if not row.top:
        raise BadAnswer(f"no most likely tokens at position {position}")
    return AnsweredRow(part, position, row, sampled)
