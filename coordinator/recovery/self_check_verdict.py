"""Judges the results of a self-check; tolerances and their reasons. Pure."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from coordinator.planner.plan import Plan, StagePlan
from coordinator.recovery.self_check_script import CheckedSlice, Phase, Script
from wire.reference import NUM_PROJECTIONS, STATE_WIDTH, LayerReference, Reference
from wire.steps import SliceError, SliceResult, StepResult, TokenLogprobs

_MIN_ROUNDING = 1.5e-5
"""Lower bound of a token's rounding, for models in which rounding has no effect."""

ROUNDINGS = 2.4
"""Largest root mean square of a correct pipeline, where each token counts in multiples of its rounding.

Measured with random models of all families (docs/self-check.md).
"""

TYPICAL_ROUNDINGS = 1.7
"""Largest geometric mean over tokens of a correct pipeline, in multiples of the typical rounding.

Other routes of a few tokens, which make up the root mean square of models with experts, hardly change it, so
it shows faults that affect all tokens a little. Measured as above.
"""

_GROWTH = 1.5
"""Largest growth of the typical deviation, in multiples of the typical rounding, from one stage to the next.

Rounding grows along the layers as the reference does, in deep mixtures far less than the highest rounding
allows; a fault adds to it in one stage only. Measured as above.
"""

_GROWN = 1.15
"""A typical deviation of this many typical roundings passes, however little the stage before deviates."""

_MIN_GROWN = 1e-3
"""As `_GROWN`, as a fraction: in float32, no fault is near rounding, and stages may sum very differently."""

_LEAST_RATIO = 0.25
"""A token that happens to deviate less than this share of its rounding counts as much, so that tokens without
a fault cannot hide the others.
"""

_MIN_SPREAD = 1e-3
"""Lower bound, in logits: without it a model with equal logits would have a tolerance of zero."""

_CLEAR_GAP = 8.0
"""A most likely token whose lead is this many roundings of its row must be sampled."""

Pair = tuple[TokenLogprobs, TokenLogprobs]
"""Log-probabilities of the pipeline and of the reference after the same token."""


@dataclass(frozen=True, slots=True)
class Token:
    """Deviation of one token from a reference, and its roundings, as fractions of one unit."""

    deviation: float
    typical: float
    highest: float


@dataclass(frozen=True, slots=True)
class Deviation:
    """Deviation of a group of tokens, and the largest one of a correct pipeline. `is_typical`: a geometric
    mean, instead of a root mean square.
    """

    value: float
    allowed: float
    is_typical: bool = False

    @property
    def is_good(self) -> bool:
        return self.value <= self.allowed

    @property
    def share(self) -> float:
        """Share of the allowed deviation; above 1 for a failure."""
        return math.inf if math.isnan(self.value) else self.value / self.allowed

    @property
    def extent(self) -> str:
        return f"{'typically ' if self.is_typical else ''}by {self.value:.2g}"


class TokenGroup:
    """Deviations of the tokens of one phase, after one stage or in log-probabilities.

    Attributes:
        ratio: Typical deviation in multiples of the typical rounding, NaN if not finite.
    """

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tokens
        typical = [max(token.typical, _MIN_ROUNDING) for token in tokens]
        self._usual = statistics.geometric_mean(typical)
        self._highest = [max(token.highest, self._usual) for token in tokens]
        least = (
            max(token.deviation, _LEAST_RATIO * rounding)
            for token, rounding in zip(tokens, typical, strict=True)
        )
        self._unit = math.sqrt(self._usual * statistics.geometric_mean(self._highest))
        self.ratio = statistics.geometric_mean(least) / self._unit

    def deviations(self, comparable: Sequence[float]) -> tuple[Deviation, Deviation]:
        """Return the root mean square of the tokens, NaN if not finite, and the typical deviation.

        `comparable` are ratios of groups that a fault of this group need not affect.
        """
        highest = self._highest
        ratios = [token.deviation / bound for token, bound in zip(self._tokens, highest, strict=True)]
        unit = _root_mean_square(highest)
        return (
            Deviation(unit * _root_mean_square(ratios), ROUNDINGS * self._margin(2) * unit),
            Deviation(self.ratio * self._unit, self._typically_allowed(comparable), is_typical=True),
        )

    def _typically_allowed(self, comparable: Sequence[float]) -> float:
        allowed = TYPICAL_ROUNDINGS * self._margin(1 + 5 / len(self._tokens)) * self._unit
        if not comparable or not all(map(math.isfinite, comparable)):
            return allowed
        grown = _GROWTH * self._margin(8) * max(comparable) * self._unit
        return min(allowed, max(grown, _GROWN * self._margin(1) * self._usual, _MIN_GROWN))

    def _margin(self, num_doubtful: float) -> float:
        """Means of few tokens vary more."""
        return 1 + num_doubtful / len(self._tokens)


Groups = Mapping[Phase, TokenGroup]
"""Tokens of one stage, or of the log-probabilities; phases without tokens are absent."""


def groups_of(tokens: Mapping[Phase, Sequence[Token]]) -> Groups:
    return {phase: TokenGroup(group) for phase, group in tokens.items() if group}


def deviations_of(groups: Groups, before: Groups | None = None) -> list[Deviation]:
    """Return the deviations of the tokens of each phase, the worst first.

    The first one is not a typical one, unless only that fails.

    Args:
        before: Groups of the stage before.
    """
    found: list[Deviation] = []
    for phase, group in groups.items():
        others = [(before or {}).get(phase), None if phase is Phase.FRESH else groups.get(Phase.FRESH)]
        found += group.deviations([other.ratio for other in others if other is not None])
    found.sort(key=lambda deviation: deviation.share, reverse=True)
    found.sort(key=lambda deviation: (deviation.is_good, deviation.is_typical))
    return found


def _root_mean_square(values: Sequence[float]) -> float:
    if not all(map(math.isfinite, values)):
        return math.nan
    return math.sqrt(math.fsum(value * value for value in values) / len(values))


def row_deviation(row: TokenLogprobs, expected: TokenLogprobs, reference: Reference) -> float:
    """Return the root mean square difference of two rows as a fraction of the spread of the logits.

    A token that only one side lists is at most as likely as the last one that the other side lists: only the
    excess over that counts.
    """
    squares = [difference * difference for difference in _differences(row, expected)]
    return math.sqrt(math.fsum(squares) / len(squares)) / _spread(reference)


def state_deviation(states: Sequence[float], here: int, layer: LayerReference, token: int) -> float:
    """Return the distance of a hidden state from the reference, as a fraction of its norm.

    Args:
        states: Projected hidden states of one stage.
        here: Offset of the state in `states`.
        layer: The reference after the stage's last layer.
        token: Index of the token in the reference.
    """
    there = token * STATE_WIDTH
    ends = here + NUM_PROJECTIONS, there + NUM_PROJECTIONS
    distance = math.dist(states[here : ends[0]], layer.states[there : ends[1]])
    return distance / math.sqrt(NUM_PROJECTIONS) / max(layer.states[ends[1]], _MIN_SPREAD)


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
        remedy: Action for the operator, after a failure.
        share: The largest share of an allowed deviation, of any kind and stage.
    """

    outcome: CheckOutcome
    detail: str = ""
    deviation: float | None = None
    allowed: float | None = None
    stage: int | None = None
    at_us: int = 0
    remedy: str = ""
    share: float | None = None

    @property
    def is_good(self) -> bool:
        return self.outcome is not CheckOutcome.FAILED

    @property
    def text(self) -> str:
        texts = [text for text in (self.detail, self.remedy) if text]
        return f"{self.outcome.value}: {'; '.join(texts)}" if texts else self.outcome.value


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
    """Tokens and deviations of the hidden states that a stage sends, the worst first."""

    stage: StagePlan
    groups: Groups
    deviations: Sequence[Deviation]

    @property
    def worst(self) -> Deviation:
        return self.deviations[0]

    def __str__(self) -> str:
        return (
            f"the hidden states of stage {self.stage.stage} (worker {self.stage.worker}) differ "
            f"{self.worst.extent} of their norm, and {self.worst.allowed:.2g} is allowed"
        )


def judge(
    script: Script,
    plan: Plan,
    results: Sequence[StepResult],
    states: Mapping[int, Sequence[float]] | None,
    known: KnownReference | NoReference,
) -> Verdict:
    """Compare the results of a pipeline with a reference.

    Args:
        states: Hidden states that stages but LAST sent and reported; None if they do not record them.
    """
    try:
        rows = list(_answered_rows(script, results))
    except BadAnswer as error:
        return Verdict(outcome=CheckOutcome.FAILED, detail=str(error), remedy=_remedy(plan, None))
    if isinstance(known, NoReference):
        verdict = _judge_alone(rows, known)
    elif states is None:
        verdict = _compare(script, rows, known, None)
    else:
        hops = _hops(script, plan, states, known.reference)
        verdict = _compare(script, rows, known, hops[-1].groups if hops else None)
        shares = [deviation.share for hop in hops for deviation in hop.deviations]
        verdict = replace(_with_stage(verdict, plan, hops), share=max(verdict.share or 0.0, *shares, 0.0))
    return verdict if verdict.is_good else replace(verdict, remedy=_remedy(plan, verdict.stage))


def _remedy(plan: Plan, stage: int | None) -> str:
    if stage is None:
        suspects = f"the workers {', '.join(stage.worker for stage in plan.stages)}"
    else:
        suspects = f"worker {plan.stages[stage].worker}"
    return (
        f"restart {suspects}, then check device, memory and weights of the host with stageline doctor; "
        "--no-self-check serves without a check, wrong tokens too: compare them with those of transformers"
    )


def remedy_of_changes(changed: Sequence[Path]) -> str:
    """Return the action where files of the checkpoint have changed, which explains a failure."""
    others = f" and {len(changed) - 1} other files" if len(changed) > 1 else ""
    return (
        f"the checkpoint has changed since the coordinator started: restore {changed[0]}{others}, or restart "
        "the coordinator and all workers to serve the new weights"
    )


def _with_stage(verdict: Verdict, plan: Plan, hops: Sequence[_Hop]) -> Verdict:
    """Name the first stage whose hidden states deviate; one such stage is enough for a failure."""
    bad, last = next((hop for hop in hops if not hop.worst.is_good), None), plan.stages[-1]
    if bad is not None and verdict.is_good:
        return Verdict(
            outcome=CheckOutcome.FAILED,
            detail=str(bad),
            deviation=bad.worst.value,
            allowed=bad.worst.allowed,
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
    script: Script, plan: Plan, states: Mapping[int, Sequence[float]], reference: Reference
) -> list[_Hop]:
    """Return the deviations of the stages that reported their hidden states."""
    phases = _tokens(script, reference)
    num_states = sum(map(len, phases.values()))
    hops: list[_Hop] = []
    for stage in plan.stages[:-1]:
        found, layer = states.get(stage.stage), reference.layers[stage.layer_end - 1]
        if found is not None and len(found) == STATE_WIDTH * num_states:
            groups = groups_of(
                {phase: _state_tokens(found, layer, tokens) for phase, tokens in phases.items()}
            )
            before = hops[-1].groups if hops else None
            hops.append(_Hop(stage, groups, deviations_of(groups, before)))
    return hops


def _state_tokens(
    states: Sequence[float], layer: LayerReference, tokens: Sequence[tuple[int, int]]
) -> list[Token]:
    typical, highest = layer.roundings.typical, layer.roundings.highest
    return [
        Token(state_deviation(states, here, layer, token), typical[token], highest[token])
        for here, token in tokens
    ]


def _tokens(script: Script, reference: Reference) -> dict[Phase, list[tuple[int, int]]]:
    """Return the offset of each token's state in a stage's report, and its index in the reference.

    Returns:
        The tokens of each phase, in the order of the steps.
    """
    groups: dict[Phase, list[tuple[int, int]]] = {phase: [] for phase in Phase}
    here = 0
    for part in (part for checked_step in script.steps for part in checked_step.slices):
        for position in range(part.first, part.first + part.num_tokens):
            groups[part.phase].append((here, reference.token_index(part.text, position)))
            here += STATE_WIDTH
    return groups


def _compare(
    script: Script, rows: Sequence[AnsweredRow], known: KnownReference, before: Groups | None
) -> Verdict:
    """`before` are the hidden states that LAST receives, if known."""
    reference = known.reference
    tokens = {
        phase: [_row_token(row, reference) for row in rows if row.part.phase is phase] for phase in Phase
    }
    deviations = deviations_of(groups_of(tokens), before)
    worst = deviations[0]
    detail = (
        f"the log-probabilities of {len(rows)} tokens in {len(script.steps)} steps differ from "
        f"{known.origin} {worst.extent} of the spread of the logits, and {worst.allowed:.2g} is allowed"
        f"{_left_out(script)}"
    )
    outcome = CheckOutcome.PASSED if worst.is_good else CheckOutcome.FAILED
    if worst.is_good and (wrong := _wrongly_sampled(rows, reference)) is not None:
        outcome, detail = CheckOutcome.FAILED, f"{wrong}; {detail}"
    share = max(deviation.share for deviation in deviations)
    return Verdict(outcome=outcome, detail=detail, deviation=worst.value, allowed=worst.allowed, share=share)


def _row_token(row: AnsweredRow, reference: Reference) -> Token:
    roundings, spread = reference.texts[row.part.text].roundings, _spread(reference)
    return Token(
        row_deviation(*_pair(row, reference), reference),
        roundings.typical[row.position] / spread,
        roundings.highest[row.position] / spread,
    )


def _left_out(script: Script) -> str:
    return f"; not checked: {', '.join(script.left_out)}" if script.left_out else ""


def _pair(row: AnsweredRow, reference: Reference) -> Pair:
    return row.logprobs, reference.texts[row.part.text].rows[row.position]


def clearly_expected(expected: TokenLogprobs, rounding: float) -> int | None:
    """Return the token that a greedy sampler must choose; None if `rounding` of the row may decide."""
    if len(expected.top) < 2:
        return expected.top[0][0] if expected.top else None
    (token, first), (_, second) = expected.top[:2]
    return token if first - second > _CLEAR_GAP * rounding else None


def _wrongly_sampled(rows: Sequence[AnsweredRow], reference: Reference) -> str | None:
    for row in rows:
        text = reference.texts[row.part.text]
        rounding = max(text.roundings.highest[row.position], _MIN_ROUNDING * _spread(reference))
        expected = clearly_expected(text.rows[row.position], rounding)
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
