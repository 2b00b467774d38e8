"""All spans and their attributes in one table; docs/reference/spans.md is generated from it.

Times in attributes are in seconds. Names starting with `gen_ai.` follow OpenTelemetry's conventions for
generative AI, and older serving engines.
"""

from dataclasses import dataclass
from enum import StrEnum


class SpanName(StrEnum):
    """Names of spans; spans of HTTP requests follow OpenTelemetry's conventions."""

    HTTP_COMPLETIONS = "POST /v1/completions"
    HTTP_CHAT = "POST /v1/chat/completions"
    HTTP_RESPONSES = "POST /v1/responses"
    HTTP_MESSAGES = "POST /v1/messages"
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
    HTTP_METHOD = "http.request.method"
    HTTP_ROUTE = "http.route"
    HTTP_STATUS = "http.response.status_code"
    URL_PATH = "url.path"
    URL_SCHEME = "url.scheme"
    ERROR_TYPE = "error.type"
    STREAM = "stageline.request.stream"
    BODY_DURATION = "stageline.body.duration"
    PROMPT_DURATION = "stageline.prompt.duration"
    ACCEPT_DURATION = "stageline.accept.duration"
    TIME_TO_OUTPUT = "stageline.output.first"
    TEXT_WAIT_DURATION = "stageline.text.wait.duration"
    TEXT_DURATION = "stageline.text.duration"
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
    """A span: recording process, parent, possible attributes, meaning."""

    name: SpanName
    process: str
    parent: SpanName | None
    attributes: tuple[Attr, ...]
    meaning: str


GATEWAY = "stageline-gateway"
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

_HTTP = (
    Attr.HTTP_METHOD,
    Attr.HTTP_ROUTE,
    Attr.HTTP_STATUS,
    Attr.URL_PATH,
    Attr.URL_SCHEME,
    Attr.ERROR_TYPE,
    Attr.REQUEST_ID,
    Attr.REQUEST_MODEL,
    Attr.OUTCOME,
    Attr.STREAM,
    Attr.BODY_DURATION,
    Attr.PROMPT_DURATION,
    Attr.ACCEPT_DURATION,
    Attr.TIME_TO_OUTPUT,
    Attr.TEXT_WAIT_DURATION,
    Attr.TEXT_DURATION,
    Attr.CLOCK_OFFSET,
    Attr.CLOCK_UNCERTAINTY,
)
HTTP_SPANS = (
    SpanName.HTTP_COMPLETIONS,
    SpanName.HTTP_CHAT,
    SpanName.HTTP_RESPONSES,
    SpanName.HTTP_MESSAGES,
)
_HTTP_MEANING = (
    "An HTTP request, from its headers to the end of its response; of kind SERVER. Its parent is the "
    "client's span, if any; its children are the requests of its prompts."
)

SPANS = (
    *(SpanSpec(name, GATEWAY, None, _HTTP, _HTTP_MEANING) for name in HTTP_SPANS),
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
        "A request, from its call to its end; of kind SERVER. Its parent is the gateway's span, or "
        "the caller's, if any.",
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
        "From the queue to sending the first prompt chunk.",
    ),
    SpanSpec(
        SpanName.PREFILL_CHUNK,
        COORDINATOR,
        SpanName.GENERATE,
        (*_CHOICE, *_STEPS, Attr.CHUNK_START, Attr.BATCH_SIZE, *_OBSERVED),
        "A prompt chunk, from sending its step to the answer. The last answer has the first token.",
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
        "From giving up KV blocks to older requests until computing again.",
    ),
    SpanSpec(
        SpanName.RECOVERY,
        COORDINATOR,
        SpanName.GENERATE,
        (*_CHOICE, Attr.REASON),
        "From the end of an epoch until computing again in a later one.",
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
        "of the first step to the last output being ready. The stage computes other steps in between.",
    ),
    SpanSpec(
        SpanName.CLUSTER_RECOVERY,
        COORDINATOR,
        None,
        (Attr.REASON, Attr.EPOCH, Attr.NUM_REQUESTS),
        "From the end of an epoch until the next one serves; a separate trace.",
    ),
)
"""In the order of a request's path."""

MEANINGS = {
    Attr.REQUEST_ID: "request id",
    Attr.REQUEST_MODEL: "name of the served model",
    Attr.REQUEST_MAX_TOKENS: "maximum tokens to generate per choice",
    Attr.REQUEST_TEMPERATURE: "sampling temperature; 0: the most likely token",
    Attr.REQUEST_TOP_P: "sampling top-p; 1: no filter",
    Attr.PROMPT_TOKENS: "prompt tokens, including cached ones",
    Attr.COMPLETION_TOKENS: "generated tokens of all choices",
    Attr.TIME_IN_QUEUE: "s, from the call to sending the first chunk",
    Attr.TIME_TO_FIRST_TOKEN: "s, from the call to the first token at the coordinator",
    Attr.TIME_IN_PREFILL: "s, from sending the first chunk to the first token",
    Attr.TIME_IN_DECODE: "s, from the first token to the end",
    Attr.E2E: "s, from the call to the end",
    Attr.HTTP_METHOD: "HTTP method",
    Attr.HTTP_ROUTE: "path as in `/openapi.json`",
    Attr.HTTP_STATUS: "status of the response; 499 if the client left before it",
    Attr.URL_PATH: "path of the request",
    Attr.URL_SCHEME: "`http`",
    Attr.ERROR_TYPE: "for a failure, also one within a stream: `code` of the error, else its status",
    Attr.STREAM: "whether the response is a stream",
    Attr.BODY_DURATION: "s, from the headers to the body being read and checked",
    Attr.PROMPT_DURATION: "s, from the body to the submission: chat template, tokenizer, grammar",
    Attr.ACCEPT_DURATION: "s, from the submission until the coordinator has accepted every prompt",
    Attr.TIME_TO_OUTPUT: "s, from the headers to the first byte of output",
    Attr.TEXT_WAIT_DURATION: "s, in which output waited for the thread that renders text; sum",
    Attr.TEXT_DURATION: "s, in which output was rendered: text, stop strings, tool calls, JSON; sum",
    Attr.CHOICES: "number of choices",
    Attr.OUTCOME: "`finished`, `cancelled` or `failed`",
    Attr.CACHED_TOKENS: "cached prompt tokens of the first choice",
    Attr.NUM_PREEMPTIONS: "number of preemptions of all choices",
    Attr.NUM_RECOVERIES: "number of recoveries during the request",
    Attr.CHOICE: "index of the choice, from 0",
    Attr.RESTART_COUNT: "restarts of the choice: one per interruption",
    Attr.EPOCH: "epoch; for a recovery, the epoch that serves after it",
    Attr.STEP_ID: "id of the first step",
    Attr.LAST_STEP_ID: "id of the last step",
    Attr.NUM_STEPS: "number of steps; durations are sums over them",
    Attr.TOKENS: "computed tokens of the choice; for decode equal to the generated ones",
    Attr.CHUNK_START: "position of the chunk's first token",
    Attr.BATCH_SIZE: "sequences per step, mean over the steps",
    Attr.STEP_DURATION: "s, from sending a step to its answer, on the coordinator; sum over the steps",
    Attr.RESULT_DURATION: "s, from the answer being ready on LAST to its arrival; sum over the steps",
    Attr.REASON: "reason as a sentence",
    Attr.STAGE_INDEX: "index of the stage; 0 is FIRST",
    Attr.STAGE_ROLE: "`FIRST`, `MIDDLE`, `LAST` or `ONLY`",
    Attr.LAYER_BEGIN: "first layer of the stage",
    Attr.LAYER_END: "one past the last layer of the stage",
    Attr.WORKER: "name of the worker",
    Attr.DEVICE: "device, such as `cpu` or `cuda:0`; `mock` for a mock stage",
    Attr.DTYPE: "compute dtype: `bf16`, `f16` or `f32`",
    Attr.KERNELS: "`compiled` or `plain` (torch's operators); absent for a mock stage",
    Attr.HOP_DURATION: "s, from the frame being ready at the sender to its first byte; sum",
    Attr.RECEIVE_DURATION: "s, from the first byte to the frame being complete and checked; sum",
    Attr.WAIT_DURATION: "s, from the complete frame to the start of the computation; sum",
    Attr.COMPUTE_DURATION: "s, from the start of the computation to the output being ready; sum",
    Attr.SEND_DURATION: "s, from the output being ready until the transport has taken it; sum",
    Attr.CLOCK_OFFSET: "s, offset that was added to the clock of the worker or gateway",
    Attr.CLOCK_UNCERTAINTY: "s, uncertainty of the clock offset",
    Attr.NUM_REQUESTS: "live requests that waited for the recovery",
}
"""Meaning of every attribute, with its unit."""
