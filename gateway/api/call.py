"""What requests share: the gateway's parts, identity and headers of a request, and its submission."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.access.visitors import ANYONE, Doorkeeper, Visitor
from gateway.api.body import INLINE_BYTES, MAX_VALUES, RequestBody, check_size, parse_body, read_body
from gateway.api.body_budget import BodyBudget
from gateway.api.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, invalid, unavailable, unknown_model
from gateway.api.fields import check_fields, check_parts, header_name, short_name
from gateway.api.logprobs import LogprobWriter
from gateway.api.sampling import GenerationFields
from gateway.config import GatewayConfig
from gateway.generation import Generation, GenerationSpec
from gateway.metrics import GatewayMetrics
from gateway.output import OutputRules
from gateway.parsers.families import AUTO, ParserChoice, choose_parsers
from gateway.spans import GatewaySpans, OutputTimes, RequestSpan, span_of
from gateway.text_thread import TenantText, TextThread
from gateway.upstream.contract import TokenStream, Upstream, UpstreamFailure
from stageline_rpc.v1 import inference_pb2
from text.tokenizer import TextCodec
from wire.audit import NO_AUDIT, AuditLog
from wire.errors import AttachSecretMismatch, RequestExists, reason_of
from wire.ids import RequestId, id_text, new_request_id, parse_request_id
from wire.tenant_threads import TenantThreads
from wire.trace_context import parse_traceparent

TEXT_SLACK = 4
"""Characters that a tokenizer may fold, such as white space."""
MAX_LABEL_CHARACTERS = 256
_ID_IN_USE = reason_of(AttachSecretMismatch(""))
"""The answer to a submission where a request of this id has the secret of another one."""
_PRIORITIES = {
    "low": inference_pb2.PRIORITY_LOW,
    "normal": inference_pb2.PRIORITY_NORMAL,
    "high": inference_pb2.PRIORITY_HIGH,
}
_Body = TypeVar("_Body", bound=RequestBody)
_Result = TypeVar("_Result")


@dataclass(slots=True, kw_only=True)
class Gateway:
    """The parts that serve requests. `template` is the text of --chat-template.

    While it `is_waiting` for its coordinator, only paths of the process are served. Without `spans`, the
    headers of clients' traces are passed on.
    """

    config: GatewayConfig
    upstream: Upstream
    codec: TextCodec | None
    metrics: GatewayMetrics
    template: str | None = None
    spans: GatewaySpans | None = None
    doorkeeper: Doorkeeper | None = None
    """Admits visitors, where keys are required."""
    audit: AuditLog = NO_AUDIT
    logprobs: LogprobWriter = field(init=False)
    parsers: ParserChoice = field(init=False)
    bodies: BodyBudget = field(init=False)
    text: TextThread = field(default_factory=TextThread)
    prompts: TenantThreads = field(default_factory=lambda: TenantThreads(4, per_tenant=2, name="prompts"))
    """For tokenizing, which releases the interpreter's lock."""
    parsing: TenantThreads = field(default_factory=lambda: TenantThreads(4, per_tenant=1, name="parsing"))
    """For large bodies: parsing one of 16 MB holds the interpreter's lock for up to 0.1 s."""
    started: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False
    is_waiting: bool = False
    visitor: Visitor = ANYONE
    """Who makes the request, in the gateway that `visited_by` returns."""

    def __post_init__(self) -> None:
        """Raises ValueError for a parser that the model's tokenizer cannot serve."""
        self.logprobs = LogprobWriter(self.codec)
        self.bodies = BodyBudget(self.config.max_body_bytes)
        codec = self.codec
        names = (self.config.tool_parser, self.config.reasoning_parser)
        self.parsers = choose_parsers(
            *((AUTO, AUTO) if self.is_waiting else names),
            chat_template=self.template or (None if codec is None else codec.chat_template),
            response_template=None if codec is None else codec.response_template,
        )

    def visited_by(self, visitor: Visitor) -> "Gateway":
        """The gateway as one visitor's request sees it."""
        if visitor is self.visitor:
            return self
        visited = copy(self)
        visited.visitor = visitor
        return visited

    @property
    def waiting_problem(self) -> str:
        """Why requests are refused while it `is_waiting`."""
        return f"the gateway is waiting for the coordinator {self.config.coordinator}"

    @property
    def max_sequence_tokens(self) -> int:
        """Raises ApiError before the coordinator has planned its stages, which sets the limit."""
        if not (limit := self.upstream.model.max_sequence_tokens):
            raise unavailable("the coordinator has no workers yet")
        return limit

    @property
    def max_model_len(self) -> int | None:
        """The same limit for clients; None before it is known."""
        return self.upstream.model.max_sequence_tokens or None

    @property
    def system_fingerprint(self) -> str:
        """Identity of the model's weights."""
        return f"fp_{self.upstream.model.fingerprint[:16]}"

    @property
    def names(self) -> tuple[str, ...]:
        """Names under which the model is served; the first is in responses."""
        return self.config.served_model_names or (self.upstream.model.name,)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be served, with the model's template or --chat-template."""
        return self.codec is not None and (self.template is not None or self.codec.has_chat_template)

    def close(self) -> None:
        """End the threads."""
        self.text.close()
        self.prompts.close()
        self.parsing.close()

    @property
    def visitor_text(self) -> TenantText:
        """The text thread, with the turns of the visitor."""
        return self.text.of(self.visitor.share)

    async def beside_loop(self, work: Callable[[], _Result]) -> _Result:
        """Run slow work of a request, such as tokenizing, on a thread, when it is the visitor's turn."""
        return await self.prompts.run(self.visitor.share, work)

    def require_codec(self, param: str, instead: str) -> TextCodec:
        """Raises ApiError for a model without a tokenizer."""
        if self.codec is None:
            raise invalid(f"{param} needs a tokenizer, which this model lacks: {instead}", param=param)
        return self.codec

    def check_text_size(self, texts: Iterable[str], *, param: str) -> None:
        """Reject a text that can never fit before tokenizing it, which takes seconds per megabyte."""
        if self.codec is None:
            return
        limit = self.max_sequence_tokens
        size_bytes = sum(len(text.encode()) for text in texts)
        if size_bytes > TEXT_SLACK * limit * self.codec.longest_token_bytes:
            raise invalid(
                f"this model's maximum context length is {limit} tokens, of at most "
                f"{self.codec.longest_token_bytes} bytes each: {param} has {size_bytes} bytes",
                param=param,
                code=CONTEXT_LENGTH_EXCEEDED,
            )

    def fit(
        self,
        prompt: Sequence[int],
        fields: GenerationFields,
        *,
        param: str,
        max_tokens: int | None,
        default: int | None = None,
    ) -> tuple[Sequence[int], int]:
        """Return the prompt, truncated if asked, and the number of tokens to generate.

        Without `max_tokens` it is `default`, or what the context has room for. Raises ApiError.
        """
        vocab_size, limit = self.upstream.model.vocab_size, self.max_sequence_tokens
        max_name = fields.name_of("max_tokens")
        if (keep := fields.truncate_prompt_tokens) is not None:
            reserved = max_tokens or default or 1
            keep = max(1, limit - reserved) if keep == -1 else keep
            prompt = prompt[-keep:] if keep else []
        if not prompt:
            raise invalid(f"{param} has no tokens, at least 1 is needed", param=param)
        for wrong in (min(prompt), max(prompt)):
            if not 0 <= wrong < vocab_size:
                raise invalid(f"{param} has token id {wrong}, must be in [0, {vocab_size - 1}]", param=param)
        room = limit - len(prompt)
        wanted = max(1, min(default or room, room)) if max_tokens is None else max_tokens
        if wanted > room:
            more = "" if max_tokens is None else f" and {max_name} is {wanted}, {len(prompt) + wanted} in all"
            raise invalid(
                f"this model's maximum context length is {limit} tokens: the prompt has {len(prompt)}{more}",
                param=max_name if len(prompt) < limit else param,
                code=CONTEXT_LENGTH_EXCEEDED,
            )
        return prompt, wanted


@dataclass(slots=True, kw_only=True)
class Call:
    """Identity of one HTTP request. `label` is what the client calls it.

    `traceparent` is its span, or the client's if it has none.
    """

    request_id: RequestId
    label: str
    traceparent: str
    model: str
    span: RequestSpan | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    started_s: float = field(default_factory=time.monotonic)

    @property
    def output_times(self) -> OutputTimes | None:
        """Takes the times of the output, if they are recorded."""
        return None if self.span is None else self.span.output

    def timed(self, work: Callable[[], _Result]) -> Callable[[], _Result]:
        """Return work of the text thread that counts in the times of the output."""
        times = self.output_times
        return work if times is None else times.timed(work)

    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        return {
            "x-request-id": self.label,
            "openai-processing-ms": str(round((time.monotonic() - self.started_s) * 1000)),
        }


def json_response(body: Mapping[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


async def read_fields(gateway: Gateway, request: Request, kind: type[_Body]) -> _Body:
    """Read the body; return its fields. The response will name those without effect. Raises ApiError."""
    fields = await _read_fields(gateway, request, kind)
    if fields.model and fields.model not in gateway.names:
        raise unknown_model(short_name(fields.model), gateway.names[0])
    gateway.visitor.check_model(fields.model or gateway.names[0])
    is_strict = gateway.config.strict_fields
    unknown = check_fields(fields.model_extra, is_strict=is_strict, known=kind.known_extra)
    ignored = [*unknown, *check_parts(fields.without_effect(), is_strict=is_strict)]
    note_ignored(request, ignored)
    gateway.metrics.count_ignored(len(ignored))
    return fields


def note_ignored(request: Request, names: Iterable[str]) -> None:
    """Remember what of a request has no effect."""
    request.state.ignored = [*ignored_by(request), *map(header_name, names)]


def ignored_by(request: Request) -> Sequence[str]:
    """Return what the response names as ignored."""
    names: Sequence[str] = getattr(request.state, "ignored", ())
    return names


async def _read_fields(gateway: Gateway, request: Request, kind: type[_Body]) -> _Body:
    share = gateway.visitor.share
    with gateway.bodies.body_of(share) as held:
        body = await read_body(request, max_bytes=gateway.config.max_body_bytes, held=held)
        if len(body) <= INLINE_BYTES:
            return parse_body(kind, body)
        return await gateway.parsing.run(share, _parse_large, gateway, kind, body)


def _parse_large(gateway: Gateway, kind: type[_Body], body: bytes) -> _Body:
    check_size(body, max_values=MAX_VALUES + gateway.upstream.model.max_sequence_tokens)
    return parse_body(kind, body)


def label_of(request: Request) -> str:
    """What the client calls the request, else a new id; the same whenever it is asked for."""
    label: str = getattr(request.state, "label", "") or _printable(request.headers.get("x-request-id", ""))
    request.state.label = label or id_text(new_request_id())
    return request.state.label  # type: ignore[no-any-return]


def _printable(label: str) -> str:
    """What can be sent back in a header."""
    label = label[:MAX_LABEL_CHARACTERS].strip()
    return label if label.isascii() and label.isprintable() else ""


def open_call(gateway: Gateway, request: Request, fields: GenerationFields) -> Call:
    """A UUIDv7 of the client is the request's id; any other text is a label beside a new id."""
    if fields.request_id:
        request.state.label = _printable(fields.request_id)
    label = label_of(request)
    try:
        request_id = parse_request_id(label)
    except ValueError:
        request_id = new_request_id()
    model = fields.model or gateway.names[0]
    if (span := span_of(request.scope)) is not None:
        span.opened(request_id, model, is_stream=bool(fields.stream))
    return Call(
        request_id=request_id,
        label=label,
        traceparent=_client_span(request) if span is None else span.traceparent,
        model=model,
        span=span,
    )


def _client_span(request: Request) -> str:
    """W3C header of the client's span; empty without a valid one."""
    traceparent = request.headers.get("traceparent", "")
    return traceparent if traceparent and parse_traceparent(traceparent) is not None else ""


def output_rules(
    gateway: Gateway, fields: GenerationFields, *, kept_special_ids: frozenset[int] | None = frozenset()
) -> OutputRules:
    """Return how tokens become text. `kept_special_ids` are text always; None for all special tokens.

    Raises ApiError for stop strings that cannot be matched.
    """
    stops = fields.stops
    if stops:
        gateway.require_codec(fields.name_of("stop"), "use stop_token_ids")
    return OutputRules(
        gateway.codec,
        stops=stops,
        stop_token_ids=frozenset(fields.stop_token_ids or ()),
        min_tokens=fields.min_tokens or 0,
        includes_stop=bool(fields.include_stop_str_in_output),
        skips_special_tokens=fields.skip_special_tokens is not False and kept_special_ids is not None,
        kept_special_ids=kept_special_ids or frozenset(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request for the coordinator: prompts with their maximum number of new tokens.

    `own_names` are the client's names for the coordinator's fields, where they differ. With `keep_s` its
    output is kept for others, together with `client_state`.
    """

    spec: GenerationSpec
    prompts: Sequence[tuple[Sequence[int], int]]
    sampling: inference_pb2.SamplingParameters
    fields: GenerationFields
    own_names: Mapping[str, str]
    client_state: bytes = b""
    keep_s: float | None = None


async def submit(gateway: Gateway, call: Call, submission: Submission) -> Generation:
    """Submit all prompts; return when all are accepted. Raises ApiError and UpstreamFailure."""
    if gateway.is_draining:
        raise unavailable("the gateway is draining")
    gateway.visitor.check_priority(_priority_name(submission.fields.priority or 0))
    gateway.visitor.spend("prompt", sum(len(prompt) for prompt, _ in submission.prompts))
    if call.span is not None:
        call.span.submitting()
    tasks = [
        asyncio.create_task(_submit_one(gateway, call, message)) for message in _messages(call, submission)
    ]
    try:
        streams = await asyncio.gather(*tasks)
    except BaseException as error:
        await _cancel_all(tasks)
        tasks.clear()  # they hold the error, and its frames would hold them
        if isinstance(error, UpstreamFailure) and error.field:
            raise _about_field(error, submission) from None
        raise
    if call.span is not None:
        call.span.accepted()
    prompts = [prompt for prompt, _ in submission.prompts]
    return Generation(submission.spec, prompts, streams, gateway.visitor_text, call.output_times)


async def _submit_one(gateway: Gateway, call: Call, message: inference_pb2.GenerateRequest) -> TokenStream:
    try:
        return await gateway.upstream.submit(
            message, deadline_s=None, traceparent=call.traceparent, owner=gateway.visitor.owner
        )
    except UpstreamFailure as error:
        if error.reason != _ID_IN_USE:
            raise
        raise UpstreamFailure(
            f"request id {message.request_id} is in use: its request is live, or its output is kept",
            status=grpc.StatusCode.ALREADY_EXISTS,
            reason=reason_of(RequestExists("")),
        ) from None


def _about_field(failure: UpstreamFailure, submission: Submission) -> ApiError:
    """The error of a field that the coordinator refused, under the client's name for it."""
    field = failure.field
    own = submission.own_names.get(field) or submission.fields.name_of(field)
    problem = failure.message.removeprefix(f"{field}: ")
    return invalid(failure.message if problem == failure.message else f"{own}: {problem}", param=own)


async def _cancel_all(tasks: Sequence[asyncio.Task[TokenStream]]) -> None:
    """Cancel the prompts of a request of which one was refused."""
    for task in tasks:
        task.cancel()
    for found in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(found, BaseException):
            await found.cancel()


def _messages(call: Call, submission: Submission) -> Iterable[inference_pb2.GenerateRequest]:
    fields = submission.fields
    for index, (prompt, max_tokens) in enumerate(submission.prompts):
        message = inference_pb2.GenerateRequest(
            request_id=id_text(call.request_id if index == 0 else new_request_id()),
            token_ids=inference_pb2.TokenIds(ids=prompt),
            max_tokens=max_tokens,
            sampling=submission.sampling,
            cache_salt=fields.cache_salt or "",
            priority=_PRIORITIES[_priority_name(fields.priority or 0)],
            client_state=submission.client_state,
        )
        if submission.keep_s is not None:
            message.on_disconnect.action = inference_pb2.OnDisconnect.ACTION_DETACH
            message.on_disconnect.keep_for.FromMilliseconds(round(submission.keep_s * 1000))
        yield message


def _priority_name(number: int) -> str:
    """vLLM serves lower numbers first; here there are three classes."""
    if number == 0:
        return "normal"
    return "high" if number < 0 else "low"
