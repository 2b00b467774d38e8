"""What the engine tells to whoever watches it: facts, as they happen, which nobody may change or hold up."""

from collections.abc import Sequence as Items

from coordinator.requests.request import Request
from coordinator.scheduling.answers import Progress
from coordinator.scheduling.sequence import Sequence
from wire.errors import ServingError
from wire.steps import Step, StepResult


class EngineObserver:
    """Every method does nothing by itself. They run on the event loop between two steps, so each takes
    microseconds; `now_s` is the engine's clock.
    """

    def accepted(self, request: Request, now_s: float) -> None:
        """A request is in the queue, or taken up from a former coordinator."""

    def step_scheduled(self, duration_s: float) -> None:
        """Deciding what the step computes that is handed out next has taken so long."""

    def step_sent(self, step: Step, now_s: float) -> None:
        """A step is handed out: decodes come before prompt chunks in it."""

    def step_answered(
        self, result: StepResult, progress: Items[Progress], sent_s: float, now_s: float
    ) -> None:
        """The oldest step, which was handed out at `sent_s`, is answered; before anything is delivered."""

    def preempted(self, sequences: Items[Sequence], now_s: float) -> None:
        """These have given up their blocks, and are in the queue again."""

    def made_way(self, sequences: Items[Sequence], now_s: float) -> None:
        """These are in the queue again, so that those who may be why a worker was lost run alone."""

    def epoch_started(self, epoch: int, now_s: float) -> None:
        """Steps of this epoch can be handed out."""

    def epoch_stopped(self, reason: str, now_s: float) -> None:
        """What was in flight is void; what was running is in the queue again."""

    def ended(self, request: Request, error: ServingError | None, now_s: float) -> None:
        """A request has finished, or ended with an error."""


class Observers(EngineObserver):
    """All of them, in their order."""

    def __init__(self, observers: Items[EngineObserver] = ()) -> None:
        self._all = tuple(observers)

    def accepted(self, request: Request, now_s: float) -> None:
        for each in self._all:
            each.accepted(request, now_s)

    def step_scheduled(self, duration_s: float) -> None:
        for each in self._all:
            each.step_scheduled(duration_s)

    def step_sent(self, step: Step, now_s: float) -> None:
        for each in self._all:
            each.step_sent(step, now_s)

    def step_answered(
        self, result: StepResult, progress: Items[Progress], sent_s: float, now_s: float
    ) -> None:
        for each in self._all:
            each.step_answered(result, progress, sent_s, now_s)

    def preempted(self, sequences: Items[Sequence], now_s: float) -> None:
        for each in self._all:
            each.preempted(sequences, now_s)

    def made_way(self, sequences: Items[Sequence], now_s: float) -> None:
        for each in self._all:
            each.made_way(sequences, now_s)

    def epoch_started(self, epoch: int, now_s: float) -> None:
        for each in self._all:
            each.epoch_started(epoch, now_s)

    def epoch_stopped(self, reason: str, now_s: float) -> None:
        for each in self._all:
            each.epoch_stopped(reason, now_s)

    def ended(self, request: Request, error: ServingError | None, now_s: float) -> None:
        for each in self._all:
            each.ended(request, error, now_s)
