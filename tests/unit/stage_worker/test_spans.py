"""What a stage records of the requests that are traced."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_worker.backends.backend import LoadedStage
from stage_worker.backends.contract import HandedOn, StepTiming, TimedOutput
from stage_worker.backends.mock_compute import MockCompute
from stage_worker.executor import StepExecutor
from stage_worker.spans import MOST_DECODE_STEPS, StageSpans
from telemetry.spans import Attr, SpanName
from tests.unit.stage_worker.backends.mock_stages import mock_assignment
from tests.unit.telemetry.recording import ListSink, recorder_into
from wire.frames import Frame
from wire.ids import SequenceKey, new_request_id
from wire.sampling import StepSampling
from wire.steps import Decode, EndRecord, Prefill, StartRecord, Step, StepSlice
from wire.trace_context import format_traceparent, span_context, work_span

REQUEST = span_context(77, 78)
ONE, OTHER = (SequenceKey(new_request_id(), choice) for choice in (0, 1))


class Stage:
    """Stage 1 of 3 in epoch 4; each step takes a given time."""

    def __init__(self) -> None:
        self.sink = ListSink()
        assignment = mock_assignment(stage=1)
        self.loaded: LoadedStage | None = LoadedStage(
            assignment=assignment,
            executor=StepExecutor(assignment, MockCompute(assignment)),
            weight_bytes=0,
            kv_bytes=0,
            read_bytes=0,
            load_ms=0,
            warmup_ms=0,
            device="cuda:1",
            kernels="plain",
        )
        self.is_idle = False
        self.spans = StageSpans(recorder_into(self.sink), self, worker="gpu-b")
        self.spans.epoch_began(assignment, 4)
        self.now_s = 50.0
        self.num_steps = 0

    def run(
        self,
        *slices: StepSlice,
        starts: tuple[StartRecord, ...] = (),
        ends: tuple[EndRecord, ...] = (),
        parts: tuple[float, float, float, float, float] = (0.001, 0.002, 0.003, 0.004, 0.005),
    ) -> None:
        """`parts`: hop, receive, wait, compute, send in seconds."""
        hop_s, *rest = parts
        moments = [self.now_s + hop_s]
        for part in rest:
            moments.append(moments[-1] + part)
        began_s, received_s, started_s, ready_s, sent_s = moments
        self.now_s = sent_s
        step = Step.of(slices, epoch=4, step_id=self.num_steps, starts=starts, ends=ends)
        self.num_steps += 1
        timing = StepTiming(began_s, received_s, started_s, ready_s, hop_s)
        output = TimedOutput(HandedOn(step.step_id, 0, None), (), 0, timing)
        self.spans.step_done(Frame(step, None), output, sent_s)

    @property
    def decodes(self) -> list[dict[str, object]]:
        return [dict(span.attributes or {}) for span in self.sink.named(SpanName.STAGE_DECODE)]


def start(key: SequenceKey, *, restart_count: int = 0, traceparent: str | None = None) -> StartRecord:
    header = format_traceparent(REQUEST) if traceparent is None else traceparent
    return StartRecord(key, restart_count, 3, (1, 2, 3), StepSampling(), header)


def chunk(key: SequenceKey, begin: int, num_tokens: int) -> StepSlice:
    return StepSlice(key, 0, tuple(range(num_tokens)), Prefill(begin, num_tokens, 3))


def decode(key: SequenceKey, position: int = 3, *, restart_count: int = 0) -> StepSlice:
    return StepSlice(key, restart_count, (1,), Decode(position))


def test_each_chunk_has_a_span_below_the_coordinators() -> None:
    stage = Stage()
    stage.run(chunk(ONE, 0, 2), starts=(start(ONE),))
    stage.run(chunk(ONE, 2, 1))
    first, second = stage.sink.named(SpanName.STAGE_PREFILL)
    for span, begin in ((first, 0), (second, 2)):
        parent = work_span(REQUEST, choice=0, restart_count=0, start=begin)
        assert span.parent is not None
        assert (span.parent.trace_id, span.parent.span_id) == (parent.trace_id, parent.span_id)
    attributes = first.attributes or {}
    assert attributes[Attr.STAGE_INDEX] == 1
    assert attributes[Attr.WORKER] == "gpu-b"
    assert attributes[Attr.TOKENS] == 2
    assert attributes[Attr.COMPUTE_DURATION] == pytest.approx(0.004)
    assert attributes[Attr.SEND_DURATION] == pytest.approx(0.005)
    assert first.start_time is not None
    assert first.end_time is not None
    assert (first.end_time - first.start_time) / 1e9 == pytest.approx(0.009, abs=2e-6)


@given(
    st.integers(0, 300),
    st.tuples(*[st.floats(0, 0.1) for _ in range(5)]),
    st.integers(0, 3),
)
def test_the_sums_of_decode_spans_are_exact_and_spans_are_few(
    num_steps: int, parts: tuple[float, float, float, float, float], num_others: int
) -> None:
    stage = Stage()
    stage.run(chunk(ONE, 0, 3), starts=(start(ONE),))
    others = [SequenceKey(new_request_id(), 0) for _ in range(num_others)]
    for position in range(num_steps):
        stage.run(decode(ONE, 3 + position), *[decode(sequence) for sequence in others], parts=parts)
    stage.run(ends=(EndRecord(ONE, 0),))
    names = (Attr.HOP_DURATION, Attr.RECEIVE_DURATION, Attr.WAIT_DURATION, Attr.COMPUTE_DURATION)
    for name, part in zip((*names, Attr.SEND_DURATION), parts, strict=True):
        assert sum(attributes[name] for attributes in stage.decodes) == pytest.approx(
            num_steps * part, abs=1e-9
        )
    assert sum(attributes[Attr.NUM_STEPS] for attributes in stage.decodes) == num_steps
    assert all(attributes[Attr.BATCH_SIZE] == 1 + num_others for attributes in stage.decodes)
    assert len(stage.decodes) <= 1 + (num_steps // 16).bit_length()


def test_a_long_output_has_a_span_for_thousands_of_steps() -> None:
    stage = Stage()
    stage.run(chunk(ONE, 0, 3), starts=(start(ONE),))
    for _ in range(20_000):
        stage.run(decode(ONE))
    assert len(stage.decodes) <= 8 + 20_000 // MOST_DECODE_STEPS + 1


def test_untraced_requests_are_not_recorded() -> None:
    stage = Stage()
    stage.run(chunk(ONE, 0, 3), starts=(start(ONE, traceparent=""), start(OTHER, traceparent="nonsense")))
    stage.run(decode(ONE), decode(OTHER))
    stage.run(ends=(EndRecord(ONE, 0), EndRecord(OTHER, 0)))
    assert stage.sink.spans == []


def test_a_choice_restarted_in_its_last_step_gets_a_new_span() -> None:
    stage = Stage()
    stage.run(chunk(ONE, 0, 3), starts=(start(ONE),))
    stage.run(decode(ONE))
    stage.run(chunk(ONE, 0, 3), starts=(start(ONE, restart_count=1),), ends=(EndRecord(ONE, 0),))
    stage.run(decode(ONE, restart_count=1))
    stage.run(ends=(EndRecord(ONE, 1),))
    assert [attributes[Attr.RESTART_COUNT] for attributes in stage.decodes] == [0, 1]


def test_spans_have_device_dtype_and_kernels_of_the_stage() -> None:
    stage = Stage()
    stage.run(StepSlice(ONE, 0, (1, 2, 3), Prefill(0, 3, 3)), starts=(start(ONE),))
    (span,) = stage.sink.named(SpanName.STAGE_PREFILL)
    attributes = dict(span.attributes or {})
    assert attributes[Attr.DEVICE] == "cuda:1"
    assert attributes[Attr.DTYPE] == mock_assignment(stage=1).dtype.value
    assert attributes[Attr.KERNELS] == "plain"


def test_the_end_of_an_epoch_records_its_computed_steps() -> None:
    stage = Stage()
    stage.run(chunk(ONE, 0, 3), starts=(start(ONE),))
    stage.run(decode(ONE))
    stage.spans.epoch_over()
    assert [attributes[Attr.NUM_STEPS] for attributes in stage.decodes] == [1]
    stage.spans.epoch_began(mock_assignment(stage=1), 5)
    stage.run(decode(ONE))
    stage.spans.epoch_over()
    assert len(stage.decodes) == 1
