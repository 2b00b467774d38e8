"""One request's trace: what its choices do, and since when, turned into spans as it is over."""

from dataclasses import dataclass, field

from opentelemetry.trace import SpanContext

from telemetry.span_recorder import Attributes, SpanRecorder, new_span_id
from telemetry.spans import Attr, SpanName
from wire.trace_context import DECODE, format_traceparent, span_context, work_span

MOST_HELD_SPANS = 64
"""Spans of a request that is not sampled that are held, in case that something goes wrong with it."""


RESUMED = "the coordinator was started again"


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """A step as the coordinator sees it: `took_s` from being handed out to its answer, of which `result_s`
    since LAST had the answer ready.
    """

    epoch: int
    step_id: int
    took_s: float
    result_s: float


@dataclass(slots=True)
class SentChunk:
    """A prefill chunk on its way."""

    generation: int
    epoch: int
    step_id: int
    start: int
    num_tokens: int
    batch_size: int
    sent_s: float


@dataclass(slots=True)
class ChoiceTrace:
    """What one choice does now: it waits for `waits_for` since `since_s`, has chunks on their way, or
    decodes.
    """

    index: int
    since_s: float
    waits_for: SpanName | None = SpanName.QUEUE
    reason: str = ""
    generation: int = 0
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


class RequestTrace:
    """Made when a call arrives. Whether it is sampled was decided then; a preemption, a recovery or an error
    makes it be recorded all the same, with what was held until then.
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
        """`parent` is the caller's span, `begun` the request's own, if a former coordinator has begun it."""
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
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.num_preemptions = 0
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
        """W3C's header, of the request's span."""
        return format_traceparent(self.context)

    @property
    def caller_traceparent(self) -> str:
        """Of the span that it is below, or empty."""
        return "" if self._parent is None else format_traceparent(self._parent)

    def accept(self, num_choices: int, now_s: float) -> None:
        """The request is in the queue; that of a former coordinator recovers from the loss of it."""
        self.choices = tuple(ChoiceTrace(index, now_s) for index in range(num_choices))
        if not self._is_resumed:
            self._emit(SpanName.INTAKE, self.arrived_s, now_s, {})
            return
        self.num_recoveries = 1
        for choice in self.choices:
            choice.waits_for, choice.reason = SpanName.RECOVERY, RESUMED
        self.record_always()

    def send_chunk(self, choice: ChoiceTrace, chunk: SentChunk) -> None:
        """A prompt chunk of a choice is handed out."""
        if choice.waits_for is not None:
            self._end_wait(choice, chunk.sent_s)
        if self.scheduled_s is None:
            self.scheduled_s = chunk.sent_s
        choice.generation = chunk.generation
        choice.chunks[chunk.step_id] = chunk

    def answer_chunk(self, choice: ChoiceTrace, step: ObservedStep, now_s: float) -> None:
        """A chunk was computed."""
        chunk = choice.chunks.pop(step.step_id, None)
        if chunk is not None:
            self._emit_chunk(choice, chunk, now_s, step)

    def answer_token(self, choice: ChoiceTrace, step: ObservedStep, now_s: float) -> None:
        """A token has come: the first one of this start, or one more."""
        if choice.is_decoding:
            choice.steps.append(step)
            return
        if self.first_token_s is None:
            self.first_token_s = now_s
        choice.is_decoding, choice.since_s = True, now_s

    def end_choice(self, choice: ChoiceTrace, now_s: float) -> None:
        """Nothing more comes of it."""
        if choice.is_over:
            return
        if choice.waits_for is not None:
            self._end_wait(choice, now_s)
        self._stop_work(choice, now_s)
        choice.is_over = True

    def interrupt(self, choice: ChoiceTrace, kind: SpanName, reason: str, now_s: float) -> None:
        """A choice that was computing waits again: PREEMPTION or RECOVERY. From here on it is recorded."""
        if choice.is_over or choice.waits_for is not None:
            return
        self._stop_work(choice, now_s)
        choice.waits_for, choice.reason, choice.since_s = kind, reason, now_s
        self.record_always()

    def record_always(self) -> None:
        """It is recorded from now on, with what has been held."""
        if self.is_recorded:
            return
        self.is_recorded = True
        self.context = span_context(
            self.context.trace_id, self.context.span_id, tracestate=self.context.trace_state
        )
        held, self._held = self._held, []
        for each in held:
            context = span_context(self.context.trace_id, each.context.span_id)
            self._record(each.name, context, each.start_s, each.end_s, each.attributes, each.error)

    def end(self, attributes: Attributes, error: str | None, now_s: float) -> None:
        """The request is over: its own span."""
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
        attributes: Attributes = {Attr.CHOICE: choice.index, Attr.GENERATION: choice.generation}
        if choice.reason:
            attributes[Attr.REASON] = choice.reason
        self._emit(choice.waits_for, choice.since_s, now_s, attributes)
        choice.waits_for, choice.reason = None, ""

    def _stop_work(self, choice: ChoiceTrace, now_s: float) -> None:
        """Chunks that are on their way are not waited for; stages may compute them, under their spans."""
        for chunk in choice.chunks.values():
            self._emit_chunk(choice, chunk, now_s, None)
        choice.chunks.clear()
        if not choice.is_decoding:
            return
        steps, choice.steps, choice.is_decoding = choice.steps, [], False
        attributes: Attributes = {
            Attr.CHOICE: choice.index,
            Attr.GENERATION: choice.generation,
            Attr.NUM_STEPS: len(steps),
            Attr.TOKENS: len(steps),
            Attr.STEP_DURATION: sum(each.took_s for each in steps),
            Attr.RESULT_DURATION: sum(each.result_s for each in steps),
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
            Attr.GENERATION: chunk.generation,
            Attr.EPOCH: chunk.epoch,
            Attr.STEP_ID: chunk.step_id,
            Attr.LAST_STEP_ID: chunk.step_id,
            Attr.NUM_STEPS: 1,
            Attr.TOKENS: chunk.num_tokens,
            Attr.CHUNK_START: chunk.start,
            Attr.BATCH_SIZE: chunk.batch_size,
        }
        if answered is not None:
            attributes[Attr.STEP_DURATION] = answered.took_s
            attributes[Attr.RESULT_DURATION] = answered.result_s
        context = self._work(choice, chunk.start)
        self._emit(SpanName.PREFILL_CHUNK, chunk.sent_s, now_s, attributes, context)

    def _work(self, choice: ChoiceTrace, start: int) -> SpanContext:
        return work_span(self.context, choice=choice.index, generation=choice.generation, start=start)

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
