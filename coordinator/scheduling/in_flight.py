"""The steps that were sent and are not answered yet, oldest first. Pure."""

from collections import deque

from wire.steps import Slice, SliceResult, Step, StepResult


class ResultMismatch(Exception):
    """LAST answered something else than the oldest step in flight asks for: the epoch cannot go on.

    No client sees it: the epoch ends and its sequences start again.
    """


class StepsInFlight:
    """A queue whose order is that of the pipeline: results come in the order of the steps."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: Step) -> None:
        """`step` is handed out now."""
        self._steps.append(step)

    def clear(self) -> None:
        """Whatever was in flight is void."""
        self._steps.clear()

    def find(self, step_id: int) -> Step | None:
        """The step with this id, if it is in flight."""
        return next((step for step in self._steps if step.step_id == step_id), None)

    def take(self, result: StepResult) -> list[tuple[Slice, SliceResult]]:
        """The slices of the oldest step, each with what `result` answers to it.

        Raises ResultMismatch, and then nothing has changed.
        """
        step = self._steps[0] if self._steps else None
        if step is None or (result.epoch, result.step_id) != (step.epoch, step.step_id):
            expected = f"epoch {step.epoch}, step {step.step_id}" if step else "no result"
            raise ResultMismatch(
                f"result of epoch {result.epoch}, step {result.step_id}; expected {expected}"
            )
        asked = [part for part in step.slices if part.is_answered]
        wanted = [(part.sequence, part.generation) for part in asked]
        if [(entry.sequence, entry.generation) for entry in result.results] != wanted:
            raise ResultMismatch(
                f"step {step.step_id} asks for {len(wanted)} results; got {len(result.results)} or others"
            )
        answers = list(zip(asked, result.results, strict=True))
        for part, entry in answers:
            _check_answer(part, entry)
        self._steps.popleft()
        return answers


def _check_answer(part: Slice, entry: SliceResult) -> None:
    if entry.outcome is None and part.is_sampled:
        raise ResultMismatch(f"{part.sequence} is due a token and got none")
    if entry.prompt_logprobs and not part.is_scored:
        raise ResultMismatch(f"{part.sequence} got prompt log-probabilities that nobody asked for")
