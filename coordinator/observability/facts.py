"""One record per step and per request, created once where the engine reports them.

Metrics, spans, activity and, through it, dashboard and `stageline top` read these records.
"""

import asyncio
from collections import Counter, abc, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from coordinator.engine.observer import EndCause, EngineObserver
from coordinator.engine.request import Request
from coordinator.scheduler.batch import SequenceUpdate
from coordinator.scheduler.sequence import Sequence
from wire.errors import DeadlinePassed, RequestCancelled, ServingError
from wire.ids import RequestId, SequenceKey
from wire.steps import StageTime, StartRecord, Step, StepResult

_CANCELLED = (RequestCancelled, DeadlinePassed, asyncio.CancelledError, GeneratorExit)


class Outcome(StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @classmethod
    def of(cls, error: BaseException | None) -> "Outcome":
        if error is None:
            return cls.FINISHED
        return cls.CANCELLED if isinstance(error, _CANCELLED) else cls.FAILED


@dataclass(slots=True, eq=False)
class RequestRecord:
    """A request and its milestones, on the coordinator's monotonic clock; written by `FactRecorder` only.

    Attributes:
        arrived_s: arrival of the call, by default `accepted_s`.
        is_resumed: started before the coordinator restarted, so it has no time to first token.
        started_s: when its first step was sent.
        first_token_s: when the coordinator received its first token.
        preempted: preempted choices that are queued again.
        num_preemptions: of all choices so far.
    """

    request: Request
    arrived_s: float
    accepted_s: float
    is_resumed: bool
    started_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    error: ServingError | None = None
    preempted: set[SequenceKey] = field(default_factory=set)
    num_preemptions: int = 0

    @property
    def outcome(self) -> Outcome | None:
        """None for an active request."""
        return None if self.ended_s is None else Outcome.of(self.error)


class StepKind(StrEnum):
    """Work of a step."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    EMPTY = "empty"


@dataclass(frozen=True, slots=True)
class SentStep:
    """A step, from when it is sent at `sent_s`."""

    epoch: int
    step_id: int
    sent_s: float
    num_decodes: int
    num_chunks: int
    num_chunk_tokens: int

    @property
    def num_sequences(self) -> int:
        return self.num_decodes + self.num_chunks

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_chunk_tokens

    @property
    def kind(self) -> StepKind:
        if self.num_chunks:
            return StepKind.MIXED if self.num_decodes else StepKind.PREFILL
        return StepKind.DECODE if self.num_decodes else StepKind.EMPTY


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Time to a request's first token."""

    since_arrival_s: float
    since_accepted_s: float


@dataclass(frozen=True, slots=True)
class StepRecord:
    """An answered step.

    Attributes:
        number: counts the answered steps of this process, from 1.
        stage_times: FIRST to LAST, or empty.
        ready_at_us: when LAST had the result, on the clock of the spans; 0 if unknown.
        num_tokens_generated: over all choices.
        inter_token: pairs of a time since the previous token and the number of choices with it.
        first_tokens: requests that got their first token.
    """

    number: int
    sent: SentStep
    answered_s: float
    stage_times: tuple[StageTime, ...]
    ready_at_us: int = 0
    num_tokens_generated: int = 0
    inter_token: tuple[tuple[float, int], ...] = ()
    first_tokens: tuple[FirstToken, ...] = ()

    @property
    def duration_s(self) -> float:
        return self.answered_s - self.sent.sent_s

    def computed(self) -> Iterator[tuple[float, float]]:
        """Begin and end of each stage's computation."""
        time_s = self.sent.sent_s
        for stage in self.stage_times:
            begin_s = time_s + (stage.hop_us + stage.receive_us + stage.wait_us) / 1e6
            time_s = begin_s + stage.compute_us / 1e6
            yield begin_s, time_s


class FactObserver:
    """Reads records. Methods run on the event loop between two steps, so each takes microseconds."""

    def request_accepted(self, record: RequestRecord) -> None:
        """A request entered the queue, or was restored after a restart."""

    def request_started(self, record: RequestRecord) -> None:
        """The first step of a request was sent."""

    def request_ended(self, record: RequestRecord) -> None:
        """A request finished, or ended with an error."""

    def step_scheduled(self, duration_s: float) -> None:
        """Scheduling the next step took `duration_s`."""

    def step_sent(self, sent: SentStep, step: Step) -> None:
        """`step` was sent; its decodes precede its prompt chunks."""

    def step_completed(self, record: StepRecord, updates: abc.Sequence[SequenceUpdate]) -> None:
        """The oldest step in flight was answered, with these tokens and ends of sequences."""

    def preempted(self, sequences: abc.Sequence[Sequence], now_s: float) -> None:
        """`sequences` lost their blocks and were queued again."""

    def requeued(self, sequences: abc.Sequence[Sequence], now_s: float) -> None:
        """`sequences` were queued again, so that suspects of a worker loss run alone."""

    def epoch_started(self, epoch: int, now_s: float) -> None:
        """Steps of this epoch can be sent."""

    def epoch_stopped(self, cause: EndCause | None, reason: str, now_s: float) -> None:
        """Steps in flight are void; running sequences are queued again."""


class FactRecorder(EngineObserver):
    """Creates the records from the engine's reports and passes them on.

    State is bounded by the active requests, their choices and the steps in flight.
    """

    def __init__(self, observers: abc.Sequence[FactObserver]) -> None:
        self._observers = tuple(observers)
        self._active: dict[RequestId, RequestRecord] = {}
        self._token_s: dict[Sequence, float] = {}
        self._in_flight = deque[SentStep]()
        self._num_answered = 0

    def accepted(self, request: Request, now_s: float) -> None:
        arrived_s = now_s if request.trace is None else request.trace.arrived_s
        is_resumed = any(choice.sequence.num_generated_tokens for choice in request.choices)
        record = self._active[request.id] = RequestRecord(request, arrived_s, now_s, is_resumed)
        for observer in self._observers:
            observer.request_accepted(record)

    def step_scheduled(self, duration_s: float) -> None:
        for observer in self._observers:
            observer.step_scheduled(duration_s)

    def step_sent(self, step: Step, now_s: float) -> None:
        for start in step.starts:
            self._start(start, now_s)
        sent = _sent_step(step, now_s)
        self._in_flight.append(sent)
        for observer in self._observers:
            observer.step_sent(sent, step)

    def step_completed(
        self, result: StepResult, updates: abc.Sequence[SequenceUpdate], sent_s: float, now_s: float
    ) -> None:
        self._num_answered += 1
        sequences = [update.sequence for update in updates if update.token is not None]
        inter_token, first_tokens = self._take_tokens(sequences, now_s)
        record = StepRecord(
            number=self._num_answered,
            sent=self._in_flight.popleft(),
            answered_s=now_s,
            stage_times=result.stage_times,
            ready_at_us=result.ready_at_us,
            num_tokens_generated=len(sequences),
            inter_token=inter_token,
            first_tokens=first_tokens,
        )
        for observer in self._observers:
            observer.step_completed(record, updates)

    def preempted(self, sequences: abc.Sequence[Sequence], now_s: float) -> None:
        for sequence in sequences:
            if (record := self._active.get(sequence.key.request_id)) is not None:
                record.preempted.add(sequence.key)
                record.num_preemptions += 1
        for observer in self._observers:
            observer.preempted(sequences, now_s)

    def requeued(self, sequences: abc.Sequence[Sequence], now_s: float) -> None:
        for observer in self._observers:
            observer.requeued(sequences, now_s)

    def epoch_started(self, epoch: int, now_s: float) -> None:
        for observer in self._observers:
            observer.epoch_started(epoch, now_s)

    def epoch_stopped(self, cause: EndCause | None, reason: str, now_s: float) -> None:
        self._in_flight.clear()
        for observer in self._observers:
            observer.epoch_stopped(cause, reason, now_s)

    def ended(self, request: Request, error: ServingError | None, now_s: float) -> None:
        for choice in request.choices:
            self._token_s.pop(choice.sequence, None)
        record = self._active.pop(request.id, None)
        if record is None:
            return
        record.ended_s, record.error = now_s, error
        for observer in self._observers:
            observer.request_ended(record)

    def _start(self, start: StartRecord, now_s: float) -> None:
        record = self._active.get(start.sequence.request_id)
        if record is None:
            return
        record.preempted.discard(start.sequence)
        if record.started_s is None:
            record.started_s = now_s
            for observer in self._observers:
                observer.request_started(record)

    def _take_tokens(
        self, sequences: list[Sequence], now_s: float
    ) -> tuple[tuple[tuple[float, int], ...], tuple[FirstToken, ...]]:
        """Gaps and first tokens. Choices of a step mostly share the previous one, so few gaps differ."""
        previous_s = Counter(map(self._token_s.get, sequences))
        first_tokens: tuple[FirstToken, ...] = ()
        if previous_s.pop(None, 0):
            new = [sequence for sequence in sequences if sequence not in self._token_s]
            first_tokens = tuple(self._first_tokens(new, now_s))
        self._token_s.update(dict.fromkeys(sequences, now_s))
        waits = tuple(
            (now_s - token_s, count) for token_s, count in previous_s.items() if token_s is not None
        )
        return waits, first_tokens

    def _first_tokens(self, sequences: list[Sequence], now_s: float) -> Iterator[FirstToken]:
        for sequence in sequences:
            record = self._active.get(sequence.key.request_id)
            if record is None or record.is_resumed or record.first_token_s is not None:
                continue
            record.first_token_s = now_s
            yield FirstToken(now_s - record.arrived_s, now_s - record.accepted_s)


def _sent_step(step: Step, now_s: float) -> SentStep:
    num_chunk_tokens = sum(len(chunk.tokens) for chunk in step.chunks)
    return SentStep(step.epoch, step.step_id, now_s, len(step.decodes), len(step.chunks), num_chunk_tokens)
