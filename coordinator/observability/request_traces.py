"""Spans of requests, recorded by the coordinator from `facts`."""

import asyncio
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.trace import SpanContext

from coordinator.engine.observer import EndCause
from coordinator.observability.facts import FactObserver, Outcome, RequestRecord, SentStep, StepRecord
from coordinator.scheduler.batch import SequenceUpdate
from coordinator.scheduler.sequence import Sequence
from telemetry.span_recorder import Attributes, SpanRecorder, is_sampled, new_span_id, new_trace_id
from telemetry.spans import Attr, SpanName
from wire.errors import RequestCancelled, ServingError
from wire.ids import RequestId, SequenceKey, id_text
from wire.steps import Step
from wire.trace_context import DECODE, format_traceparent, parse_traceparent, span_context, work_span

MOST_HELD_SPANS = 64
"""Maximum number of held spans of an unsampled request; recorded if it is interrupted or fails."""


RESUMED = "the coordinator was started again"


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """A step: `took_s` from sending to answer, of it `result_s` since LAST had the answer."""

    epoch: int
    step_id: int
    took_s: float
    result_s: float


@dataclass(slots=True)
class SentChunk:
    """A prefill chunk in flight."""

    restart_count: int
    start: int
    num_tokens: int
    step: SentStep


@dataclass(slots=True)
class ChoiceTrace:
    """State of one choice: waiting (span name `waits_for`) since `since_s`, with chunks in flight, or
    decoding.
    """

    index: int
    since_s: float
    waits_for: SpanName | None = SpanName.QUEUE
    reason: str = ""
    restart_count: int = 0
    chunks: dict[int, SentChunk] = field(default_factory=dict)
    is_decoding: bool = False
    steps: list[ObservedStep] = field(default_factory=list)
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class _HeldSpan:
    name: SpanName
    context: SpanContext
    start_s: float
    end_s: float
    attributes: Attributes
    error: str | None


class RequestTraceRecorder:
    """Trace of one request, created and sampled when its call arrives.

    A preemption, a recovery or an error makes an unsampled request recorded, with the spans held until then.
    """

    def __init__(
        self,
        recorder: SpanRecorder,
        trace_id: int,
        parent: SpanContext | None,
        *,
        is_sampled: bool,
        arrived_s: float,
        begun: SpanContext | None = None,
    ) -> None:
        """`parent` is the caller's span; `begun` the span of a request restored from the journal."""
        self._recorder = recorder
        self._parent = parent
        self.context = span_context(
            trace_id,
            new_span_id() if begun is None else begun.span_id,
            is_sampled=is_sampled,
            tracestate=None if parent is None else parent.trace_state,
        )
        self.is_recorded = is_sampled
        self.arrived_s = arrived_s
        self.num_recoveries = 0
        self.choices: tuple[ChoiceTrace, ...] = ()
        self._is_resumed = begun is not None
        self._held: list[_HeldSpan] = []

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return f"{self.context.trace_id:032x}"

    @property
    def traceparent(self) -> str:
        """W3C header of the request's span."""
        return format_traceparent(self.context)

    @property
    def caller_traceparent(self) -> str:
        """W3C header of the caller's span, or empty."""
        return "" if self._parent is None else format_traceparent(self._parent)

    def accept(self, num_choices: int, now_s: float) -> None:
        """The request is queued; a restored one starts with a recovery."""
        self.choices = tuple(ChoiceTrace(index, now_s) for index in range(num_choices))
        if not self._is_resumed:
            self._emit(SpanName.INTAKE, self.arrived_s, now_s, {})
            return
        self.num_recoveries = 1
        for choice in self.choices:
            choice.waits_for, choice.reason = SpanName.RECOVERY, RESUMED
        self.record_always()

    def send_chunk(self, choice: ChoiceTrace, chunk: SentChunk) -> None:
        """A prompt chunk of a choice was sent."""
        if choice.waits_for is not None:
            self._end_wait(choice, chunk.step.sent_s)
        choice.restart_count = chunk.restart_count
        choice.chunks[chunk.step.step_id] = chunk

    def answer_chunk(self, choice: ChoiceTrace, step: ObservedStep, now_s: float) -> None:
        """A chunk was computed."""
        chunk = choice.chunks.pop(step.step_id, None)
        if chunk is not None:
            self._emit_chunk(choice, chunk, now_s, step)

    def answer_token(self, choice: ChoiceTrace, step: ObservedStep, now_s: float) -> None:
        """A token arrived: the first since the last start, or a further one."""
        if choice.is_decoding:
            choice.steps.append(step)
            return
        choice.is_decoding, choice.since_s = True, now_s

    def end_choice(self, choice: ChoiceTrace, now_s: float) -> None:
        """A choice finished or was dropped."""
        if choice.is_over:
            return
        if choice.waits_for is not None:
            self._end_wait(choice, now_s)
        self._stop_work(choice, now_s)
        choice.is_over = True

    def interrupt(self, choice: ChoiceTrace, kind: SpanName, reason: str, now_s: float) -> None:
        """A running choice waits again, for PREEMPTION or RECOVERY. Its request is recorded from now on."""
        if choice.is_over or choice.waits_for is not None:
            return
        self._stop_work(choice, now_s)
        choice.waits_for, choice.reason, choice.since_s = kind, reason, now_s
        self.record_always()

    def record_always(self) -> None:
        """Record the request from now on, and the held spans."""
        if self.is_recorded:
            return
        self.is_recorded = True
        self.context = span_context(
            self.context.trace_id, self.context.span_id, tracestate=self.context.trace_state
        )
        held, self._held = self._held, []
        for span in held:
            context = span_context(self.context.trace_id, span.context.span_id)
            self._record(span.name, context, span.start_s, span.end_s, span.attributes, span.error)

    def end(self, attributes: Attributes, error: str | None, now_s: float) -> None:
        """Record the request's own span."""
        for choice in self.choices:
            self.end_choice(choice, now_s)
        if error is not None:
            self.record_always()
        if self.is_recorded:
            self._recorder.record(
                SpanName.GENERATE,
                self.context,
                self._parent,
                start_s=self.arrived_s,
                end_s=now_s,
                attributes=attributes,
                error=error,
                is_server=True,
            )

    def _end_wait(self, choice: ChoiceTrace, now_s: float) -> None:
        assert choice.waits_for is not None
        attributes: Attributes = {Attr.CHOICE: choice.index, Attr.RESTART_COUNT: choice.restart_count}
        if choice.reason:
            attributes[Attr.REASON] = choice.reason
        self._emit(choice.waits_for, choice.since_s, now_s, attributes)
        choice.waits_for, choice.reason = None, ""

    def _stop_work(self, choice: ChoiceTrace, now_s: float) -> None:
        """End chunks in flight and decoding. Stages may still compute those chunks."""
        for chunk in choice.chunks.values():
            self._emit_chunk(choice, chunk, now_s, None)
        choice.chunks.clear()
        if not choice.is_decoding:
            return
        steps, choice.steps, choice.is_decoding = choice.steps, [], False
        attributes: Attributes = {
            Attr.CHOICE: choice.index,
            Attr.RESTART_COUNT: choice.restart_count,
            Attr.NUM_STEPS: len(steps),
            Attr.TOKENS: len(steps),
            Attr.STEP_DURATION: sum(step.took_s for step in steps),
            Attr.RESULT_DURATION: sum(step.result_s for step in steps),
        }
        if steps:
            attributes |= {
                Attr.EPOCH: steps[0].epoch,
                Attr.STEP_ID: steps[0].step_id,
                Attr.LAST_STEP_ID: steps[-1].step_id,
            }
        self._emit(SpanName.DECODE, choice.since_s, now_s, attributes, self._work(choice, DECODE))

    def _emit_chunk(
        self, choice: ChoiceTrace, chunk: SentChunk, now_s: float, answered: ObservedStep | None
    ) -> None:
        attributes: Attributes = {
            Attr.CHOICE: choice.index,
            Attr.RESTART_COUNT: chunk.restart_count,
            Attr.EPOCH: chunk.step.epoch,
            Attr.STEP_ID: chunk.step.step_id,
            Attr.LAST_STEP_ID: chunk.step.step_id,
            Attr.NUM_STEPS: 1,
            Attr.TOKENS: chunk.num_tokens,
            Attr.CHUNK_START: chunk.start,
            Attr.BATCH_SIZE: chunk.step.num_sequences,
        }
        if answered is not None:
            attributes[Attr.STEP_DURATION] = answered.took_s
            attributes[Attr.RESULT_DURATION] = answered.result_s
        context = self._work(choice, chunk.start)
        self._emit(SpanName.PREFILL_CHUNK, chunk.step.sent_s, now_s, attributes, context)

    def _work(self, choice: ChoiceTrace, start: int) -> SpanContext:
        return work_span(self.context, choice=choice.index, restart_count=choice.restart_count, start=start)

    def _emit(
        self,
        name: SpanName,
        start_s: float,
        end_s: float,
        attributes: Attributes,
        context: SpanContext | None = None,
        error: str | None = None,
    ) -> None:
        context = context or span_context(self.context.trace_id, new_span_id())
        if self.is_recorded:
            self._record(name, context, start_s, end_s, attributes, error)
        elif len(self._held) < MOST_HELD_SPANS:
            self._held.append(_HeldSpan(name, context, start_s, end_s, attributes, error))

    def _record(
        self,
        name: SpanName,
        context: SpanContext,
        start_s: float,
        end_s: float,
        attributes: Attributes,
        error: str | None,
    ) -> None:
        self._recorder.record(
            name, context, self.context, start_s=start_s, end_s=end_s, attributes=attributes, error=error
        )


INTERNAL_ERROR = "internal error"
REQUEUED = "requests that may be why a worker was lost run alone"


@dataclass(frozen=True, slots=True)
class _Owner:
    """The request and choice of a sequence."""

    trace: RequestTraceRecorder
    choice: ChoiceTrace
    sequence: Sequence


class RequestTraces(FactObserver):
    """One per coordinator."""

    def __init__(
        self,
        recorder: SpanRecorder,
        sampler: Sampler,
        *,
        model: str,
        on_refusal: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """`model` is the served model's name. `on_refusal` receives the error of each rejected call, unless
        its client disconnected.
        """
        self._recorder = recorder
        self._sampler = sampler
        self._model = model
        self._on_refusal = on_refusal
        self._live: dict[SequenceKey, _Owner] = {}
        self._chunks: dict[int, list[_Owner]] = {}
        self._stopped: tuple[float, str] | None = None

    @contextmanager
    def arrival(
        self, request_id: RequestId, parent: SpanContext | None, arrived_s: float
    ) -> Iterator[RequestTraceRecorder]:
        """Context in which a call becomes a request. An error in it ends the trace."""
        trace = self._new_trace(parent, arrived_s)
        try:
            yield trace
        except BaseException as error:
            attributes: Attributes = {
                Attr.REQUEST_ID: id_text(request_id),
                Attr.OUTCOME: Outcome.of(error).value,
            }
            trace.end(attributes, _text(error), asyncio.get_running_loop().time())
            if isinstance(error, Exception) and not isinstance(error, RequestCancelled):
                self._on_refusal(error)
            raise

    @contextmanager
    def nameless_arrival(self) -> Iterator[None]:
        """Context in which the request id is not known yet: an error in it is in no trace."""
        try:
            yield
        except Exception as error:
            self._on_refusal(error)
            raise

    def resumed(
        self, traceparent: str, caller_traceparent: str, arrived_s: float
    ) -> RequestTraceRecorder | None:
        """The trace of a restored request, continued under the same span; None without a traceparent."""
        begun = parse_traceparent(traceparent)
        if begun is None:
            return None
        return RequestTraceRecorder(
            self._recorder,
            begun.trace_id,
            parse_traceparent(caller_traceparent),
            is_sampled=begun.trace_flags.sampled,
            arrived_s=arrived_s,
            begun=begun,
        )

    def request_accepted(self, record: RequestRecord) -> None:
        request, now_s = record.request, record.accepted_s
        trace = request.trace
        if trace is None:
            trace = request.trace = self._new_trace(None, now_s)
        assert isinstance(trace, RequestTraceRecorder), "another tracer created the trace"
        trace.accept(len(request.choices), now_s)
        for choice, state in zip(request.choices, trace.choices, strict=True):
            if choice.sequence.state.is_live:
                self._live[choice.sequence.key] = _Owner(trace, state, choice.sequence)
                _mark(trace, choice.sequence)
            else:
                trace.end_choice(state, now_s)

    def step_sent(self, sent: SentStep, step: Step) -> None:
        owners = []
        for part in reversed(step.chunks):
            owner = self._live.get(part.sequence)
            if owner is None:
                continue
            chunk = SentChunk(part.restart_count, part.first_position, len(part.tokens), sent)
            owner.trace.send_chunk(owner.choice, chunk)
            owners.append(owner)
        if owners:
            self._chunks[step.step_id] = owners

    def step_completed(self, record: StepRecord, updates: abc.Sequence[SequenceUpdate]) -> None:
        sent, now_s = record.sent, record.answered_s
        result_us = self._recorder.at_us(now_s) - record.ready_at_us if record.ready_at_us else 0
        step = ObservedStep(sent.epoch, sent.step_id, record.duration_s, result_us / 1e6)
        for owner in self._chunks.pop(sent.step_id, ()):
            owner.trace.answer_chunk(owner.choice, step, now_s)
        live = self._live
        for update in updates:
            answered = live.get(update.sequence.key)
            if answered is None:
                continue
            if update.token is not None:
                answered.trace.answer_token(answered.choice, step, now_s)
            if update.finish_reason is not None:
                answered.trace.end_choice(answered.choice, now_s)

    def preempted(self, sequences: abc.Sequence[Sequence], now_s: float) -> None:
        for sequence in sequences:
            owner = self._live.get(sequence.key)
            if owner is not None:
                owner.trace.interrupt(owner.choice, SpanName.PREEMPTION, "its blocks were needed", now_s)
                _mark(owner.trace, sequence)

    def requeued(self, sequences: abc.Sequence[Sequence], now_s: float) -> None:
        for sequence in sequences:
            owner = self._live.get(sequence.key)
            if owner is not None:
                owner.trace.interrupt(owner.choice, SpanName.RECOVERY, REQUEUED, now_s)
                _mark(owner.trace, sequence)

    def epoch_started(self, epoch: int, now_s: float) -> None:
        if self._stopped is None:
            return
        (stopped_s, reason), self._stopped = self._stopped, None
        num_requests = len({key.request_id for key in self._live})
        self._recorder.record(
            SpanName.CLUSTER_RECOVERY,
            span_context(new_trace_id(), new_span_id()),
            None,
            start_s=stopped_s,
            end_s=now_s,
            attributes={Attr.REASON: reason, Attr.EPOCH: epoch, Attr.NUM_REQUESTS: num_requests},
        )

    def epoch_stopped(self, cause: EndCause | None, reason: str, now_s: float) -> None:
        self._stopped = (now_s, reason)
        self._chunks.clear()
        recovering = set()
        for owner in self._live.values():
            if owner.choice.waits_for is None and not owner.choice.is_over:
                recovering.add(owner.trace)
                owner.trace.interrupt(owner.choice, SpanName.RECOVERY, reason, now_s)
                _mark(owner.trace, owner.sequence)
        for trace in recovering:
            trace.num_recoveries += 1

    def request_ended(self, record: RequestRecord) -> None:
        trace = record.request.trace
        for choice in record.request.choices:
            self._live.pop(choice.sequence.key, None)
        assert isinstance(trace, RequestTraceRecorder), "another tracer created the trace"
        assert record.ended_s is not None
        text = None if record.error is None else _text(record.error)
        trace.end(self._attributes(record, trace.num_recoveries), text, record.ended_s)

    def _new_trace(self, parent: SpanContext | None, arrived_s: float) -> RequestTraceRecorder:
        trace_id = new_trace_id() if parent is None else parent.trace_id
        sampled = is_sampled(self._sampler, trace_id, parent, SpanName.GENERATE)
        return RequestTraceRecorder(self._recorder, trace_id, parent, is_sampled=sampled, arrived_s=arrived_s)

    def _attributes(self, record: RequestRecord, num_recoveries: int) -> Attributes:
        assert record.ended_s is not None
        assert record.outcome is not None
        request, ended_s, arrived_s = record.request, record.ended_s, record.arrived_s
        sequences = [choice.sequence for choice in request.choices]
        attributes: Attributes = {
            Attr.REQUEST_ID: id_text(request.id),
            Attr.REQUEST_MODEL: self._model,
            Attr.REQUEST_MAX_TOKENS: sequences[0].max_tokens,
            Attr.REQUEST_TEMPERATURE: sequences[0].sampling.temperature,
            Attr.REQUEST_TOP_P: sequences[0].sampling.top_p,
            Attr.PROMPT_TOKENS: request.num_prompt_tokens,
            Attr.COMPLETION_TOKENS: sum(sequence.num_generated_tokens for sequence in sequences),
            Attr.CACHED_TOKENS: sequences[0].num_cached_tokens,
            Attr.CHOICES: len(sequences),
            Attr.OUTCOME: record.outcome.value,
            Attr.NUM_PREEMPTIONS: record.num_preemptions,
            Attr.NUM_RECOVERIES: num_recoveries,
            Attr.E2E: ended_s - arrived_s,
            Attr.TIME_IN_QUEUE: (record.started_s or ended_s) - arrived_s,
        }
        if record.first_token_s is not None:
            attributes[Attr.TIME_TO_FIRST_TOKEN] = record.first_token_s - arrived_s
            attributes[Attr.TIME_IN_PREFILL] = record.first_token_s - (record.started_s or arrived_s)
            attributes[Attr.TIME_IN_DECODE] = ended_s - record.first_token_s
        return attributes


def _mark(trace: RequestTraceRecorder, sequence: Sequence) -> None:
    """Make stages record spans of a sequence from its next start on, if its request is recorded."""
    sequence.traceparent = format_traceparent(trace.context) if trace.is_recorded else ""


def _text(error: BaseException) -> str:
    """The part of an error that clients may see."""
    if isinstance(error, asyncio.CancelledError):
        return "the client disconnected"
    return str(error) if isinstance(error, ServingError) else INTERNAL_ERROR
