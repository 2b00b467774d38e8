"""The table of all metrics, docs/reference/metrics.md is generated from it.

Names and units follow OpenTelemetry's conventions (dots, UCUM); the names for Prometheus are derived from
them by OpenTelemetry's rules for that. A label has a short name in Prometheus and is an attribute elsewhere.
"""

import re
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """COUNTER only grows, UP_DOWN also shrinks, GAUGE is set, HISTOGRAM counts values by bucket."""

    COUNTER = "counter"
    UP_DOWN = "up-down counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Process(Enum):
    """The process that records a metric; the value is its service.name."""

    COORDINATOR = "stageline-coordinator"
    WORKER = "stageline-worker"
    GATEWAY = "stageline-gateway"


OTHER = "other"
"""Label value of the series for all values beyond the limit."""


@dataclass(frozen=True, slots=True)
class Label:
    """A label of a metric: one of `values`, or else at most `most` different ones.

    `name` is the label in Prometheus, `attribute` the name in OpenTelemetry, where its values are integers if
    `is_integer`.
    """

    name: str
    attribute: str
    values: tuple[str, ...] = ()
    most: int = 0
    is_integer: bool = False

    def __post_init__(self) -> None:
        if not self.values and self.most < 1:
            raise ValueError(f"label {self.name!r} has neither values nor a maximum number")

    @property
    def num_values(self) -> int:
        """Maximum number of values, without OTHER."""
        return len(self.values) or self.most


_UNIT_WORDS = {"s": "seconds", "By": "bytes"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric. The coordinator adds the label `worker` to the metrics of workers.

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
        """Name of its family: with the unit, and `_total` for a counter."""
        name = re.sub(r"[^a-zA-Z0-9]+", "_", self.name)
        if unit := self.prometheus_unit:
            name = name if name.endswith(f"_{unit}") else f"{name}_{unit}"
        return f"{name}_total" if self.kind is Kind.COUNTER else name

    @property
    def prometheus_unit(self) -> str:
        """The unit as the last word of the name; counted things, in braces in UCUM, have none."""
        if self.unit == "1":
            return "ratio" if self.kind is Kind.GAUGE else ""
        return _UNIT_WORDS[self.unit] if not self.unit.startswith("{") else ""

    @property
    def is_integer(self) -> bool:
        """Whether values are whole numbers."""
        return self.unit not in ("s", "1")

    @property
    def max_series(self) -> int:
        """Maximum number of series, without OTHER."""
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
ACCESS = Label(
    "secret",
    "stageline.access.secret",
    values=("attach_secret", "operator_token", "hop_secret", "certificate", "join_token", "weights"),
)
STEP_PART = Label("part", "stageline.step.part", values=("hop", "receive", "wait", "compute"))
WORKER_STATE = Label(
    "state",
    "stageline.worker.state",
    values=("joining", "spare", "loading", "ready", "suspect", "draining", "lost", "quarantined"),
)
DIRECTION = Label("direction", "network.io.direction", values=("receive", "transmit"))
BLOCK_STATE = Label("state", "stageline.kv.block.state", values=("active", "inactive", "free"))
RECURRENT_STATE = Label("state", "stageline.kv.recurrent.state", values=("live", "saved", "free"))
MEMORY_KIND = Label("kind", "stageline.memory.kind", values=("weights", "kv"))
DEVICE_MEMORY_KIND = Label(
    "kind", "stageline.device.memory.kind", values=("allocated", "reserved", "free", "peak", "pinned")
)
DEVICE = Label("device", "stageline.device", most=1)
DTYPE = Label("dtype", "stageline.dtype", values=("bf16", "f16", "f32"))
KERNELS = Label("kernels", "stageline.kernels", values=("compiled", "plain", "none"))
STEP_MODE = Label("mode", "stageline.graph.mode", values=("replayed", "eager"))
EAGER_REASON = Label("reason", "stageline.graph.eager.reason", values=("first", "no_size", "limit", "failed"))
GRAPH_STATE = Label("state", "stageline.graph.state", values=("recorded", "failed"))
LOAD_PHASE = Label("phase", "stageline.load.phase", values=("load", "warmup"))
ENDPOINT = Label(
    "endpoint",
    "stageline.gateway.endpoint",
    values=(
        "completions",
        "chat_completions",
        "messages",
        "count_tokens",
        "responses",
        "models",
        "tokenize",
        "detokenize",
        "tokenizer_info",
        "process",
        "unknown",
    ),
)
API_KEY = Label("key", "stageline.api_key.id", most=256)
TOKEN_KIND = Label("kind", "stageline.token.kind", values=("prompt", "completion"))
HTTP_STATUS = Label("status", "http.response.status_code", most=64, is_integer=True)
DESTINATION = Label("destination", "stageline.destination", values=("coordinator", "collector"))

_SHORT_S = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
_LAG_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
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


_COORDINATOR, _WORKER, _GATEWAY = (Process.COORDINATOR,), (Process.WORKER,), (Process.GATEWAY,)
_BOTH, _ALL = (Process.COORDINATOR, Process.WORKER), tuple(Process)
_COUNTER, _UP_DOWN, _GAUGE, _HISTOGRAM = Kind.COUNTER, Kind.UP_DOWN, Kind.GAUGE, Kind.HISTOGRAM

SERVING = _of(
    _COORDINATOR,
    "stageline.cluster.serving",
    _GAUGE,
    "1",
    "Whether new requests are served: 1 or 0.",
)
REQUESTS = _of(
    _COORDINATOR,
    "stageline.request.active",
    _UP_DOWN,
    "{request}",
    "Active requests, by state.",
    REQUEST_STATE,
)
REQUESTS_ENDED = _of(
    _COORDINATOR, "stageline.request.ended", _COUNTER, "{request}", "Ended requests, by outcome.", OUTCOME
)
REQUESTS_REFUSED = _of(
    _COORDINATOR,
    "stageline.request.refused",
    _COUNTER,
    "{request}",
    "Rejected requests, by reason.",
    REFUSAL,
)
ACCESS_REFUSED = _of(
    _COORDINATOR,
    "stageline.access.refused",
    _COUNTER,
    "{call}",
    "Calls, HTTP requests and streams of results with a wrong secret, by secret.",
    ACCESS,
)
QUEUE_TIME = _of(
    _COORDINATOR,
    "stageline.request.queue.duration",
    _HISTOGRAM,
    "s",
    "From accepting a request to sending its first step.",
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
    "From one token of a choice to the next, including preemptions and recoveries.",
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
    "Prompt tokens of started choices, including cached ones.",
)
CACHED_TOKENS = _of(
    _COORDINATOR,
    "stageline.prompt.cached_tokens",
    _COUNTER,
    "{token}",
    "Prompt tokens that were reused from the prefix cache.",
)
GENERATED_TOKENS = _of(_COORDINATOR, "stageline.generated.tokens", _COUNTER, "{token}", "Generated tokens.")
PREEMPTIONS = _of(
    _COORDINATOR,
    "stageline.preemptions",
    _COUNTER,
    "{preemption}",
    "Preempted choices: others needed their KV blocks.",
)
RECOVERIES = _of(
    _COORDINATOR,
    "stageline.recoveries",
    _COUNTER,
    "{recovery}",
    "Epochs that ended while serving, by reason.",
    REASON,
)
RECOVERY_TIME = _of(
    _COORDINATOR,
    "stageline.recovery.duration",
    _HISTOGRAM,
    "s",
    "From the end of an epoch until the next one accepts steps.",
    REASON,
    bounds=_RECOVERY_S,
)
STEPS_IN_FLIGHT = _of(_COORDINATOR, "stageline.steps.in_flight", _UP_DOWN, "{step}", "Steps in flight.")
STEP_TIME = _of(
    _COORDINATOR,
    "stageline.step.duration",
    _HISTOGRAM,
    "s",
    "From sending a step to its answer.",
    bounds=_STEP_S,
)
STEP_PART_TIME = _of(
    _COORDINATOR,
    "stageline.step.part.time",
    _COUNTER,
    "s",
    "Time of answered steps at each stage and on the hop to it.",
    STAGE,
    STEP_PART,
)
SCHEDULER_TIME = _of(
    _COORDINATOR,
    "stageline.scheduler.duration",
    _HISTOGRAM,
    "s",
    "Time to schedule a step.",
    bounds=_SHORT_S,
)
LOOP_LAG = _of(
    _COORDINATOR,
    "stageline.coordinator.loop.lag",
    _HISTOGRAM,
    "s",
    "How late the event loop runs a timer, measured 40 times per second.",
    bounds=_LAG_S,
)
ACTIVE_TIME = _of(
    _COORDINATOR,
    "stageline.pipeline.active.time",
    _COUNTER,
    "s",
    "Time with at least one step in flight.",
)
BUBBLE = _of(
    _COORDINATOR,
    "stageline.pipeline.bubble",
    _GAUGE,
    "1",
    "Share of the time with steps in flight in which a stage computed nothing, over 10 s; mean over stages.",
)
WORKERS = _of(_COORDINATOR, "stageline.workers", _UP_DOWN, "{worker}", "Workers, by state.", WORKER_STATE)
DROPPED_SPANS = _of(
    _ALL, "stageline.spans.dropped", _COUNTER, "{span}", "Spans that were recorded and dropped."
)
CERTIFICATE_LEFT = _of(
    _ALL,
    "stageline.certificate.time_left",
    _GAUGE,
    "s",
    "Time until the certificate of the process ends; absent in plain text.",
)
LOST_AUDIT_RECORDS = _of(
    _ALL, "stageline.audit.lost", _COUNTER, "{record}", "Records that the audit log could not hold."
)
BUSY_TIME = _of(_WORKER, "stageline.stage.busy.time", _COUNTER, "s", "Time spent computing steps.", STAGE)
WAIT_TIME = _of(
    _WORKER,
    "stageline.stage.wait.time",
    _COUNTER,
    "s",
    "Time of an epoch without a step to compute.",
    STAGE,
)
SEND_TIME = _of(
    _WORKER,
    "stageline.stage.send.time",
    _COUNTER,
    "s",
    "From an output being ready until the transport has taken it; overlaps the next step's computation.",
    STAGE,
)
SERVING_TIME = _of(
    _WORKER,
    "stageline.stage.serving.time",
    _COUNTER,
    "s",
    "Time of serving epochs: busy, waiting, and the handover between the two.",
    STAGE,
)
STAGE_STEP_TIME = _of(
    _WORKER,
    "stageline.stage.step.duration",
    _HISTOGRAM,
    "s",
    "Time to compute a step.",
    STAGE,
    bounds=_STEP_S,
)
FRAMES = _of(
    _WORKER,
    "stageline.stage.frames",
    _COUNTER,
    "{frame}",
    "Received frames that were computed; transmitted outputs.",
    STAGE,
    DIRECTION,
)
ACTIVATION_BYTES = _of(
    _WORKER,
    "stageline.stage.activation.io",
    _COUNTER,
    "By",
    "Bytes of hidden states.",
    STAGE,
    DIRECTION,
)
KV_BLOCKS = _of(
    _WORKER,
    "stageline.kv.blocks",
    _UP_DOWN,
    "{block}",
    "KV cache blocks: in use, kept for prefix hits, free.",
    STAGE,
    BLOCK_STATE,
)
KV_STATES = _of(
    _WORKER,
    "stageline.kv.states",
    _UP_DOWN,
    "{state}",
    "Recurrent states: of sequences, saved for prefix hits, free. None without recurrent layers.",
    STAGE,
    RECURRENT_STATE,
)
PREFIX_WANTED = _of(
    _WORKER,
    "stageline.kv.prefix.wanted",
    _COUNTER,
    "{block}",
    "Full prompt blocks that were looked up in the cache.",
    STAGE,
)
PREFIX_HITS = _of(
    _WORKER,
    "stageline.kv.prefix.hits",
    _COUNTER,
    "{block}",
    "Full prompt blocks that were found in the cache.",
    STAGE,
)
LOAD_TIME = _of(
    _WORKER,
    "stageline.stage.load.duration",
    _GAUGE,
    "s",
    "Time to load and to warm up the current stage.",
    STAGE,
    LOAD_PHASE,
)
STAGE_MEMORY = _of(
    _WORKER,
    "stageline.stage.memory",
    _UP_DOWN,
    "By",
    "Memory of the current stage's weights and KV pages.",
    STAGE,
    MEMORY_KIND,
)
DEVICE_MEMORY = _of(
    _WORKER,
    "stageline.device.memory",
    _GAUGE,
    "By",
    "Memory of the worker's GPU: in tensors, reserved for them, free for all processes, the most in tensors"
    " since the stage was loaded, and memory of the host for copies. None on a CPU.",
    DEVICE_MEMORY_KIND,
)
STAGE_COMPUTE = _of(
    _WORKER,
    "stageline.stage.compute",
    _GAUGE,
    "{stage}",
    "Device, dtype and kernels of the current stage; always 1.",
    DEVICE,
    DTYPE,
    KERNELS,
)
GRAPH_STEPS = _of(
    _WORKER,
    "stageline.stage.graph.steps",
    _GAUGE,
    "{step}",
    "Steps since the current stage was loaded that replayed a CUDA graph, or ran eagerly beside graphs.",
    STAGE,
    STEP_MODE,
)
GRAPH_EAGER_STEPS = _of(
    _WORKER,
    "stageline.stage.graph.eager.steps",
    _GAUGE,
    "{step}",
    "Steps since the current stage was loaded that ran eagerly beside graphs, by reason: the first of a size,"
    " which is recorded with it, a step that no size has room for, a size beyond the limits of graphs, one"
    " that could not be recorded.",
    STAGE,
    EAGER_REASON,
)
GRAPHS = _of(
    _WORKER,
    "stageline.stage.graphs",
    _GAUGE,
    "{graph}",
    "Sizes of steps of the current stage that are recorded as CUDA graphs, or could not be recorded.",
    STAGE,
    GRAPH_STATE,
)
GRAPH_MEMORY = _of(
    _WORKER,
    "stageline.stage.graph.memory",
    _GAUGE,
    "By",
    "Memory of the GPU that the current stage's CUDA graphs hold.",
    STAGE,
)
PAYLOAD_FALLBACK = _of(
    _WORKER,
    "stageline.stage.payload.fallback",
    _GAUGE,
    "1",
    "Whether large hidden states travel over gRPC because a payload connection did not work: 1 or 0.",
    STAGE,
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
    "Records of active requests that wait to be written.",
)
HTTP_REQUESTS = _of(
    _GATEWAY,
    "stageline.gateway.requests",
    _COUNTER,
    "{request}",
    "Ended HTTP requests, by endpoint and status.",
    ENDPOINT,
    HTTP_STATUS,
)
HTTP_ACTIVE = _of(_GATEWAY, "stageline.gateway.active", _UP_DOWN, "{request}", "HTTP requests in progress.")
IGNORED_FIELDS = _of(
    _GATEWAY,
    "stageline.gateway.ignored_fields",
    _COUNTER,
    "{field}",
    "Unknown fields of requests that were served without them.",
)
KEY_TOKENS = _of(
    _GATEWAY,
    "stageline.gateway.key_tokens",
    _COUNTER,
    "{token}",
    "Tokens of requests, by the id of their API key and whether they were prompt or completion.",
    API_KEY,
    TOKEN_KIND,
)
RESIDENT_MEMORY = _of(
    _ALL, "stageline.process.resident_memory", _UP_DOWN, "By", "Resident memory of the process."
)
FAILED_EXPORTS = _of(
    _BOTH,
    "stageline.metrics.exports.failed",
    _COUNTER,
    "{export}",
    "Failed exports of this process's metrics.",
    DESTINATION,
)
SERIES_OVERFLOWS = _of(
    _ALL,
    "stageline.metrics.overflows",
    _COUNTER,
    "{lookup}",
    "Lookups that fell back to the series `other` because of too many series.",
)

METRICS: tuple[Metric, ...] = tuple(value for value in vars().values() if isinstance(value, Metric))
"""In the order of docs/reference/metrics.md."""
