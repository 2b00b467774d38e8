"""Steps in flight, their results, and overdue steps. Pure."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from coordinator.recovery.policy import RecoveryPolicy
from coordinator.scheduler.cost_model import StepCost
from coordinator.scheduler.sequence import Sequence
from wire.steps import RowDetail, Step, StepResult, StepSlice, split_identities, unpack_column


class StepTimeoutEstimator:
    """Learns the ratio of measured to predicted step times, and derives timeouts from it.

    The time of a step counts from the previous result, or from sending it if that was later, because steps
    queue in the pipeline.
    """

    def __init__(self, policy: RecoveryPolicy) -> None:
        self._policy = policy
        self._ratios: deque[float] = deque(maxlen=policy.step_ratio_window)

    def observe(self, waited_s: float, predicted_s: float) -> None:
        """Add a result that arrived after `waited_s`, for a predicted time of `predicted_s`."""
        if predicted_s > 0:
            self._ratios.append(waited_s / predicted_s)

    def limit_s(self, predicted_s: float, *, unknown_s: float) -> float:
        """Timeout of a step; `unknown_s` without a prediction or measurements."""
        policy = self._policy
        if not self._ratios or predicted_s <= 0:
            return max(policy.min_step_timeout_s, unknown_s)
        ordered = sorted(self._ratios)
        usual = ordered[math.ceil(policy.step_ratio_quantile * len(ordered)) - 1]
        return max(policy.min_step_timeout_s, policy.step_slowdown * usual * predicted_s)


class ResultMismatch(Exception):
    """The result from LAST does not match the oldest step in flight.

    It ends the epoch, and its sequences are computed again. Clients do not see it.
    """


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step sent at `sent_s`; `answered` are the sequences of the rows of its result."""

    step: Step
    cost: StepCost
    sent_s: float
    answered: list[Sequence]


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step with its result: `waited_s` is the time for which it was the oldest step in flight."""

    sent: StepInFlight
    result: StepResult
    waited_s: float

    @property
    def plain_tokens(self) -> tuple[int, ...] | None:
        """Token of each row, if every sequence still waits for exactly that; None otherwise."""
        answered = self.sent.answered
        if (
            self.result.details
            or b"".join([sequence.identity for sequence in answered]) != self.result.identities
            or any(sequence.wants_logprobs for sequence in answered)
            or any(chunk.is_scored for chunk in self.sent.step.chunks)
        ):
            return None
        return unpack_column(self.result.tokens)

    def rows(self) -> Iterator[tuple[Sequence, RowDetail, StepSlice | None]]:
        """Sequence, result and chunk of each row; decodes have no chunk. Stale rows are left out."""
        step, identities = self.sent.step, split_identities(self.result.identities)
        chunks = [chunk for chunk in step.chunks if chunk.is_answered]
        details = {detail.row: detail for detail in self.result.details}
        tokens = unpack_column(self.result.tokens)
        num_decodes = len(step.decodes)
        for row, sequence in enumerate(self.sent.answered):
            if sequence.identity == identities[row]:
                chunk = chunks[row - num_decodes] if row >= num_decodes else None
                yield sequence, details.get(row) or RowDetail(row, tokens[row]), chunk


@dataclass(frozen=True, slots=True)
class OverdueStep:
    """A step without a result for `waited_s`, which exceeds `limit_s`."""

    step: Step
    waited_s: float
    limit_s: float


class StepsInFlight:
    """Queue of sent steps; results arrive in the same order."""

    def __init__(self, policy: RecoveryPolicy) -> None:
        self._steps: deque[StepInFlight] = deque()
        self._answered_s = -math.inf
        self._timeouts = StepTimeoutEstimator(policy)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: Step, cost: StepCost, now_s: float, answered: list[Sequence] | None = None) -> None:
        self._steps.append(StepInFlight(step, cost, now_s, answered or []))

    def clear(self) -> None:
        self._steps.clear()

    @property
    def steps(self) -> list[Step]:
        return [in_flight.step for in_flight in self._steps]

    def find(self, step_id: int) -> Step | None:
        """The step with this id, or None if it is not in flight."""
        return next((in_flight.step for in_flight in self._steps if in_flight.step.step_id == step_id), None)

    def overdue(
        self, now_s: float, step_us: Callable[[StepCost], float], *, unknown_s: float
    ) -> OverdueStep | None:
        """The oldest step if it exceeds its timeout, see `StepTimeoutEstimator.limit_s`.

        `step_us` predicts the time of a step.
        """
        if not self._steps:
            return None
        oldest = self._steps[0]
        waited_s = now_s - max(oldest.sent_s, self._answered_s)
        limit_s = self._timeouts.limit_s(step_us(oldest.cost) / 1e6, unknown_s=unknown_s)
        return OverdueStep(oldest.step, waited_s, limit_s) if waited_s > limit_s else None

    def record_result(self, completed: CompletedStep, predicted_us: float) -> None:
        """Learn from the time of a completed step and its prediction."""
        self._timeouts.observe(completed.waited_s, predicted_us / 1e6)

    def pop_unchecked(self, now_s: float) -> None:
        """Remove the oldest step, if any, whose result is checked elsewhere."""
        if self._steps:
            self._steps.popleft()
            self._answered_s = now_s

    def take(self, result: StepResult, now_s: float) -> CompletedStep:
        """Remove the oldest step, which `result` must match row by row.

        Raises ResultMismatch without removing the step.
        """
        oldest = self._steps[0] if self._steps else None
        step = oldest.step if oldest else None
        if oldest is None or step is None or (result.epoch, result.step_id) != (step.epoch, step.step_id):
            expected = f"epoch {step.epoch}, step {step.step_id}" if step else "no result"
            raise ResultMismatch(
                f"got a result of epoch {result.epoch}, step {result.step_id}, expected {expected}"
            )
        if result.identities != step.answered_identities:
            raise _other_rows(result, step)
        if result.details:
            _check_details(result, step)
        self._steps.popleft()
        waited_s = now_s - max(oldest.sent_s, self._answered_s)
        self._answered_s = now_s
        return CompletedStep(oldest, result, waited_s)


def _other_rows(result: StepResult, step: Step) -> ResultMismatch:
    slices = [step_slice for step_slice in step.slices if step_slice.is_answered]
    if len(slices) != result.num_rows:
        return ResultMismatch(f"step {step.step_id} got {result.num_rows} results, expected {len(slices)}")
    entry, step_slice = next(
        (entry, step_slice)
        for entry, step_slice in zip(result.results, slices, strict=True)
        if (entry.sequence, entry.restart_count) != (step_slice.sequence, step_slice.restart_count)
    )
    return ResultMismatch(
        f"got a result of {entry.sequence}, restart count {entry.restart_count}, "
        f"expected {step_slice.sequence}, restart count {step_slice.restart_count}"
    )


def _check_details(result: StepResult, step: Step) -> None:
    slices = [step_slice for step_slice in step.slices if step_slice.is_answered]
    for detail in result.details:
        step_slice = slices[detail.row]
        if detail.is_late and not step_slice.is_sampled:
            raise ResultMismatch(f"result of {step_slice.sequence} is late, and has no token")
        if detail.outcome is None and step_slice.is_sampled and not detail.is_late:
            raise ResultMismatch(f"result of {step_slice.sequence} has no token")
        if detail.prompt_logprobs and not step_slice.is_scored:
            raise ResultMismatch(f"result of {step_slice.sequence} has unexpected prompt log-probabilities")


def check_tokens(result: StepResult, *, vocab_size: int) -> None:
    """Raise ResultMismatch for an invalid token, before any token reaches a client."""
    highest = max(unpack_column(result.tokens), default=0)
    if highest < vocab_size and not result.details and not result.late_rows:
        return
    for entry in (*result.results, *result.late_rows):
        if isinstance(entry.outcome, int) and entry.outcome >= vocab_size:
            raise ResultMismatch(
                f"step {result.step_id}: token {entry.outcome} of {entry.sequence} is outside the vocabulary "
                f"[0, {vocab_size})"
            )
