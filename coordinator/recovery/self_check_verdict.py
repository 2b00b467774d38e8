"""Judges the results of a self-check; tolerances and their reasons. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from checkpoint import Blueprint, Experts
from coordinator.planner.plan import Plan, StagePlan
from coordinator.recovery.self_check_script import CheckedSlice, Script
from wire.reference import NUM_PROJECTIONS, STATE_WIDTH, LayerReference, Reference
from wire.steps import SliceError, SliceResult, StepResult, TokenLogprobs

MIN_TOLERANCE = 3e-5
"""Measured in float32, where only the order of sums differs: at most 2.4e-6."""

ROUNDINGS = 2.0
"""Measured in bfloat16 and float16: 0.67 to 1.58 times the rounding error given in the reference."""

ROUNDINGS_OF_EXPERTS = 3.0
"""As `ROUNDINGS`, of hidden states of models with experts.

The reference's rounding error has the effect of all choices of experts that rounding may decide, but a check
of some ten tokens may have more such choices than usual. Measured in bfloat16, 94 checks of random models:
hidden states of a stage once 2.1 times that error, and log-probabilities 0.04 to 0.95 times.
"""

_MIN_SPREAD = 1e-3
"""Lower bound, in logits: without it a model with equal logits would have a tolerance of zero."""

_CLEAR_GAPS = 4.0
"""A most likely token whose lead is this many tolerances must be sampled."""

Pair = tuple[TokenLogprobs, TokenLogprobs]
"""Log-probabilities of the pipeline and of the reference after the same token."""


def roundings_of(config: Blueprint) -> float:
    """Return how many times their rounding error hidden states of a correct pipeline deviate at most."""
    has_experts = any(isinstance(kind.feed_forward, Experts) for kind in config.kinds)
    return ROUNDINGS_OF_EXPERTS if has_experts else ROUNDINGS


def tolerance(reference: Reference) -> float:
    """Return the largest `deviation` of a correct pipeline."""
    return max(MIN_TOLERANCE, ROUNDINGS * reference.rounding / _spread(reference))


def deviation(pairs: Sequence[Pair], reference: Reference) -> float:
    """Return the root mean square difference as a fraction of the spread of the logits; NaN if not finite.

    A token that only one side lists is at most as likely as the last one that the other side lists: only the
    excess over that counts.
    """
    squares = [
        difference * difference for row, expected in pairs for difference in _differences(row, expected)
    ]
    if not all(map(math.isfinite, squares)):
        return math.nan
    return math.sqrt(math.fsum(squares) / len(squares)) / _spread(reference) if squares else 0.0


def clearly_expected(expected: TokenLogprobs, reference: Reference) -> int | None:
    """Return the token that a greedy sampler must choose; None if rounding may decide."""
    if len(expected.top) < 2:
        return expected.top[0][0] if expected.top else None
    (token, first), (_, second) = expected.top[:2]
    return token if first - second > _CLEAR_GAPS * tolerance(reference) * _spread(reference) else None


def state_tolerance(layer: LayerReference, roundings: float = ROUNDINGS) -> float:
    """Return the largest `state_deviation` of a correct stage."""
    return max(MIN_TOLERANCE, roundings * layer.rounding)


def state_deviation(
    states: Sequence[float], layer: LayerReference, places: Sequence[tuple[int, int]]
) -> float:
    """Return the root mean square distance of hidden states from the reference, as a fraction of their norms.

    Args:
        states: Projected hidden states of one stage.
        layer: The reference after the stage's last layer.
        places: Offsets of each state in `states` and in the layer's states.

    Returns:
        NaN if a state is not finite.
    """
    squares = []
    for here, there in places:
        ends = here + NUM_PROJECTIONS, there + NUM_PROJECTIONS
        distance = math.dist(states[here : ends[0]], layer.states[there : ends[1]])
        norm = max(layer.states[ends[1]], _MIN_SPREAD)
        squares.append(distance * distance / NUM_PROJECTIONS / (norm * norm))
    if not all(map(math.isfinite, squares)):
        return math.nan
    return math.sqrt(math.fsum(squares) / len(squares)) if squares else 0.0


def _spread(reference: Reference) -> float:
    return max(reference.logit_spread, _MIN_SPREAD)


def _differences(row: TokenLogprobs, expected: TokenLogprobs) -> list[float]:
    """Return the differences for every token that one side lists."""
    here, there = dict(row.top), dict(expected.top)
    last_here, last_there = min(here.values()), min(there.values())
    here[row.token], there[expected.token] = row.logprob, expected.logprob
    both = [here[token] - there[token] for token in here.keys() & there.keys()]
    only_here = [max(0.0, here[token] - last_there) for token in here.keys() - there.keys()]
    only_there = [max(0.0, there[token] - last_here) for token in there.keys() - here.keys()]
    return both + only_here + only_there


class CheckOutcome(Enum):
    """Outcome of a check; the value is its text in logs. FINITE_ONLY: there was no reference."""

    NOT_RUN = "not run yet"
    RUNNING = "under way"
    PASSED = "passed"
    FINITE_ONLY = "finite only"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of a check.

    Attributes:
        detail: Numbers or the reason.
        stage: The first stage that deviates, if known.
        at_us: Time of the check, in microseconds since 1970.
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
        return f"{self.outcome.value}: {self.detail}" if self.detail else self.outcome.value


class BadAnswer(ValueError):
    """The pipeline's results do not match the sent steps; the text has the difference."""


@dataclass(frozen=True, slots=True)
class KnownReference:
    """A reference with its source.

    Attributes:
        origin: Its name in a verdict, such as "the recorded reference".
        worker: The worker that computed it, "" if it was read from a file.
        is_confirmed: A plan has passed with it.
    """

    reference: Reference
    origin: str
    worker: str = ""
    is_confirmed: bool = False


class NoReference(Exception):
    """No reference is available; the text has the reason."""


@dataclass(frozen=True, slots=True)
class AnsweredRow:
    """Log-probabilities after a token, and the token sampled there, if any."""

    part: CheckedSlice
    position: int
    logprobs: TokenLogprobs
    sampled: int | None


@dataclass(frozen=True, slots=True)
class _Hop:
    """Deviation of the hidden states that a stage sends, and its tolerance."""

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
    *,
    roundings: float = ROUNDINGS,
) -> Verdict:
    """Compare the results of a pipeline with a reference.

    Args:
        states: Hidden states that stages but LAST sent and reported; None if they do not record them.
        roundings: See `roundings_of`.
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
    hops = _hops(script, plan, states, known.reference, roundings)
    return _with_stage(verdict, plan, hops)


def _with_stage(verdict: Verdict, plan: Plan, hops: Sequence[_Hop]) -> Verdict:
    """Name the first stage whose hidden states deviate; one such stage is enough for a failure."""
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
    detail = f"{verdict.detail}; stage {last.stage} (worker {last.worker}) receives correct hidden states"
    return replace(verdict, stage=last.stage, detail=detail)


def _hops(
    script: Script,
    plan: Plan,
    states: Mapping[int, Sequence[float]],
    reference: Reference,
    roundings: float,
) -> list[_Hop]:
    """Return the deviations of the stages that reported their hidden states."""
    fresh, cached = _places(script, reference)
    hops = []
    for stage in plan.stages[:-1]:
        found, layer = states.get(stage.stage), reference.layers[stage.layer_end - 1]
        if found is not None and len(found) == STATE_WIDTH * (len(fresh) + len(cached)):
            deviations = [state_deviation(found, layer, places) for places in (fresh, cached)]
            hops.append(_Hop(stage, _larger(*deviations), state_tolerance(layer, roundings)))
    return hops


def _places(script: Script, reference: Reference) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the offsets of each token's state in a stage's report and in the reference.

    Returns:
        Tokens that do not read the cache, and tokens that do, each in the order of the steps.
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
    """Return the larger number; NaN is larger than any."""
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
    """Yield the rows of all results. Raises BadAnswer."""
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
