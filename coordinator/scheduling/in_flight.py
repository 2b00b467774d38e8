"""The steps that were sent and are not answered yet, oldest first. Pure."""

from collections import deque
from dataclasses import dataclass

from coordinator.scheduling.work import StepWork
from wire.steps import Slice, SliceResult, Step, StepResult


class ResultMismatch(Exception):
    """LAST answered something else than the oldest step in flight asks for: the epoch cannot go on.

    No client sees it: the epoch ends and its sequences start again.
    """


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that was handed out at `sent_s`, and how much it computes."""

    step: Step
    work: StepWork
    sent_s: float


@dataclass(frozen=True, slots=True)
class AnsweredStep:
    """Slices, each with what was answered to it; what was computed for it, and since when."""

    pairs: list[tuple[Slice, SliceResult]]
    work: StepWork
    sent_s: float


class StepsInFlight:
    """A queue whose order is that of the pipeline: results come in the order of the steps."""

    def __init__(self) -> None:
        self._steps: deque[StepInFlight] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: Step, work: StepWork, now_s: float) -> None:
        """`step`, which computes `work`, is handed out now."""
        self._steps.append(StepInFlight(step, work, now_s))

    def clear(self) -> None:
        """Whatever was in flight is void."""
        self._steps.clear()

    def find(self, step_id: int) -> Step | None:
        """The step with this id, if it is in flight."""
        return next((each.step for each in self._steps if each.step.step_id == step_id), None)

    def take(self, result: StepResult) -> AnsweredStep:
        """The slices of the oldest step, each with what `result` answers to it.

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
        return AnsweredStep(answers, oldest.work, oldest.sent_s)


def _check_answer(part: Slice, entry: SliceResult) -> None:
    if entry.sequence != part.sequence or entry.generation != part.generation:
        raise ResultMismatch(
            f"{entry.sequence}, generation {entry.generation}, was answered where {part.sequence}, "
            f"generation {part.generation}, was due"
        )
    if entry.outcome is None and part.is_sampled:
        raise ResultMismatch(f"{part.sequence} is due a token and got none")
    if entry.prompt_logprobs and not part.is_scored:
        raise ResultMismatch(f"{part.sequence} got prompt log-probabilities that nobody asked for")
