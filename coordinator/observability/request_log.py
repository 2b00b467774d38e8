"""Logs how requests begin and end."""

import logging
from collections import abc

from coordinator.engine.request import Request
from coordinator.observability.facts import FactObserver, RequestRecord
from coordinator.scheduler.sequence import Sequence
from wire.errors import DeadlinePassed, RequestCancelled, RequestPoisoned, RequestSuspended, ServingError
from wire.ids import id_text
from wire.log_context import log_context

log = logging.getLogger(__name__)

_EXPECTED_ERRORS = (DeadlinePassed, RequestCancelled, RequestSuspended)
"""Requested by the client, or continued after a restart."""


class RequestLog(FactObserver):
    """Logs requests: normal events at debug, failures above; steps are not logged."""

    def request_accepted(self, record: RequestRecord) -> None:
        request = record.request
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

    def request_ended(self, record: RequestRecord) -> None:
        request, error = record.request, record.error
        level = _level_of(error)
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


def _level_of(error: ServingError | None) -> int:
    """Log level for the end of a request.

    ERROR if the request may have crashed workers, DEBUG if it finished or was cancelled, else WARNING.
    """
    if isinstance(error, RequestPoisoned):
        return logging.ERROR
    return logging.DEBUG if error is None or isinstance(error, _EXPECTED_ERRORS) else logging.WARNING
