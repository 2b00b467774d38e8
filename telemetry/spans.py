"""All spans and their attributes in one table; docs/reference/spans.md is generated from it.

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
    RESTART_COUNT = "stageline.restart_count"
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
    DEVICE = "stageline.device"
    DTYPE = "stageline.dtype"
    KERNELS = "stageline.kernels"
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
    """A span: the process that records it, its parent here, attributes that it may have, what it covers."""

    name: SpanName
    process: str
    parent: SpanName | None
    attributes: tuple[Attr, ...]
    meaning: str


COORDINATOR = "stageline-coordinator"
WORKER = "stageline-worker"

_STEPS = (Attr.EPOCH, Attr.STEP_ID, Attr.LAST_STEP_ID, Attr.NUM_STEPS, Attr.TOKENS)
_CHOICE = (Attr.CHOICE, Attr.RESTART_COUNT)
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
    Attr.DEVICE,
    Attr.DTYPE,
    Attr.KERNELS,
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
        "A request, from its call to its end; of kind SERVER. Its parent is the caller's span, if any.",
    ),
    SpanSpec(
        SpanName.INTAKE,
        COORDINATOR,
        SpanName.GENERATE,
        (),
        "From the call to the queue: checks, tokenizer, grammar, and waiting for a pipeline.",
    ),
    SpanSpec(
        SpanName.QUEUE,
        COORDINATOR,
        SpanName.GENERATE,
        _CHOICE,
        "From the queue to handing out the first prompt chunk.",
    ),
    SpanSpec(
        SpanName.PREFILL_CHUNK,
        COORDINATOR,
        SpanName.GENERATE,
        (*_CHOICE, *_STEPS, Attr.CHUNK_START, Attr.BATCH_SIZE, *_OBSERVED),
        "A prompt chunk, from handing out its step to the answer. The last one brings the first token.",
    ),
    SpanSpec(
        SpanName.DECODE,
        COORDINATOR,
        SpanName.GENERATE,
        (*_CHOICE, *_STEPS, *_OBSERVED),
        "From the token of the last chunk to the end of the choice, or to its interruption.",
    ),
    SpanSpec(
        SpanName.PREEMPTION,
        COORDINATOR,
        SpanName.GENERATE,
        (*_CHOICE, Attr.REASON),
        "From giving up its blocks to older requests to computing again.",
    ),
    SpanSpec(
        SpanName.RECOVERY,
        COORDINATOR,
        SpanName.GENERATE,
        (*_CHOICE, Attr.REASON),
        "From the end of an epoch to computing again in a later one.",
    ),
    SpanSpec(
        SpanName.STAGE_PREFILL,
        WORKER,
        SpanName.PREFILL_CHUNK,
        (*_STAGE, Attr.CHUNK_START),
        "The chunk on one stage: from the first byte of its frame to the output being ready.",
    ),
    SpanSpec(
        SpanName.STAGE_DECODE,
        WORKER,
        SpanName.DECODE,
        _STAGE,
        "Decode steps on one stage, the first 16, the next 32, 64, ..., at most 4,096: from the first byte "
        "of the first one to the last output being ready. In between the stage computes other steps, too.",
    ),
    SpanSpec(
        SpanName.CLUSTER_RECOVERY,
        COORDINATOR,
        None,
        (Attr.REASON, Attr.EPOCH, Attr.NUM_REQUESTS),
        "From the end of an epoch to the next one that serves; a trace of its own.",
    ),
)
"""In the order in which a request meets them."""

MEANINGS = {
    Attr.REQUEST_ID: "the request id, as `stageline status` and the client know it",
    Attr.REQUEST_MODEL: "what the served model is called",
    Attr.REQUEST_MAX_TOKENS: "tokens to generate at most, for each choice",
    Attr.REQUEST_TEMPERATURE: "0: the most likely token",
    Attr.REQUEST_TOP_P: "1: no filter",
    Attr.PROMPT_TOKENS: "tokens of the prompt, cached ones too",
    Attr.COMPLETION_TOKENS: "tokens generated, of all choices",
    Attr.TIME_IN_QUEUE: "s, from the call to handing out the first chunk",
    Attr.TIME_TO_FIRST_TOKEN: "s, from the call to the first token on the coordinator",
    Attr.TIME_IN_PREFILL: "s, from handing out the first chunk to the first token",
    Attr.TIME_IN_DECODE: "s, from the first token to the end",
    Attr.E2E: "s, from the call to the end",
    Attr.CHOICES: "sequences that the request generates",
    Attr.OUTCOME: "`finished`, `cancelled` or `failed`",
    Attr.CACHED_TOKENS: "prompt tokens of the first choice that the cache had",
    Attr.NUM_PREEMPTIONS: "how often a choice gave up its blocks",
    Attr.NUM_RECOVERIES: "how often an epoch ended under it",
    Attr.CHOICE: "which choice, from 0",
    Attr.RESTART_COUNT: "counts the starts of a choice: one more after each interruption",
    Attr.EPOCH: "the epoch; of a recovery, the one that serves after it",
    Attr.STEP_ID: "the (first) step",
    Attr.LAST_STEP_ID: "the last step",
    Attr.NUM_STEPS: "how many steps the durations are sums over",
    Attr.TOKENS: "tokens of the choice that were computed; of decode work also what came of it",
    Attr.CHUNK_START: "position of the chunk's first token",
    Attr.BATCH_SIZE: "sequences in the step; the mean over the steps",
    Attr.STEP_DURATION: "s, from handing out the step to its answer here; the sum over the steps",
    Attr.RESULT_DURATION: "s, from LAST having the answer ready to the coordinator having it; the sum",
    Attr.REASON: "why, in a sentence",
    Attr.STAGE_INDEX: "0 is FIRST",
    Attr.STAGE_ROLE: "`FIRST`, `MIDDLE`, `LAST` or `ONLY`",
    Attr.LAYER_BEGIN: "first layer of the stage",
    Attr.LAYER_END: "one past its last layer",
    Attr.WORKER: "name of the worker",
    Attr.DEVICE: "what it computes on, such as `cpu` or `cuda:0`; `mock` for a mock stage",
    Attr.DTYPE: "what it computes in: `bf16`, `f16` or `f32`",
    Attr.KERNELS: "`compiled` or `plain` (torch's operators); absent for a mock stage",
    Attr.HOP_DURATION: "s, from the sender having the frame ready to its first byte here; the sum",
    Attr.RECEIVE_DURATION: "s, from there to the frame being whole and checked; the sum",
    Attr.WAIT_DURATION: "s, from there to the start of its computation, behind other steps; the sum",
    Attr.COMPUTE_DURATION: "s, from there to the output being ready; the sum",
    Attr.SEND_DURATION: "s, from there to the transport having taken it, during the next hop; the sum",
    Attr.CLOCK_OFFSET: "s, what was added to the worker's clock to have the coordinator's",
    Attr.CLOCK_UNCERTAINTY: "s, by how much that may be off",
    Attr.NUM_REQUESTS: "live requests that waited for the recovery",
}
"""Of every attribute, with its unit."""
