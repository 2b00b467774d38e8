"""Phases of active and recent requests."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from coordinator.engine.request import Request
from coordinator.scheduler.sequence import Sequence, SequenceState
from wire.errors import DeadlinePassed, RequestCancelled, ServingError
from wire.ids import RequestId, SequenceKey
from wire.steps import StartRecord

MAX_ENDED = 256


class RequestPhase(StrEnum):
    """Where a request is, or how it has ended."""

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
    """A request as of now. Tokens of all choices together; times on the coordinator's monotonic clock.

    `arrived_s`: the call came, or else the request was accepted; `started_s`: its first step
    was handed out; `first_token_s`: that was answered with a token.
    """

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


@dataclass(slots=True)
class _Milestones:
    request: Request
    arrived_s: float
    started_s: float | None = None
    first_token_s: float | None = None
    is_resumed: bool = False
    preempted: set[SequenceKey] = field(default_factory=set)


class RequestHistory:
    """Follows every live request, and keeps the last ones that have ended."""

    def __init__(self) -> None:
        self._live = dict[RequestId, _Milestones]()
        self._ended = deque[RequestActivity](maxlen=MAX_ENDED)

    def accept(self, request: Request, now_s: float) -> None:
        """A request is here. One that a former coordinator has begun has no first token to wait for."""
        is_resumed = any(choice.sequence.num_generated_tokens for choice in request.choices)
        arrived_s = now_s if request.trace is None else request.trace.arrived_s
        self._live[request.id] = _Milestones(request, arrived_s, is_resumed=is_resumed)

    def start(self, starts: Iterable[StartRecord], now_s: float) -> None:
        """These sequences are in a step for the first time since they were queued."""
        for record in starts:
            milestones = self._live.get(record.sequence.request_id)
            if milestones is None:
                continue
            milestones.preempted.discard(record.sequence)
            if milestones.started_s is None:
                milestones.started_s = now_s

    def preempt(self, sequences: Iterable[Sequence]) -> None:
        """These have given up their blocks to others."""
        for sequence in sequences:
            if (milestones := self._live.get(sequence.key.request_id)) is not None:
                milestones.preempted.add(sequence.key)

    def take_first_token(self, sequence: Sequence, now_s: float) -> float | None:
        """A sequence has got its first token; returns the seconds since its request arrived, if it is the
        first one of that.
        """
        milestones = self._live.get(sequence.key.request_id)
        if milestones is None or milestones.first_token_s is not None or milestones.is_resumed:
            return None
        milestones.first_token_s = now_s
        return now_s - milestones.arrived_s

    def end(self, request: Request, error: ServingError | None, now_s: float) -> None:
        """A request has ended."""
        milestones = self._live.pop(request.id, None)
        if milestones is not None:
            self._ended.append(_activity(milestones, _outcome(error), ended_s=now_s, error=error))

    def find(self, request_id: RequestId) -> RequestActivity | None:
        """A live or kept request."""
        if (milestones := self._live.get(request_id)) is not None:
            return _activity(milestones, _phase(milestones))
        return next((each for each in reversed(self._ended) if each.request_id == request_id), None)

    def live(self, most: int) -> tuple[RequestActivity, ...]:
        """The oldest of those that are live."""
        oldest = list(self._live.values())[:most]
        return tuple([_activity(each, _phase(each)) for each in oldest])

    def ended(self, most: int) -> tuple[RequestActivity, ...]:
        """The latest of those that have ended, latest first."""
        return tuple(self._ended)[: -most - 1 : -1]


def _phase(milestones: _Milestones) -> RequestPhase:
    """That of the choice which is furthest. Whoever is back in the queue and was not preempted recovers."""
    states = {sequence.key: sequence.state for sequence in milestones.request.live_sequences}
    for state in (SequenceState.DECODE, SequenceState.PREFILL):
        if state in states.values():
            return RequestPhase[state.name]
    if not states:
        return RequestPhase.FINISHED
    back = {key for key, state in states.items() if state is SequenceState.PREEMPTED}
    if not back:
        return RequestPhase.WAITING
    return RequestPhase.PREEMPTED if back <= milestones.preempted else RequestPhase.RECOVERING


def _outcome(error: ServingError | None) -> RequestPhase:
    if error is None:
        return RequestPhase.FINISHED
    if isinstance(error, RequestCancelled | DeadlinePassed):
        return RequestPhase.CANCELLED
    return RequestPhase.FAILED


def _activity(
    milestones: _Milestones,
    phase: RequestPhase,
    *,
    ended_s: float | None = None,
    error: ServingError | None = None,
) -> RequestActivity:
    request = milestones.request
    sequences = [choice.sequence for choice in request.choices]
    return RequestActivity(
        request_id=request.id,
        phase=phase,
        num_choices=len(sequences),
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=max(sequence.num_cached_tokens for sequence in sequences),
        num_generated_tokens=sum(sequence.num_generated_tokens for sequence in sequences),
        max_tokens=sum(sequence.max_tokens for sequence in sequences),
        num_restarts=sum(sequence.num_restarts for sequence in sequences),
        arrived_s=milestones.arrived_s,
        started_s=milestones.started_s,
        first_token_s=milestones.first_token_s,
        ended_s=ended_s,
        error="" if error is None else str(error),
    )
