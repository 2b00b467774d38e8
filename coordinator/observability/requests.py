"""Phases of active and recent requests."""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from coordinator.observability.facts import FactObserver, RequestRecord
from coordinator.scheduler.sequence import SequenceState
from wire.ids import RequestId

MAX_ENDED = 256


class RequestPhase(StrEnum):
    """What an active request does, or how a request ended."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    RECOVERING = "recovering"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_live(self) -> bool:
        return self not in (RequestPhase.FINISHED, RequestPhase.CANCELLED, RequestPhase.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestActivity:
    """A request at one moment: tokens over all choices, times as in `RequestRecord`."""

    request_id: RequestId
    phase: RequestPhase
    num_choices: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    max_tokens: int
    num_restarts: int
    arrived_s: float
    started_s: float | None
    first_token_s: float | None
    ended_s: float | None
    error: str


class RequestHistory(FactObserver):
    """Active requests, and the last ones that ended."""

    def __init__(self) -> None:
        self._active = dict[RequestId, RequestRecord]()
        self._ended = deque[RequestActivity](maxlen=MAX_ENDED)

    def request_accepted(self, record: RequestRecord) -> None:
        self._active[record.request.id] = record

    def request_ended(self, record: RequestRecord) -> None:
        del self._active[record.request.id]
        self._ended.append(_activity(record))

    def live(self, most: int) -> tuple[RequestActivity, ...]:
        """The oldest active requests."""
        return tuple([_activity(record) for record in islice(self._active.values(), most)])

    def ended(self, most: int) -> tuple[RequestActivity, ...]:
        """The requests that ended last, latest first."""
        return tuple(self._ended)[: -most - 1 : -1]


def _phase(record: RequestRecord) -> RequestPhase:
    """The phase of the most advanced choice. A queued choice that was not preempted is recovering."""
    if record.outcome is not None:
        return RequestPhase(record.outcome.value)
    states = {sequence.key: sequence.state for sequence in record.request.live_sequences}
    for state in (SequenceState.DECODE, SequenceState.PREFILL):
        if state in states.values():
            return RequestPhase[state.name]
    if not states:
        return RequestPhase.FINISHED
    requeued = {key for key, state in states.items() if state is SequenceState.PREEMPTED}
    if not requeued:
        return RequestPhase.WAITING
    return RequestPhase.PREEMPTED if requeued <= record.preempted else RequestPhase.RECOVERING


def _activity(record: RequestRecord) -> RequestActivity:
    request = record.request
    sequences = [choice.sequence for choice in request.choices]
    return RequestActivity(
        request_id=request.id,
        phase=_phase(record),
        num_choices=len(sequences),
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=max(sequence.num_cached_tokens for sequence in sequences),
        num_generated_tokens=sum(sequence.num_generated_tokens for sequence in sequences),
        max_tokens=sum(sequence.max_tokens for sequence in sequences),
        num_restarts=sum(sequence.num_restarts for sequence in sequences),
        arrived_s=record.arrived_s,
        started_s=record.started_s,
        first_token_s=record.first_token_s,
        ended_s=record.ended_s,
        error="" if record.error is None else str(record.error),
    )
