"""Steps in flight, oldest first, and when one is overdue. Pure."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.recovery.policy import RecoveryPolicy
from coordinator.scheduler.cost_model import StepCost
from wire.steps import SliceResult, Step, StepResult, StepSlice


class StepTimeoutEstimator:
    """Learns how long answers are in coming, as a multiple of what steps of their work are predicted to take.

    What counts is the time since the answer before, or since the step was sent if that was later: steps that
    queue in the pipeline do not make each other late.
    """

    def __init__(self, policy: RecoveryPolicy) -> None:
        self._policy = policy
        self._ratios: deque[float] = deque(maxlen=policy.step_ratio_window)

    def observe(self, waited_s: float, predicted_s: float) -> None:
        """An answer came after `waited_s`, to a step that was predicted to take `predicted_s`."""
        if predicted_s > 0:
            self._ratios.append(waited_s / predicted_s)

    def limit_s(self, predicted_s: float, *, unknown_s: float) -> float:
        """When to give up a step; `unknown_s` while nothing is known of such steps."""
        policy = self._policy
        if not self._ratios or predicted_s <= 0:
            return max(policy.min_step_timeout_s, unknown_s)
        ordered = sorted(self._ratios)
        usual = ordered[math.ceil(policy.step_ratio_quantile * len(ordered)) - 1]
        return max(policy.min_step_timeout_s, policy.step_slowdown * usual * predicted_s)


class ResultMismatch(Exception):
    """LAST answered something else than the oldest step in flight asks for: the epoch cannot go on.

    No client sees it: the epoch ends and its sequences start again.
    """


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that was handed out at `sent_s`, and how much it computes."""

    step: Step
    work: StepCost
    sent_s: float


@dataclass(frozen=True, slots=True)
class AnsweredStep:
    """Slices, each with what was answered to it; what was computed for it, since when, and how long it was
    the oldest step in flight.
    """

    pairs: list[tuple[StepSlice, SliceResult]]
    work: StepCost
    sent_s: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class OverdueStep:
    """A step whose answer has not come for `waited_s`, which is more than `limit_s`."""

    step: Step
    waited_s: float
    limit_s: float


class StepsInFlight:
    """A queue whose order is that of the pipeline: results come in the order of the steps."""

    def __init__(self, policy: RecoveryPolicy) -> None:
        self._steps: deque[StepInFlight] = deque()
        self._answered_s = -math.inf
        self._timeouts = StepTimeoutEstimator(policy)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: Step, work: StepCost, now_s: float) -> None:
        """`step`, which computes `work`, is handed out now."""
        self._steps.append(StepInFlight(step, work, now_s))

    def clear(self) -> None:
        """Whatever was in flight is void."""
        self._steps.clear()

    @property
    def steps(self) -> list[Step]:
        return [in_flight.step for in_flight in self._steps]

    def find(self, step_id: int) -> Step | None:
        """The step with this id, if it is in flight."""
        return next((in_flight.step for in_flight in self._steps if in_flight.step.step_id == step_id), None)

    def overdue(
        self, now_s: float, step_us: Callable[[StepCost], float], *, unknown_s: float
    ) -> OverdueStep | None:
        """The oldest step, if it is that much later than those before it; see `StepTimeoutEstimator.limit_s`.

        `step_us` predicts how long a step takes.
        """
        if not self._steps:
            return None
        oldest = self._steps[0]
        waited_s = now_s - max(oldest.sent_s, self._answered_s)
        limit_s = self._timeouts.limit_s(step_us(oldest.work) / 1e6, unknown_s=unknown_s)
        return OverdueStep(oldest.step, waited_s, limit_s) if waited_s > limit_s else None

    def note_answer(self, answered: AnsweredStep, predicted_us: float) -> None:
        """Learns from a step that was predicted to take `predicted_us`, how late is too late."""
        self._timeouts.observe(answered.waited_s, predicted_us / 1e6)

    def take_unchecked(self, now_s: float) -> None:
        """The oldest step is answered now, and another component checks the answer. Does nothing when no step
        is in flight.
        """
        if self._steps:
            self._steps.popleft()
            self._answered_s = now_s

    def take(self, result: StepResult, now_s: float) -> AnsweredStep:
        """The slices of the oldest step, each with what `result`, which came now, answers to it.

        Raises ResultMismatch, and then nothing has changed.
        """
        oldest = self._steps[0] if self._steps else None
        step = oldest.step if oldest else None
        if oldest is None or step is None or (result.epoch, result.step_id) != (step.epoch, step.step_id):
            expected = f"epoch {step.epoch}, step {step.step_id}" if step else "no result"
            raise ResultMismatch(
                f"result of epoch {result.epoch}, step {result.step_id}; expected {expected}"
            )
        asked = [part for part in step.slices if part.is_answered]
        if len(asked) != len(result.results):
            raise ResultMismatch(
                f"step {step.step_id} asks for {len(asked)} results; got {len(result.results)}"
            )
        answers = list(zip(asked, result.results, strict=True))
        for part, entry in answers:
            _check_answer(part, entry)
        self._steps.popleft()
        waited_s = now_s - max(oldest.sent_s, self._answered_s)
        self._answered_s = now_s
        return AnsweredStep(answers, oldest.work, oldest.sent_s, waited_s)


def _check_answer(part: StepSlice, entry: SliceResult) -> None:
    if entry.sequence != part.sequence or entry.restart_count != part.restart_count:
        raise ResultMismatch(
            f"{entry.sequence}, restart count {entry.restart_count}, was answered where {part.sequence}, "
            f"restart count {part.restart_count}, was due"
        )
    if entry.outcome is None and part.is_sampled:
        raise ResultMismatch(f"{part.sequence} is due a token and got none")
    if entry.prompt_logprobs and not part.is_scored:
        raise ResultMismatch(f"{part.sequence} got prompt log-probabilities that nobody asked for")
