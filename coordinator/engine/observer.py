"""Facts that the engine publishes to observers, and the request log."""

import logging
from collections.abc import Sequence as Items

from coordinator.engine.request import Request
from coordinator.scheduler.batch import SequenceUpdate
from coordinator.scheduler.sequence import Sequence
from wire.errors import DeadlinePassed, RequestCancelled, RequestPoisoned, RequestSuspended, ServingError
from wire.ids import id_text
from wire.log_context import log_context
from wire.steps import Step, StepResult

log = logging.getLogger(__name__)


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
        self, result: StepResult, progress: Items[SequenceUpdate], sent_s: float, now_s: float
    ) -> None:
        """The oldest step, which was handed out at `sent_s`, is answered; before anything is delivered."""

    def preempted(self, sequences: Items[Sequence], now_s: float) -> None:
        """These have given up their blocks, and are in the queue again."""

    def requeued(self, sequences: Items[Sequence], now_s: float) -> None:
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
        for observer in self._all:
            observer.accepted(request, now_s)

    def step_scheduled(self, duration_s: float) -> None:
        for observer in self._all:
            observer.step_scheduled(duration_s)

    def step_sent(self, step: Step, now_s: float) -> None:
        for observer in self._all:
            observer.step_sent(step, now_s)

    def step_answered(
        self, result: StepResult, progress: Items[SequenceUpdate], sent_s: float, now_s: float
    ) -> None:
        for observer in self._all:
            observer.step_answered(result, progress, sent_s, now_s)

    def preempted(self, sequences: Items[Sequence], now_s: float) -> None:
        for observer in self._all:
            observer.preempted(sequences, now_s)

    def requeued(self, sequences: Items[Sequence], now_s: float) -> None:
        for observer in self._all:
            observer.requeued(sequences, now_s)

    def epoch_started(self, epoch: int, now_s: float) -> None:
        for observer in self._all:
            observer.epoch_started(epoch, now_s)

    def epoch_stopped(self, reason: str, now_s: float) -> None:
        for observer in self._all:
            observer.epoch_stopped(reason, now_s)

    def ended(self, request: Request, error: ServingError | None, now_s: float) -> None:
        for observer in self._all:
            observer.ended(request, error, now_s)


_WISHED = (DeadlinePassed, RequestCancelled, RequestSuspended)
"""What the client wanted, or goes on elsewhere."""


class RequestLog(EngineObserver):
    """Nothing that a request meets where all is well is above debug, and no step is in the log at all."""

    def accepted(self, request: Request, now_s: float) -> None:
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "request %s is accepted (prompt tokens: %d, at most %d with what is generated; choices: %d)",
                id_text(request.id),
                request.num_prompt_tokens,
                request.max_sequence_tokens,
                len(request.choices),
                extra=self._about(request),
            )

    def preempted(self, sequences: Items[Sequence], now_s: float) -> None:
        for sequence in sequences:
            log.debug(
                "sequence %s has given up its blocks",
                sequence.key,
                extra=log_context(request_id=sequence.key[0]),
            )

    def ended(self, request: Request, error: ServingError | None, now_s: float) -> None:
        level = level_of(error)
        if not log.isEnabledFor(level):
            return
        if error is None:
            num_tokens = sum(len(choice.sequence.generated_tokens) for choice in request.choices)
            text = f"has finished with {num_tokens} tokens"
        else:
            text = f"{'has ended' if level == logging.DEBUG else 'failed'}: {type(error).__name__}: {error}"
        log.log(level, "request %s %s", id_text(request.id), text, extra=self._about(request))

    def _about(self, request: Request) -> dict[str, object]:
        trace = request.trace
        return log_context(request_id=request.id, trace_id=None if trace is None else trace.trace_id)


def level_of(error: ServingError | None) -> int:
    """How loudly the end of a request is told: an error where it may have cost workers, a warning where it is
    ours to explain.
    """
    if isinstance(error, RequestPoisoned):
        return logging.ERROR
    return logging.DEBUG if error is None or isinstance(error, _WISHED) else logging.WARNING
