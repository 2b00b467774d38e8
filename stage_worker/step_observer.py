"""What a stage tells of its steps to whoever watches."""

from stage_worker.assignment import Assignment
from stage_worker.outputs import TimedOutput
from wire.frames import Frame


class StepObserver:
    """Every method does nothing by itself. They run on the event loop, after the output has been sent, so
    each takes microseconds. Times are on the clock of `time.monotonic`.
    """

    def epoch_began(self, assignment: Assignment, epoch: int) -> None:
        """This stage serves; it knows no sequences."""

    def step_done(self, frame: Frame, output: TimedOutput, sent_s: float) -> None:
        """A step was computed, and its output handed to the transport at `sent_s`."""

    def epoch_over(self) -> None:
        """Whatever was begun in this epoch is void."""
