"""What the log says of single requests: how they come and go at debug, and those that we have failed."""

import logging
from collections.abc import Sequence as Items

from coordinator.requests.observer import EngineObserver
from coordinator.requests.request import Request
from coordinator.scheduling.sequence import Sequence
from wire.errors import (
    DeadlinePassed,
    RequestCancelled,
    RequestPoisoned,
    RequestSuspended,
    ServingError,
)
from wire.ids import id_text
from wire.log_fields import about

log = logging.getLogger(__name__)

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
                "sequence %s has given up its blocks", sequence.key, extra=about(request_id=sequence.key[0])
            )

    def ended(self, request: Request, error: ServingError | None, now_s: float) -> None:
        level = level_of(error)
        if not log.isEnabledFor(level):
            return
        if error is None:
            num_tokens = sum(len(each.sequence.generated_tokens) for each in request.choices)
            text = f"has finished with {num_tokens} tokens"
        else:
            text = f"{'has ended' if level == logging.DEBUG else 'failed'}: {type(error).__name__}: {error}"
        log.log(level, "request %s %s", id_text(request.id), text, extra=self._about(request))

    def _about(self, request: Request) -> dict[str, object]:
        trace = request.trace
        return about(request_id=request.id, trace_id=None if trace is None else trace.trace_id)


def level_of(error: ServingError | None) -> int:
    """How loudly the end of a request is told: an error where it may have cost workers, a warning where it is
    ours to explain.
    """
    if isinstance(error, RequestPoisoned):
        return logging.ERROR
    return logging.DEBUG if error is None or isinstance(error, _WISHED) else logging.WARNING
