"""Facts that the engine publishes to observers, and the request log."""

import logging
from collections import abc
from enum import Enum

from coordinator.engine.request import Request
from coordinator.scheduler.batch import SequenceUpdate
from coordinator.scheduler.sequence import Sequence
from stageline_rpc.v1 import cluster_pb2
from wire.errors import DeadlinePassed, RequestCancelled, RequestPoisoned, RequestSuspended, ServingError
from wire.ids import id_text
from wire.log_context import log_context
from wire.steps import Step, StepResult

log = logging.getLogger(__name__)


class EndCause(Enum):
    """Why an epoch ends. The values equal the wire enum.

    Attributes:
        DEATH: a worker was lost, possibly because of a request.
        DEVICE: a worker reported a failed device and exits, hardly because of a request.
        FAULT: a stage refused a step, or its result is overdue.
        BROKEN: a stream ended for an unknown reason.
        NO_PROGRESS: several epochs in a row were BROKEN without a token, possibly because of a request.
        REPLANNED: a better plan exists.
    """

    DEATH = cluster_pb2.EPOCH_END_CAUSE_DEATH
    DEVICE = cluster_pb2.EPOCH_END_CAUSE_DEVICE
    FAULT = cluster_pb2.EPOCH_END_CAUSE_FAULT
    BROKEN = cluster_pb2.EPOCH_END_CAUSE_BROKEN
    NO_PROGRESS = cluster_pb2.EPOCH_END_CAUSE_NO_PROGRESS
    REPLANNED = cluster_pb2.EPOCH_END_CAUSE_REPLANNED


class EngineObserver:
    """Receives the engine's events; the methods of this base class do nothing.

    The methods run on the event loop between two steps and must return within microseconds. `now_s` is the
    engine's clock.
    """

    def accepted(self, request: Request, now_s: float) -> None:
        """A request was queued, or restored from the journal."""

    def step_scheduled(self, duration_s: float) -> None:
        """The scheduler took `duration_s` to build the next step."""

    def step_sent(self, step: Step, now_s: float) -> None:
        """A step was sent; its decodes precede its prompt chunks."""

    def step_completed(
        self, result: StepResult, updates: abc.Sequence[SequenceUpdate], sent_s: float, now_s: float
    ) -> None:
        """The result of the oldest step, sent at `sent_s`, arrived; nothing of it was delivered yet."""

    def preempted(self, sequences: abc.Sequence[Sequence], now_s: float) -> None:
        """`sequences` lost their blocks and were queued again."""

    def requeued(self, sequences: abc.Sequence[Sequence], now_s: float) -> None:
        """`sequences` were queued again, so that suspects of a worker loss run alone."""

    def epoch_started(self, epoch: int, now_s: float) -> None:
        """Steps of this epoch can be sent."""

    def epoch_stopped(self, cause: EndCause | None, reason: str, now_s: float) -> None:
        """Steps in flight were discarded; running sequences were queued again.

        `cause` is None when the coordinator stops.
        """

    def ended(self, request: Request, error: ServingError | None, now_s: float) -> None:
        """A request finished, or ended with `error`."""


class Observers(EngineObserver):
    """Forwards each event to all observers, in order."""

    def __init__(self, observers: abc.Sequence[EngineObserver] = ()) -> None:
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

    def step_completed(
        self, result: StepResult, updates: abc.Sequence[SequenceUpdate], sent_s: float, now_s: float
    ) -> None:
        for observer in self._all:
            observer.step_completed(result, updates, sent_s, now_s)

    def preempted(self, sequences: abc.Sequence[Sequence], now_s: float) -> None:
        for observer in self._all:
            observer.preempted(sequences, now_s)

    def requeued(self, sequences: abc.Sequence[Sequence], now_s: float) -> None:
        for observer in self._all:
            observer.requeued(sequences, now_s)

    def epoch_started(self, epoch: int, now_s: float) -> None:
        for observer in self._all:
            observer.epoch_started(epoch, now_s)

    def epoch_stopped(self, cause: EndCause | None, reason: str, now_s: float) -> None:
        for observer in self._all:
            observer.epoch_stopped(cause, reason, now_s)

    def ended(self, request: Request, error: ServingError | None, now_s: float) -> None:
        for observer in self._all:
            observer.ended(request, error, now_s)


_EXPECTED_ERRORS = (DeadlinePassed, RequestCancelled, RequestSuspended)
"""Requested by the client, or continued after a restart."""


class RequestLog(EngineObserver):
    """Logs requests: normal events at debug, failures above; steps are not logged."""

    def accepted(self, request: Request, now_s: float) -> None:
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "request %s accepted: prompt_tokens=%d max_sequence_tokens=%d choices=%d",
                id_text(request.id),
                request.num_prompt_tokens,
                request.max_sequence_tokens,
                len(request.choices),
                extra=self._log_context(request),
            )

    def preempted(self, sequences: abc.Sequence[Sequence], now_s: float) -> None:
        for sequence in sequences:
            log.debug(
                "sequence %s preempted: not enough free KV blocks",
                sequence.key,
                extra=log_context(request_id=sequence.key[0]),
            )

    def ended(self, request: Request, error: ServingError | None, now_s: float) -> None:
        level = log_level_of(error)
        if not log.isEnabledFor(level):
            return
        if error is None:
            num_tokens = sum(len(choice.sequence.generated_tokens) for choice in request.choices)
            text = f"finished: tokens={num_tokens}"
        else:
            text = f"{'ended' if level == logging.DEBUG else 'failed'}: {type(error).__name__}: {error}"
        log.log(level, "request %s %s", id_text(request.id), text, extra=self._log_context(request))

    def _log_context(self, request: Request) -> dict[str, object]:
        trace = request.trace
        return log_context(request_id=request.id, trace_id=None if trace is None else trace.trace_id)


def log_level_of(error: ServingError | None) -> int:
    """Log level for the end of a request.

    ERROR if the request may have crashed workers, DEBUG if it finished or was cancelled, else WARNING.
    """
    if isinstance(error, RequestPoisoned):
        return logging.ERROR
    return logging.DEBUG if error is None or isinstance(error, _EXPECTED_ERRORS) else logging.WARNING
