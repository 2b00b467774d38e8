"""All requests' traces: what the engine tells, handed to those whom it concerns."""

import asyncio
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.trace import SpanContext

from coordinator.requests.observer import EngineObserver
from coordinator.requests.request import Request
from coordinator.scheduling.answers import Progress
from coordinator.scheduling.sequence import Sequence
from coordinator.tracing.request_trace import ChoiceTrace, ObservedStep, RequestTrace, SentChunk
from telemetry.sampling import is_sampled
from telemetry.span_recorder import Attributes, SpanRecorder, new_span_id, new_trace_id
from telemetry.spans import Attr, SpanName
from wire.errors import RequestCancelled, ServingError
from wire.ids import RequestId, SequenceKey, id_text
from wire.steps import Prefill, Step, StepResult
from wire.trace_context import format_traceparent, parse_traceparent, span_context

INTERNAL_ERROR = "internal error"
MADE_WAY = "requests that may be why a worker was lost run alone"


@dataclass(frozen=True, slots=True)
class _Owner:
    """Whose a sequence is."""

    trace: RequestTrace
    choice: ChoiceTrace
    sequence: Sequence


class RequestTraces(EngineObserver):
    """One per coordinator."""

    def __init__(
        self,
        recorder: SpanRecorder,
        sampler: Sampler,
        *,
        model: str,
        on_refusal: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """`model` is what the served model is called. `on_refusal` is told why a call becomes no request,
        unless its client has left.
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
    ) -> Iterator[RequestTrace]:
        """A call that has arrived becomes a request within this. An error in it is the end of the trace."""
        trace = self._new_trace(parent, arrived_s)
        try:
            yield trace
        except BaseException as error:
            attributes: Attributes = {
                Attr.REQUEST_ID: id_text(request_id),
                Attr.OUTCOME: _outcome(error),
            }
            trace.end(attributes, _text(error), asyncio.get_running_loop().time())
            if isinstance(error, Exception) and not isinstance(error, RequestCancelled):
                self._on_refusal(error)
            raise

    @contextmanager
    def nameless_arrival(self) -> Iterator[None]:
        """The id of a call is not known within this, so an error in it is in no trace."""
        try:
            yield
        except Exception as error:
            self._on_refusal(error)
            raise

    def resumed(self, traceparent: str, caller_traceparent: str, arrived_s: float) -> RequestTrace | None:
        """The trace of a request that a former coordinator has left, which goes on under the same span; None
        where there is none.
        """
        begun = parse_traceparent(traceparent)
        if begun is None:
            return None
        return RequestTrace(
            self._recorder,
            begun.trace_id,
            parse_traceparent(caller_traceparent),
            is_sampled=begun.trace_flags.sampled,
            arrived_s=arrived_s,
            begun=begun,
        )

    def accepted(self, request: Request, now_s: float) -> None:
        trace = request.trace
        if trace is None:
            trace = request.trace = self._new_trace(None, now_s)
        assert isinstance(trace, RequestTrace), "whoever traces requests makes their traces"
        trace.accept(len(request.choices), now_s)
        for choice, state in zip(request.choices, trace.choices, strict=True):
            if choice.sequence.state.is_live:
                self._live[choice.sequence.key] = _Owner(trace, state, choice.sequence)
                _mark(trace, choice.sequence)
            else:
                trace.end_choice(state, now_s)

    def step_sent(self, step: Step, now_s: float) -> None:
        sent = []
        for part in reversed(step.slices):
            chunk = part.inference_step
            if not isinstance(chunk, Prefill):
                break  # decodes come first in a step
            owner = self._live.get(part.sequence)
            if owner is None:
                continue
            facts = SentChunk(
                generation=part.generation,
                epoch=step.epoch,
                step_id=step.step_id,
                start=chunk.start,
                num_tokens=chunk.num_tokens,
                batch_size=len(step.slices),
                sent_s=now_s,
            )
            owner.trace.send_chunk(owner.choice, facts)
            sent.append(owner)
        if sent:
            self._chunks[step.step_id] = sent

    def step_answered(
        self, result: StepResult, progress: Items[Progress], sent_s: float, now_s: float
    ) -> None:
        result_us = self._recorder.clock.at_us(now_s) - result.ready_at_us if result.ready_at_us else 0
        step = ObservedStep(result.epoch, result.step_id, now_s - sent_s, result_us / 1e6)
        for owner in self._chunks.pop(result.step_id, ()):
            owner.trace.answer_chunk(owner.choice, step, now_s)
        live = self._live
        for each in progress:
            answered = live.get(each.sequence.key)
            if answered is None:
                continue
            if each.token is not None:
                answered.trace.answer_token(answered.choice, step, now_s)
            if each.finish_reason is not None:
                answered.trace.end_choice(answered.choice, now_s)

    def preempted(self, sequences: Items[Sequence], now_s: float) -> None:
        for sequence in sequences:
            owner = self._live.get(sequence.key)
            if owner is not None:
                owner.trace.num_preemptions += 1
                owner.trace.interrupt(owner.choice, SpanName.PREEMPTION, "its blocks were needed", now_s)
                _mark(owner.trace, sequence)

    def made_way(self, sequences: Items[Sequence], now_s: float) -> None:
        for sequence in sequences:
            owner = self._live.get(sequence.key)
            if owner is not None:
                owner.trace.interrupt(owner.choice, SpanName.RECOVERY, MADE_WAY, now_s)
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

    def epoch_stopped(self, reason: str, now_s: float) -> None:
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

    def ended(self, request: Request, error: ServingError | None, now_s: float) -> None:
        trace = request.trace
        for choice in request.choices:
            self._live.pop(choice.sequence.key, None)
        if isinstance(trace, RequestTrace):
            text = None if error is None else _text(error)
            trace.end(self._attributes(request, trace, error, now_s), text, now_s)

    def _new_trace(self, parent: SpanContext | None, arrived_s: float) -> RequestTrace:
        trace_id = new_trace_id() if parent is None else parent.trace_id
        sampled = is_sampled(self._sampler, trace_id, parent, SpanName.GENERATE)
        return RequestTrace(self._recorder, trace_id, parent, is_sampled=sampled, arrived_s=arrived_s)

    def _attributes(
        self, request: Request, trace: RequestTrace, error: ServingError | None, now_s: float
    ) -> Attributes:
        sequences = [choice.sequence for choice in request.choices]
        sampling = sequences[0].sampling
        attributes: Attributes = {
            Attr.REQUEST_ID: id_text(request.id),
            Attr.REQUEST_MODEL: self._model,
            Attr.REQUEST_MAX_TOKENS: sequences[0].max_tokens,
            Attr.REQUEST_TEMPERATURE: sampling.temperature,
            Attr.REQUEST_TOP_P: sampling.top_p,
            Attr.PROMPT_TOKENS: request.num_prompt_tokens,
            Attr.COMPLETION_TOKENS: sum(each.num_generated_tokens for each in sequences),
            Attr.CACHED_TOKENS: sequences[0].num_cached_tokens,
            Attr.CHOICES: len(sequences),
            Attr.OUTCOME: "finished" if error is None else _outcome(error),
            Attr.NUM_PREEMPTIONS: trace.num_preemptions,
            Attr.NUM_RECOVERIES: trace.num_recoveries,
            Attr.E2E: now_s - trace.arrived_s,
            Attr.TIME_IN_QUEUE: (trace.scheduled_s or now_s) - trace.arrived_s,
        }
        if trace.first_token_s is not None:
            attributes[Attr.TIME_TO_FIRST_TOKEN] = trace.first_token_s - trace.arrived_s
            attributes[Attr.TIME_IN_PREFILL] = trace.first_token_s - (trace.scheduled_s or trace.arrived_s)
            attributes[Attr.TIME_IN_DECODE] = now_s - trace.first_token_s
        return attributes


def _mark(trace: RequestTrace, sequence: Sequence) -> None:
    """From its next start on, stages record what they do for it."""
    sequence.traceparent = format_traceparent(trace.context) if trace.is_recorded else ""


def _outcome(error: BaseException) -> str:
    is_cancelled = isinstance(error, RequestCancelled | asyncio.CancelledError | GeneratorExit)
    return "cancelled" if is_cancelled else "failed"


def _text(error: BaseException) -> str:
    """What of it a client may see."""
    if isinstance(error, asyncio.CancelledError):
        return "the client has left"
    return str(error) if isinstance(error, ServingError) else INTERNAL_ERROR
