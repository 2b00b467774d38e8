"""Every span and every attribute that Stageline records, in one table; docs/telemetry.md says what they mean.

Times in attributes are in seconds. Names starting with `gen_ai.` are those of OpenTelemetry's conventions for
generative AI, and of the serving engines that came before them.
"""

from dataclasses import dataclass
from enum import StrEnum


class SpanName(StrEnum):
    """Names of spans."""

    GENERATE = "stageline.generate"
    INTAKE = "stageline.intake"
    QUEUE = "stageline.queue"
    PREFILL_CHUNK = "stageline.prefill_chunk"
    DECODE = "stageline.decode"
    PREEMPTION = "stageline.preemption"
    RECOVERY = "stageline.recovery"
    STAGE_PREFILL = "stageline.stage.prefill"
    STAGE_DECODE = "stageline.stage.decode"
    CLUSTER_RECOVERY = "stageline.cluster.recovery"


class Attr(StrEnum):
    """Keys of attributes."""

    REQUEST_ID = "gen_ai.request.id"
    REQUEST_MODEL = "gen_ai.request.model"
    REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
    REQUEST_TEMPERATURE = "gen_ai.request.temperature"
    REQUEST_TOP_P = "gen_ai.request.top_p"
    PROMPT_TOKENS = "gen_ai.usage.prompt_tokens"
    COMPLETION_TOKENS = "gen_ai.usage.completion_tokens"
    TIME_IN_QUEUE = "gen_ai.latency.time_in_queue"
    TIME_TO_FIRST_TOKEN = "gen_ai.latency.time_to_first_token"
    TIME_IN_PREFILL = "gen_ai.latency.time_in_model_prefill"
    TIME_IN_DECODE = "gen_ai.latency.time_in_model_decode"
    E2E = "gen_ai.latency.e2e"
    CHOICES = "stageline.request.choices"
    OUTCOME = "stageline.request.outcome"
    CACHED_TOKENS = "stageline.request.cached_tokens"
    NUM_PREEMPTIONS = "stageline.request.preemptions"
    NUM_RECOVERIES = "stageline.request.recoveries"
    CHOICE = "stageline.choice"
    GENERATION = "stageline.generation"
    EPOCH = "stageline.epoch"
    STEP_ID = "stageline.step.id"
    LAST_STEP_ID = "stageline.step.last_id"
    NUM_STEPS = "stageline.steps"
    TOKENS = "stageline.tokens"
    CHUNK_START = "stageline.chunk.start"
    BATCH_SIZE = "stageline.batch.size"
    STEP_DURATION = "stageline.step.duration"
    RESULT_DURATION = "stageline.result.duration"
    REASON = "stageline.reason"
    STAGE_INDEX = "stageline.stage.index"
    STAGE_ROLE = "stageline.stage.role"
    LAYER_BEGIN = "stageline.layer.begin"
    LAYER_END = "stageline.layer.end"
    WORKER = "stageline.worker.name"
    HOP_DURATION = "stageline.hop.duration"
    RECEIVE_DURATION = "stageline.receive.duration"
    WAIT_DURATION = "stageline.wait.duration"
    COMPUTE_DURATION = "stageline.compute.duration"
    SEND_DURATION = "stageline.send.duration"
    CLOCK_OFFSET = "stageline.clock.offset"
    CLOCK_UNCERTAINTY = "stageline.clock.uncertainty"
    NUM_REQUESTS = "stageline.requests"


@dataclass(frozen=True, slots=True)
class SpanSpec:
    """A span, the process that records it, and the attributes that it may have."""

    name: SpanName
    process: str
    parent: SpanName | None
    attributes: tuple[Attr, ...]


COORDINATOR = "stageline-coordinator"
WORKER = "stageline-worker"

_STEPS = (Attr.EPOCH, Attr.STEP_ID, Attr.LAST_STEP_ID, Attr.NUM_STEPS, Attr.TOKENS)
_CHOICE = (Attr.CHOICE, Attr.GENERATION)
_OBSERVED = (Attr.STEP_DURATION, Attr.RESULT_DURATION)
_STAGE = (
    *_CHOICE,
    *_STEPS,
    Attr.BATCH_SIZE,
    Attr.STAGE_INDEX,
    Attr.STAGE_ROLE,
    Attr.LAYER_BEGIN,
    Attr.LAYER_END,
    Attr.WORKER,
    Attr.HOP_DURATION,
    Attr.RECEIVE_DURATION,
    Attr.WAIT_DURATION,
    Attr.COMPUTE_DURATION,
    Attr.SEND_DURATION,
    Attr.CLOCK_OFFSET,
    Attr.CLOCK_UNCERTAINTY,
)

SPANS = (
    SpanSpec(
        SpanName.GENERATE,
        COORDINATOR,
        None,
        (
            Attr.REQUEST_ID,
            Attr.REQUEST_MODEL,
            Attr.REQUEST_MAX_TOKENS,
            Attr.REQUEST_TEMPERATURE,
            Attr.REQUEST_TOP_P,
            Attr.PROMPT_TOKENS,
            Attr.COMPLETION_TOKENS,
            Attr.TIME_IN_QUEUE,
            Attr.TIME_TO_FIRST_TOKEN,
            Attr.TIME_IN_PREFILL,
            Attr.TIME_IN_DECODE,
            Attr.E2E,
            Attr.CHOICES,
            Attr.OUTCOME,
            Attr.CACHED_TOKENS,
            Attr.NUM_PREEMPTIONS,
            Attr.NUM_RECOVERIES,
        ),
    ),
    SpanSpec(SpanName.INTAKE, COORDINATOR, SpanName.GENERATE, ()),
    SpanSpec(SpanName.QUEUE, COORDINATOR, SpanName.GENERATE, _CHOICE),
    SpanSpec(
        SpanName.PREFILL_CHUNK,
        COORDINATOR,
        SpanName.GENERATE,
        (*_CHOICE, *_STEPS, Attr.CHUNK_START, Attr.BATCH_SIZE, *_OBSERVED),
    ),
    SpanSpec(SpanName.DECODE, COORDINATOR, SpanName.GENERATE, (*_CHOICE, *_STEPS, *_OBSERVED)),
    SpanSpec(SpanName.PREEMPTION, COORDINATOR, SpanName.GENERATE, (*_CHOICE, Attr.REASON)),
    SpanSpec(SpanName.RECOVERY, COORDINATOR, SpanName.GENERATE, (*_CHOICE, Attr.REASON)),
    SpanSpec(SpanName.STAGE_PREFILL, WORKER, SpanName.PREFILL_CHUNK, (*_STAGE, Attr.CHUNK_START)),
    SpanSpec(SpanName.STAGE_DECODE, WORKER, SpanName.DECODE, _STAGE),
    SpanSpec(SpanName.CLUSTER_RECOVERY, COORDINATOR, None, (Attr.REASON, Attr.EPOCH, Attr.NUM_REQUESTS)),
)
"""In the order in which a request meets them."""
