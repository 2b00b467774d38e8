"""Spans of one stage: prefill chunks and runs of decodes of traced requests."""

from dataclasses import dataclass, field

from opentelemetry.trace import SpanContext

from stage_worker.assignment import Assignment
from stage_worker.backends.backend import LoadedStage
from stage_worker.backends.contract import StepObserver, StepTiming, TimedOutput
from stage_worker.metrics import ObservedStage
from telemetry.span_recorder import Attributes, SpanRecorder, new_span_id
from telemetry.spans import Attr, SpanName
from wire.frames import Frame
from wire.steps import StartRecord, Step, StepSlice, identity_of, split_identities
from wire.trace_context import DECODE, parse_traceparent, work_span

FIRST_DECODE_STEPS = 16
MOST_DECODE_STEPS = 4096
"""A decode span covers 16 steps, the next one 32, and so on: early spans, and few for long outputs."""


@dataclass(frozen=True, slots=True)
class _DoneStep:
    """One step on this stage, shared by its sequences."""

    step_id: int
    batch_size: int
    timing: StepTiming
    sent_s: float


@dataclass(slots=True)
class _Traced:
    """A traced (sequence, restart count), with the decode steps since its last span."""

    request: SpanContext
    choice: int
    restart_count: int
    steps: list[_DoneStep] = field(default_factory=list)
    num_steps_of_span: int = FIRST_DECODE_STEPS


class StageSpans(StepObserver):
    """Records the spans of this worker's stage."""

    def __init__(self, recorder: SpanRecorder, stage: ObservedStage, *, worker: str) -> None:
        """`worker` is its name; `stage` has device and kernels."""
        self._recorder = recorder
        self._stage = stage
        self._worker = worker
        self._live: dict[bytes, _Traced] = {}
        self._of_stage: Attributes = {}

    def epoch_began(self, assignment: Assignment, epoch: int) -> None:
        self._live.clear()
        self._of_stage = {
            Attr.EPOCH: epoch,
            Attr.STAGE_INDEX: assignment.stage,
            Attr.STAGE_ROLE: assignment.role.value,
            Attr.LAYER_BEGIN: assignment.layer_begin,
            Attr.LAYER_END: assignment.layer_end,
            Attr.WORKER: self._worker,
            Attr.DTYPE: assignment.dtype.value,
            **_computes(self._stage.loaded),
        }

    def step_done(self, frame: Frame, output: TimedOutput, sent_s: float) -> None:
        step = frame.step
        for end in step.ends:
            if (ended := self._live.pop(identity_of(end.sequence, end.restart_count), None)) is not None:
                self._record_decode(ended)
        for start in step.starts:
            self._start(start)
        if self._live:
            self._add(step, _DoneStep(step.step_id, step.num_slices, output.timing, sent_s))

    def epoch_over(self) -> None:
        for traced in self._live.values():
            self._record_decode(traced)
        self._live.clear()

    def _start(self, start: StartRecord) -> None:
        request = parse_traceparent(start.traceparent) if start.traceparent else None
        if request is not None:
            identity = identity_of(start.sequence, start.restart_count)
            self._live[identity] = _Traced(request, start.sequence.choice, start.restart_count)

    def _add(self, step: Step, done: _DoneStep) -> None:
        for chunk in step.chunks:
            traced = self._live.get(identity_of(chunk.sequence, chunk.restart_count))
            if traced is not None:
                self._record_chunk(traced, chunk, done)
        for identity in split_identities(step.decodes.identities):
            traced = self._live.get(identity)
            if traced is None:
                continue
            traced.steps.append(done)
            if len(traced.steps) == traced.num_steps_of_span:
                traced.num_steps_of_span = min(2 * traced.num_steps_of_span, MOST_DECODE_STEPS)
                self._record_decode(traced)

    def _record_chunk(self, traced: _Traced, chunk: StepSlice, done: _DoneStep) -> None:
        start = chunk.first_position
        own: Attributes = {Attr.TOKENS: len(chunk.tokens), Attr.CHUNK_START: start}
        self._record(SpanName.STAGE_PREFILL, traced, start, [done], own)

    def _record_decode(self, traced: _Traced) -> None:
        steps, traced.steps = traced.steps, []
        if steps:
            self._record(SpanName.STAGE_DECODE, traced, DECODE, steps, {Attr.TOKENS: len(steps)})

    def _record(
        self, name: SpanName, traced: _Traced, start: int, steps: list[_DoneStep], own: Attributes
    ) -> None:
        parent = work_span(
            traced.request, choice=traced.choice, restart_count=traced.restart_count, start=start
        )
        context = SpanContext(
            parent.trace_id,
            new_span_id(),
            is_remote=False,
            trace_flags=parent.trace_flags,
            trace_state=parent.trace_state,
        )
        clock = self._recorder.clock
        attributes: Attributes = {
            **self._of_stage,
            **own,
            Attr.CHOICE: traced.choice,
            Attr.RESTART_COUNT: traced.restart_count,
            Attr.STEP_ID: steps[0].step_id,
            Attr.LAST_STEP_ID: steps[-1].step_id,
            Attr.NUM_STEPS: len(steps),
            Attr.BATCH_SIZE: sum(step.batch_size for step in steps) / len(steps),
            Attr.CLOCK_OFFSET: clock.offset_us / 1e6,
            Attr.CLOCK_UNCERTAINTY: (clock.uncertainty_us or 0) / 1e6,
            **_durations(steps),
        }
        self._recorder.record(
            name,
            context,
            parent,
            start_s=steps[0].timing.began_s,
            end_s=steps[-1].timing.ready_s,
            attributes=attributes,
        )


def _computes(loaded: LoadedStage | None) -> Attributes:
    if loaded is None:
        return {}
    kernels: Attributes = {Attr.KERNELS: loaded.kernels} if loaded.kernels else {}
    return {Attr.DEVICE: loaded.device, **kernels}


def _durations(steps: list[_DoneStep]) -> Attributes:
    """Sum of each part over the steps, in seconds."""
    timings = [step.timing for step in steps]
    return {
        Attr.HOP_DURATION: sum(timing.hop_s or 0.0 for timing in timings),
        Attr.RECEIVE_DURATION: sum(timing.received_s - timing.began_s for timing in timings),
        Attr.WAIT_DURATION: sum(timing.started_s - timing.received_s for timing in timings),
        Attr.COMPUTE_DURATION: sum(timing.ready_s - timing.started_s for timing in timings),
        Attr.SEND_DURATION: sum(step.sent_s - step.timing.ready_s for step in steps),
    }
