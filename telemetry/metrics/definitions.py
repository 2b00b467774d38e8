"""Every metric in one table; docs/telemetry.md explains them.

Names and units follow OpenTelemetry's conventions (dots, UCUM); the names for Prometheus are derived from
them by OpenTelemetry's rules for that. A label has a short name in Prometheus and is an attribute elsewhere.
"""

import re
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """COUNTER only grows, UP_DOWN is a sum that also shrinks, GAUGE is read off, HISTOGRAM counts values."""

    COUNTER = "counter"
    UP_DOWN = "up-down counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Process(Enum):
    """Who records a metric; the value is its service.name."""

    COORDINATOR = "stageline-coordinator"
    WORKER = "stageline-worker"


OTHER = "other"
"""The label value that stands for all that have no series of their own."""


@dataclass(frozen=True, slots=True)
class Label:
    """What tells the series of a metric apart: one of `values`, or else at most `most` different ones.

    `name` is the label in Prometheus, `attribute` that of OpenTelemetry, where its values are integers if
    `is_integer`.
    """

    name: str
    attribute: str
    values: tuple[str, ...] = ()
    most: int = 0
    is_integer: bool = False

    def __post_init__(self) -> None:
        if not self.values and self.most < 1:
            raise ValueError(f"label {self.name!r} has neither values nor a limit on how many")

    @property
    def num_values(self) -> int:
        """The most that there are, without OTHER."""
        return len(self.values) or self.most


_UNIT_WORDS = {"s": "seconds", "By": "bytes"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric. Those of workers have the label `worker` too, where the coordinator shows them.

    `bounds` are the upper bounds of a histogram's buckets, inclusive, in `unit`.
    """

    name: str
    kind: Kind
    unit: str
    processes: tuple[Process, ...]
    description: str
    labels: tuple[Label, ...] = ()
    bounds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if (self.kind is Kind.HISTOGRAM) != bool(self.bounds):
            raise ValueError(f"{self.name} is a {self.kind.value} with {len(self.bounds)} bucket bounds")
        if list(self.bounds) != sorted(set(self.bounds)):
            raise ValueError(f"the bucket bounds of {self.name} do not ascend: {self.bounds}")

    @property
    def prometheus_name(self) -> str:
        """Of its family: with the unit, and `_total` for a counter."""
        name = re.sub(r"[^a-zA-Z0-9]+", "_", self.name)
        if unit := self.prometheus_unit:
            name = name if name.endswith(f"_{unit}") else f"{name}_{unit}"
        return f"{name}_total" if self.kind is Kind.COUNTER else name

    @property
    def prometheus_unit(self) -> str:
        """The word that ends its name; what is counted, in braces in UCUM, is none."""
        if self.unit == "1":
            return "ratio" if self.kind is Kind.GAUGE else ""
        return _UNIT_WORDS[self.unit] if not self.unit.startswith("{") else ""

    @property
    def is_integer(self) -> bool:
        """It counts whole things."""
        return self.unit not in ("s", "1")

    @property
    def max_series(self) -> int:
        """Different label values that it may have, OTHER not counted."""
        product = 1
        for label in self.labels:
            product *= label.num_values
        return product


STAGE = Label("stage", "stageline.stage.index", most=256, is_integer=True)
WORKER = Label("worker", "stageline.worker.name", most=512)
REQUEST_STATE = Label("state", "stageline.request.state", values=("preparing", "queued", "prefill", "decode"))
OUTCOME = Label("outcome", "stageline.request.outcome", values=("finished", "cancelled", "failed"))
REFUSAL = Label(
    "reason", "stageline.refusal.reason", values=("overloaded", "invalid", "unavailable", "other")
)
REASON = Label(
    "reason", "stageline.reason", values=("death", "device", "fault", "broken", "no_progress", "replanned")
)
STEP_PART = Label("part", "stageline.step.part", values=("hop", "receive", "wait", "compute"))
WORKER_STATE = Label(
    "state",
    "stageline.worker.state",
    values=("joining", "spare", "loading", "ready", "suspect", "draining", "lost", "quarantined"),
)
DIRECTION = Label("direction", "network.io.direction", values=("receive", "transmit"))
BLOCK_STATE = Label("state", "stageline.kv.block.state", values=("active", "inactive", "free"))
MEMORY_KIND = Label("kind", "stageline.memory.kind", values=("weights", "kv"))
DEVICE = Label("device", "stageline.device", most=1)
DTYPE = Label("dtype", "stageline.dtype", values=("bf16", "f16", "f32"))
KERNELS = Label("kernels", "stageline.kernels", values=("compiled", "plain", "none"))
LOAD_PHASE = Label("phase", "stageline.load.phase", values=("load", "warmup"))
DESTINATION = Label("destination", "stageline.destination", values=("coordinator", "collector"))

_SHORT_S = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
_STEP_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_REQUEST_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
_RECOVERY_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0)


def _of(
    processes: tuple[Process, ...],
    name: str,
    kind: Kind,
    unit: str,
    description: str,
    *labels: Label,
    bounds: tuple[float, ...] = (),
) -> Metric:
    return Metric(
        name=name,
        kind=kind,
        unit=unit,
        processes=processes,
        description=description,
        labels=labels,
        bounds=bounds,
    )


_COORDINATOR, _WORKER, _BOTH = (Process.COORDINATOR,), (Process.WORKER,), tuple(Process)
_COUNTER, _UP_DOWN, _GAUGE, _HISTOGRAM = Kind.COUNTER, Kind.UP_DOWN, Kind.GAUGE, Kind.HISTOGRAM

REQUESTS = _of(
    _COORDINATOR,
    "stageline.request.active",
    _UP_DOWN,
    "{request}",
    "Requests that have not ended, by what they are doing now.",
    REQUEST_STATE,
)
REQUESTS_ENDED = _of(
    _COORDINATOR, "stageline.request.ended", _COUNTER, "{request}", "Requests that have ended.", OUTCOME
)
REQUESTS_REFUSED = _of(
    _COORDINATOR,
    "stageline.request.refused",
    _COUNTER,
    "{request}",
    "Requests that were not accepted, by the reason.",
    REFUSAL,
)
QUEUE_TIME = _of(
    _COORDINATOR,
    "stageline.request.queue.duration",
    _HISTOGRAM,
    "s",
    "From accepting a request to handing out its first step.",
    bounds=_REQUEST_S,
)
FIRST_TOKEN_TIME = _of(
    _COORDINATOR,
    "stageline.request.time_to_first_token",
    _HISTOGRAM,
    "s",
    "From accepting a request to its first token.",
    bounds=_REQUEST_S,
)
INTER_TOKEN_TIME = _of(
    _COORDINATOR,
    "stageline.request.inter_token_latency",
    _HISTOGRAM,
    "s",
    "From one token of a choice to its next, whatever came in between.",
    bounds=_TOKEN_S,
)
REQUEST_TIME = _of(
    _COORDINATOR,
    "stageline.request.duration",
    _HISTOGRAM,
    "s",
    "From accepting a request to its end.",
    OUTCOME,
    bounds=_REQUEST_S,
)
PROMPT_TOKENS = _of(
    _COORDINATOR,
    "stageline.prompt.tokens",
    _COUNTER,
    "{token}",
    "Prompt tokens of the choices that have begun, cached ones too.",
)
CACHED_TOKENS = _of(
    _COORDINATOR,
    "stageline.prompt.cached_tokens",
    _COUNTER,
    "{token}",
    "Prompt tokens that were not computed, because the cache had them.",
)
GENERATED_TOKENS = _of(
    _COORDINATOR, "stageline.generated.tokens", _COUNTER, "{token}", "Tokens that were generated."
)
PREEMPTIONS = _of(
    _COORDINATOR,
    "stageline.preemptions",
    _COUNTER,
    "{preemption}",
    "Choices that had to give up their blocks to others.",
)
RECOVERIES = _of(
    _COORDINATOR,
    "stageline.recoveries",
    _COUNTER,
    "{recovery}",
    "Epochs that ended while requests were served, by the reason.",
    REASON,
)
RECOVERY_TIME = _of(
    _COORDINATOR,
    "stageline.recovery.duration",
    _HISTOGRAM,
    "s",
    "From the end of an epoch to the first moment at which the next one takes steps.",
    REASON,
    bounds=_RECOVERY_S,
)
STEPS_IN_FLIGHT = _of(
    _COORDINATOR, "stageline.steps.in_flight", _UP_DOWN, "{step}", "Steps that are not answered yet."
)
STEP_TIME = _of(
    _COORDINATOR,
    "stageline.step.duration",
    _HISTOGRAM,
    "s",
    "From handing out a step to its answer.",
    bounds=_STEP_S,
)
STEP_PART_TIME = _of(
    _COORDINATOR,
    "stageline.step.part.time",
    _COUNTER,
    "s",
    "What answered steps have spent at each stage and on the way to it.",
    STAGE,
    STEP_PART,
)
SCHEDULER_TIME = _of(
    _COORDINATOR,
    "stageline.scheduler.duration",
    _HISTOGRAM,
    "s",
    "Deciding what a step computes.",
    bounds=_SHORT_S,
)
ACTIVE_TIME = _of(
    _COORDINATOR,
    "stageline.pipeline.active.time",
    _COUNTER,
    "s",
    "Time in which at least one step was in flight.",
)
BUBBLE = _of(
    _COORDINATOR,
    "stageline.pipeline.bubble",
    _GAUGE,
    "1",
    "Of the time with steps in flight in the last 10 s, the share in which a stage computed nothing; "
    "the mean of all stages.",
)
WORKERS = _of(
    _COORDINATOR, "stageline.workers", _UP_DOWN, "{worker}", "Workers, by their state.", WORKER_STATE
)
DROPPED_SPANS = _of(
    _BOTH, "stageline.spans.dropped", _COUNTER, "{span}", "Spans that were recorded and not kept."
)
BUSY_TIME = _of(
    _WORKER, "stageline.stage.busy.time", _COUNTER, "s", "Time in which the stage computed a step.", STAGE
)
WAIT_TIME = _of(
    _WORKER,
    "stageline.stage.wait.time",
    _COUNTER,
    "s",
    "Time of an epoch in which the stage had nothing to compute.",
    STAGE,
)
SEND_TIME = _of(
    _WORKER,
    "stageline.stage.send.time",
    _COUNTER,
    "s",
    "From an output's being ready to the transport's having taken it; overlaps the next step's computation.",
    STAGE,
)
SERVING_TIME = _of(
    _WORKER,
    "stageline.stage.serving.time",
    _COUNTER,
    "s",
    "Time in which an epoch served here: busy, waiting, and handing over between the two.",
    STAGE,
)
STAGE_STEP_TIME = _of(
    _WORKER,
    "stageline.stage.step.duration",
    _HISTOGRAM,
    "s",
    "Computing one step.",
    STAGE,
    bounds=_STEP_S,
)
FRAMES = _of(
    _WORKER,
    "stageline.stage.frames",
    _COUNTER,
    "{frame}",
    "Frames that came in and were computed; outputs that went on.",
    STAGE,
    DIRECTION,
)
ACTIVATION_BYTES = _of(
    _WORKER,
    "stageline.stage.activation.io",
    _COUNTER,
    "By",
    "Hidden states that came in and went on.",
    STAGE,
    DIRECTION,
)
KV_BLOCKS = _of(
    _WORKER,
    "stageline.kv.blocks",
    _UP_DOWN,
    "{block}",
    "Blocks of the KV cache: in use, kept for prefix hits, free.",
    STAGE,
    BLOCK_STATE,
)
PREFIX_WANTED = _of(
    _WORKER,
    "stageline.kv.prefix.wanted",
    _COUNTER,
    "{block}",
    "Full blocks that sequences wanted from the cache.",
    STAGE,
)
PREFIX_HITS = _of(
    _WORKER, "stageline.kv.prefix.hits", _COUNTER, "{block}", "Those of them that were there.", STAGE
)
LOAD_TIME = _of(
    _WORKER,
    "stageline.stage.load.duration",
    _GAUGE,
    "s",
    "What the present stage took to load, and to warm up.",
    STAGE,
    LOAD_PHASE,
)
STAGE_MEMORY = _of(
    _WORKER,
    "stageline.stage.memory",
    _UP_DOWN,
    "By",
    "Memory of the present stage's weights and KV pages.",
    STAGE,
    MEMORY_KIND,
)
STAGE_COMPUTE = _of(
    _WORKER,
    "stageline.stage.compute",
    _GAUGE,
    "{stage}",
    "How the present stage computes; always 1.",
    DEVICE,
    DTYPE,
    KERNELS,
)
JOURNAL_FAILING = _of(
    _COORDINATOR,
    "stageline.journal.failing",
    _GAUGE,
    "1",
    "Whether the journal cannot be written: 1 or 0.",
)
JOURNAL_UNWRITTEN = _of(
    _COORDINATOR,
    "stageline.journal.unwritten",
    _UP_DOWN,
    "{record}",
    "Records of running requests that wait for the journal.",
)
RESIDENT_MEMORY = _of(
    _BOTH, "stageline.process.resident_memory", _UP_DOWN, "By", "Memory that the process holds."
)
FAILED_EXPORTS = _of(
    _BOTH,
    "stageline.metrics.exports.failed",
    _COUNTER,
    "{export}",
    "Exports of this process's metrics that nobody took.",
    DESTINATION,
)
SERIES_OVERFLOWS = _of(
    _BOTH,
    "stageline.metrics.overflows",
    _COUNTER,
    "{lookup}",
    "Values that went to the series `other`, because there were too many series.",
)

METRICS: tuple[Metric, ...] = tuple(each for each in vars().values() if isinstance(each, Metric))
"""In the order of the table in docs/telemetry.md."""
