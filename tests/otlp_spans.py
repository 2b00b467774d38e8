"""Spans of a request as OTLP messages, made by hand: what coordinator and workers would export."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status, TracesData

from telemetry.spans import COORDINATOR, WORKER, Attr, SpanName
from telemetry.trace_view.read_model import RequestTrace, read_spans, request_trace

REQUEST_ID = "01890a5d-ac96-774b-bcce-b302099a8057"
BEGIN_NS = 1_790_000_000_000_000_000
LAYERS_PER_STAGE = 4
PARENT_ID = b"\xff" * 8

Attributes = Mapping[str, str | bool | int | float]


@dataclass(frozen=True)
class Times:
    """Seconds of one step, or of many, on one stage."""

    compute: float
    wait: float = 0.0
    hop: float = 0.0
    receive: float = 0.0
    send: float = 0.0

    @property
    def in_step(self) -> float:
        """What it adds to the time of the step; sending overlaps the next hop."""
        return self.hop + self.receive + self.wait + self.compute


@dataclass
class SpanMaker:
    """Builds one trace. Times are in seconds since `begin_ns`; every `add` returns the id of its span."""

    request_id: str = REQUEST_ID
    trace_id: bytes = bytes(range(16))
    begin_ns: int = BEGIN_NS
    outcome: str = "finished"
    first_span: int = 1
    spans: list[ResourceSpans] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._numbers = itertools.count(self.first_span)
        self.root_id = self.new_id()

    def new_id(self) -> bytes:
        return next(self._numbers).to_bytes(8, "big")

    def add(
        self,
        name: str,
        start: float,
        end: float,
        attributes: Attributes | None = None,
        *,
        parent: bytes | None = None,
        worker: str | None = None,
        span_id: bytes | None = None,
        error: str | None = None,
    ) -> bytes:
        """A span of the coordinator, or of `worker`; below the root unless `parent` is another."""
        span = Span(
            trace_id=self.trace_id,
            span_id=span_id or self.new_id(),
            parent_span_id=self.root_id if parent is None else parent,
            name=name,
            start_time_unix_nano=self.begin_ns + round(start * 1e9),
            end_time_unix_nano=self.begin_ns + round(end * 1e9),
            attributes=_pairs(attributes or {}),
            status=Status(code=Status.STATUS_CODE_ERROR, message=error) if error is not None else None,
        )
        self.spans.append(
            ResourceSpans(
                resource=Resource(
                    attributes=_pairs(
                        {
                            "service.name": WORKER if worker else COORDINATOR,
                            "service.instance.id": worker or "coordinator",
                        }
                    )
                ),
                scope_spans=[ScopeSpans(scope=InstrumentationScope(name="stageline"), spans=[span])],
            )
        )
        return bytes(span.span_id)

    def root(
        self,
        end: float,
        attributes: Attributes | None = None,
        *,
        start: float = 0.0,
        error: str | None = None,
    ) -> bytes:
        """The span of the whole request; its parent is a span of a gateway or the client."""
        own = {
            Attr.REQUEST_ID: self.request_id,
            Attr.OUTCOME: self.outcome,
            Attr.PROMPT_TOKENS: 100,
            Attr.COMPLETION_TOKENS: 50,
            Attr.TIME_IN_QUEUE: 0.25,
            Attr.TIME_TO_FIRST_TOKEN: 0.5,
        }
        return self.add(
            SpanName.GENERATE,
            start,
            end,
            own | dict(attributes or {}),
            parent=PARENT_ID,
            span_id=self.root_id,
            error=error,
        )

    def gateway(
        self, start: float, end: float, attributes: Attributes | None = None, *, error: str | None = None
    ) -> bytes:
        """The span of the HTTP request above the root."""
        own = {Attr.OUTCOME: self.outcome}
        return self.add(
            SpanName.HTTP_CHAT,
            start,
            end,
            own | dict(attributes or {}),
            parent=b"",
            span_id=PARENT_ID,
            error=error,
        )

    def queue(self, start: float, end: float, *, choice: int = 0) -> bytes:
        return self.add(SpanName.QUEUE, start, end, {Attr.CHOICE: choice})

    def chunk(
        self, start: float, stages: Sequence[Times], *, result: float = 0.0, choice: int = 0, epoch: int = 1
    ) -> float:
        """A prefill chunk and its span on every stage; returns when it was answered."""
        end = start + sum(times.in_step for times in stages) + result
        parent = self.add(
            SpanName.PREFILL_CHUNK,
            start,
            end,
            {
                Attr.CHOICE: choice,
                Attr.NUM_STEPS: 1,
                Attr.TOKENS: 64,
                Attr.STEP_DURATION: end - start,
                Attr.RESULT_DURATION: result,
            },
        )
        at = start
        for stage, times in enumerate(stages):
            self.stage(
                SpanName.STAGE_PREFILL, parent, stage, at, times, choice=choice, epoch=epoch, tokens=64
            )
            at += times.in_step
        return end

    def decode(
        self,
        start: float,
        end: float,
        stages: Sequence[Times],
        *,
        steps: int = 16,
        result: float = 0.0,
        unrecorded: float = 0.0,
        choice: int = 0,
        epoch: int = 1,
        workers: Sequence[str] = (),
    ) -> bytes:
        """Decode work from `start` to `end`; the times of stages are sums over all steps."""
        in_steps = sum(times.in_step for times in stages) + result + unrecorded
        parent = self.add(
            SpanName.DECODE,
            start,
            end,
            {
                Attr.CHOICE: choice,
                Attr.NUM_STEPS: steps,
                Attr.TOKENS: steps,
                Attr.EPOCH: epoch,
                Attr.STEP_DURATION: in_steps,
                Attr.RESULT_DURATION: result,
            },
        )
        at = start
        for stage, times in enumerate(stages):
            self.stage(
                SpanName.STAGE_DECODE,
                parent,
                stage,
                at,
                times,
                end=end,
                steps=steps,
                tokens=steps,
                choice=choice,
                epoch=epoch,
                worker=workers[stage] if workers else None,
            )
            at += times.in_step / steps
        return parent

    def stage(
        self,
        name: SpanName,
        parent: bytes,
        stage: int,
        at: float,
        times: Times,
        *,
        end: float | None = None,
        steps: int = 1,
        tokens: int = 1,
        choice: int = 0,
        epoch: int = 1,
        worker: str | None = None,
    ) -> bytes:
        """A span of a stage whose first hop begins at `at`."""
        start = at + times.hop / steps
        return self.add(
            name,
            start,
            at + times.in_step if end is None else end,
            {
                Attr.CHOICE: choice,
                Attr.EPOCH: epoch,
                Attr.STAGE_INDEX: stage,
                Attr.STAGE_ROLE: "MIDDLE",
                Attr.LAYER_BEGIN: LAYERS_PER_STAGE * stage,
                Attr.LAYER_END: LAYERS_PER_STAGE * (stage + 1),
                Attr.WORKER: worker or f"worker-{stage}",
                Attr.NUM_STEPS: steps,
                Attr.TOKENS: tokens,
                Attr.BATCH_SIZE: 2.0,
                Attr.HOP_DURATION: times.hop,
                Attr.RECEIVE_DURATION: times.receive,
                Attr.WAIT_DURATION: times.wait,
                Attr.COMPUTE_DURATION: times.compute,
                Attr.SEND_DURATION: times.send,
            },
            parent=parent,
            worker=worker or f"worker-{stage}",
        )

    def data(self) -> TracesData:
        return TracesData(resource_spans=self.spans)

    def trace(self) -> RequestTrace:
        """As it is read from the messages."""
        return request_trace(read_spans(self.spans), self.request_id)


def served(
    compute: Sequence[float] = (0.2, 0.4, 0.2),
    *,
    request_id: str = REQUEST_ID,
    trace_id: bytes = bytes(range(16)),
    begin_ns: int = BEGIN_NS,
    first_span: int = 1,
) -> SpanMaker:
    """A request that waits 0.1 s, prefills one chunk in a tenth of `compute` and decodes 16 steps; `compute`
    is in seconds for each stage, over all decode steps.
    """
    maker = SpanMaker(request_id=request_id, trace_id=trace_id, begin_ns=begin_ns, first_span=first_span)
    maker.queue(0.0, 0.1)
    at = maker.chunk(0.1, [Times(seconds / 10, hop=0.001) for seconds in compute], result=0.001)
    stages = [Times(seconds, wait=0.01, hop=0.004, receive=0.002, send=0.003) for seconds in compute]
    end = at + sum(times.in_step for times in stages) + 0.01
    maker.decode(at, end, stages, result=0.005)
    maker.root(end)
    return maker


def _pairs(attributes: Attributes) -> Iterator[KeyValue]:
    for key, value in attributes.items():
        yield KeyValue(key=str(key), value=_any_value(value))


def _any_value(value: str | bool | int | float) -> AnyValue:
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    return AnyValue(double_value=value) if isinstance(value, float) else AnyValue(string_value=value)
