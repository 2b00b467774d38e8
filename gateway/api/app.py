"""The HTTP application: routes, errors and the OpenAPI schema."""

import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.access.visitors import NotAdmitted
from gateway.api import page, process
from gateway.api.access import MODELS_PATH, RequireKey, as_api_error, visitor_of
from gateway.api.body import RequestBody
from gateway.api.call import Gateway, ignored_by, label_of, note_ignored
from gateway.api.chat import ChatRequest, chat_completions
from gateway.api.completions import CompletionRequest, completions
from gateway.api.errors import ApiError, api_error, error_response, http_error, unavailable
from gateway.api.fields import check_fields
from gateway.api.messages.endpoints import count_message_tokens, create_message, message_error
from gateway.api.messages.fields import MessageRequest, PromptFields
from gateway.api.responses.endpoints import (
    cancel_response,
    count_input_tokens,
    create_response,
    delete_response,
    list_input_items,
    retrieve_response,
)
from gateway.api.responses.fields import ResponseRequest
from gateway.api.responses.stored import is_response_id
from gateway.api.sse import ClientGone, note_departure, note_failure
from gateway.api.tokenize import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize,
    tokenize,
    tokenizer_info,
)
from gateway.metrics import GatewayMetrics
from gateway.spans import span_of
from telemetry.spans import SpanName
from wire.audit import Action, AuditLog, AuditOutcome
from wire.peer_secrets import RefusedPeers

CLIENT_GONE_STATUS = 499
METHOD_NOT_ALLOWED = 405
NOT_FOUND = 404
DENIED = (401, 403)
PROCESS = "process"
UNKNOWN = "unknown"
Handler: TypeAlias = Callable[[Gateway, Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Route:
    """A path; `endpoint` is its name in metrics, `query` has the schemas of its query parameters.

    Requests with a `span` generate.
    """

    path: str
    handler: Handler
    endpoint: str = PROCESS
    method: str = "GET"
    body: type[RequestBody] | None = None
    span: SpanName | None = None
    streams: bool = False
    media_type: str = "application/json"
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    write_error: Callable[[ApiError], Response] = error_response


_POST = "POST"
MESSAGES = "/v1/messages"
_RESPONSE = "/v1/responses/{response_id}"
_INPUT_TOKENS = "/v1/responses/input_tokens"
_EVENTS_QUERY: Mapping[str, Mapping[str, Any]] = {
    "stream": {"type": "boolean"},
    "starting_after": {"type": "integer", "minimum": 0},
}
_ITEMS_QUERY: Mapping[str, Mapping[str, Any]] = {
    "order": {"type": "string", "enum": ["asc", "desc"]},
    "limit": {"type": "integer", "minimum": 1},
    "after": {"type": "string"},
}
_BETA_QUERY: Mapping[str, Mapping[str, Any]] = {"beta": {"type": "string"}}
"""Sent by Anthropic's clients; what it asks for is in the body."""


def _generating(
    span: SpanName,
    handler: Handler,
    endpoint: str,
    body: type[RequestBody],
    **more: Any,
) -> Route:
    method, path = span.split(" ")
    return Route(path, handler, endpoint, method, body, span, streams=True, **more)


ROUTES = (
    _generating(SpanName.HTTP_COMPLETIONS, completions, "completions", CompletionRequest),
    _generating(SpanName.HTTP_CHAT, chat_completions, "chat_completions", ChatRequest),
    _generating(SpanName.HTTP_RESPONSES, create_response, "responses", ResponseRequest),
    Route(_INPUT_TOKENS, count_input_tokens, "count_tokens", _POST, ResponseRequest),
    Route(_RESPONSE, retrieve_response, "responses", streams=True, query=_EVENTS_QUERY),
    Route(_RESPONSE, delete_response, "responses", "DELETE"),
    Route(f"{_RESPONSE}/cancel", cancel_response, "responses", _POST),
    Route(f"{_RESPONSE}/input_items", list_input_items, "responses", query=_ITEMS_QUERY),
    _generating(
        SpanName.HTTP_MESSAGES,
        create_message,
        "messages",
        MessageRequest,
        query=_BETA_QUERY,
        write_error=message_error,
    ),
    Route(
        f"{MESSAGES}/count_tokens",
        count_message_tokens,
        "count_tokens",
        _POST,
        PromptFields,
        query=_BETA_QUERY,
        write_error=message_error,
    ),
    Route(MODELS_PATH, process.models, "models"),
    Route(f"{MODELS_PATH}/{{model:path}}", process.model, "models"),
    *(
        route
        for prefix in ("", "/v1")
        for route in (
            Route(f"{prefix}/tokenize", tokenize, "tokenize", _POST, TokenizeRequest),
            Route(f"{prefix}/detokenize", detokenize, "detokenize", _POST, DetokenizeRequest),
            Route(f"{prefix}/tokenizer_info", tokenizer_info, "tokenizer_info"),
        )
    ),
    Route("/health", process.health),
    Route("/ping", process.health),
    Route("/readyz", process.ready),
    Route("/version", process.version),
    Route("/metrics", process.metrics, media_type="text/plain"),
    Route("/", page.page, media_type="text/html"),
    Route("/static/{name}", page.static, media_type="*/*"),
    Route("/favicon.ico", page.icon, media_type="image/svg+xml"),
)


_VERSIONS = ("v1", "v2")
NOT_SERVED: Mapping[str, str] = {
    "assistants": "assistants are not served",
    "audio": "audio is not served",
    "batch": "batches are not served: use the command `stageline batch`",
    "batches": "batches are not served: use the command `stageline batch`",
    "chat/completions": "stored chat completions are not served",
    "chatkit": "chat sessions are not served",
    "classify": "classification is not served",
    "containers": "containers are not served",
    "conversations": "stored conversations are not served",
    "embed": "embeddings are not served",
    "embeddings": "embeddings are not served",
    "engines": "engines are not served",
    "evals": "evaluations are not served",
    "files": "files are not served",
    "fine-tunes": "fine-tuning is not served",
    "fine_tuning": "fine-tuning is not served",
    "images": "images are not served",
    "messages/batches": "batches are not served: use the command `stageline batch`",
    "moderations": "moderations are not served",
    "organization": "organizations are not served",
    "pooling": "pooling is not served",
    "realtime": "realtime sessions are not served",
    "rerank": "reranking is not served",
    "responses": "other calls of responses are not served",
    "score": "scoring of pairs is not served",
    "skills": "skills are not served",
    "threads": "threads of assistants are not served",
    "uploads": "uploads of files are not served",
    "vector_stores": "vector stores are not served",
    "videos": "videos are not served",
}
"""What other servers have at paths that are unknown here, by their beginnings without a version."""


def make_app(gateway: Gateway) -> ASGIApp:
    """Make the application. Responses of all paths, known or not, count in the metrics."""
    app = FastAPI(
        title="Stageline",
        version=gateway.config.telemetry.service_version,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    endpoints: dict[Any, str] = {}
    schemas: dict[str, Any] = {"Error": _ERROR_SCHEMA}
    for route in ROUTES:
        handler = _guarded(route, gateway)
        endpoints[handler] = route.endpoint
        app.add_api_route(
            route.path,
            handler,
            methods=[route.method],
            summary=(route.handler.__doc__ or "").partition("\n")[0],
            operation_id=_operation_id(route),
            response_class=Response,
            responses=_responses(route),
            openapi_extra=_request_body(route.body, schemas) | _parameters(route),
        )
        if route.method == "GET":
            app.add_api_route(route.path, handler, methods=["HEAD"], include_in_schema=False)
    app.add_exception_handler(HTTPException, _http_exception)
    _add_schemas(app, schemas)
    guarded: ASGIApp = app
    if gateway.doorkeeper is not None:
        guarded = RequireKey(app, gateway.doorkeeper, MESSAGES)
    if (origins := gateway.config.allowed_origins) is not None:
        guarded = _with_cors(guarded, origins)
    return CountRequests(guarded, gateway.metrics, endpoints, gateway.audit)


EXPOSED_HEADERS = (
    "x-request-id",
    "request-id",
    "x-stageline-ignored",
    "openai-processing-ms",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
)
"""Headers of responses that pages of other origins may read, beside those that every page may."""


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Let pages of these origins call the API: preflights need no key, and errors can be read too.

    Browsers send no cookies along, of which the gateway has none.
    """
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=sorted({route.method for route in ROUTES} | {"HEAD"}),
        allow_headers=["*"],
        expose_headers=EXPOSED_HEADERS,
    )


def _operation_id(route: Route) -> str:
    path = re.sub(r"\{(\w+)[^}]*\}", r"\1", route.path)
    return f"{route.method.lower()}{path.replace('/', '_').replace('.', '_')}"


def _guarded(route: Route, gateway: Gateway) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        if gateway.spans is not None and route.span is not None:
            gateway.spans.begin(route.span, request.scope)
        try:
            if gateway.is_waiting and route.endpoint != PROCESS:
                raise unavailable(gateway.waiting_problem)
            note_ignored(request, _unknown_query(gateway, route, request))
            response = await route.handler(gateway.visited_by(visitor_of(request.scope)), request)
            if ignored := ignored_by(request):
                response.headers["x-stageline-ignored"] = ", ".join(ignored)
        except HTTPException as error:
            response = await _http_exception(request, error)
        except ClientGone:
            note_departure(request.scope)
            return Response(status_code=CLIENT_GONE_STATUS)
        except Exception as error:
            refused = as_api_error(error) if isinstance(error, NotAdmitted) else api_error(error)
            note_failure(request.scope, refused)
            response = route.write_error(refused)
        if route.endpoint != PROCESS:
            _name(response, request)
        return response

    return handle


def _name(response: Response, request: Request) -> None:
    """Add the request's label, under Anthropic's name too for its paths."""
    response.headers["x-request-id"] = label_of(request)
    if request.url.path.startswith(MESSAGES):
        response.headers["request-id"] = label_of(request)


def _unknown_query(gateway: Gateway, route: Route, request: Request) -> Sequence[str]:
    """Names of query parameters without effect. Raises ApiError for them with --strict-fields."""
    if route.endpoint == PROCESS:
        return ()
    unknown = dict.fromkeys(name for name in request.query_params if name not in route.query)
    check_fields(unknown, is_strict=gateway.config.strict_fields)
    return list(unknown)


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status, problem, headers = error.status_code, error.detail.lower(), dict(error.headers or {})
    if status == METHOD_NOT_ALLOWED and _names_a_response(request.path_params):
        headers["Allow"] = ", ".join(sorted(_methods_of_path(request)))  # not of one route alone
    elif status in (METHOD_NOT_ALLOWED, NOT_FOUND):
        status, problem, headers = NOT_FOUND, _unknown_path(request.url.path), {}
    text = f"{request.method} {request.url.path[:200]}: {problem}"
    write_error = message_error if request.url.path.startswith(MESSAGES) else error_response
    response = write_error(http_error(status, text, headers))
    _name(response, request)
    return response


def _names_a_response(path_params: Mapping[str, Any]) -> bool:
    """Whether a path with the place of a response's id has one, if it has that place."""
    identity = path_params.get("response_id")
    return identity is None or is_response_id(identity)


def _unknown_path(path: str) -> str:
    """Return what the error of an unknown path says: what is not served, for paths of other servers."""
    parts = path.strip("/").split("/")
    if parts[0] in _VERSIONS:
        del parts[0]
    names = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((NOT_SERVED[name] for name in names if name in NOT_SERVED), "not found")


def _methods_of_path(request: Request) -> Iterable[str]:
    for route in request.app.routes:
        if not isinstance(route, StarletteRoute):
            continue
        match, found = route.matches(request.scope)
        if match is not Match.NONE and _names_a_response(found["path_params"]):
            yield from route.methods or ()


class CountRequests:
    """Counts and audits requests from first byte to the end of the response, and ends their spans."""

    def __init__(
        self, app: ASGIApp, metrics: GatewayMetrics, endpoints: dict[Any, str], audit: AuditLog
    ) -> None:
        self._app, self._metrics, self._endpoints, self._audit = app, metrics, endpoints, audit
        self._refused = RefusedPeers(time.monotonic, audit=audit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if (span := span_of(scope)) is not None:
                    span.responded()
            await send(message)

        self._metrics.request_began()
        try:
            await self._app(scope, receive, watch)
        finally:
            endpoint = self._endpoints.get(scope.get("endpoint"), UNKNOWN)
            self._metrics.request_ended(endpoint, status)
            self._record(scope, endpoint, status)
            if (span := span_of(scope)) is not None:
                span.end(status)

    def _record(self, scope: Scope, endpoint: str, status: int) -> None:
        host, key = (scope.get("client") or ("unknown",))[0], visitor_of(scope).key
        if endpoint == UNKNOWN:  # such as without a key
            if status in DENIED:
                self._refused.note(
                    f"{scope['method']} {scope['path'][:100]}", f"HTTP status {status}", host=host
                )
            return
        if endpoint == PROCESS:
            return
        outcome = AuditOutcome.OK if status < 400 else AuditOutcome.REFUSED
        self._audit.record(
            Action.REQUEST_ENDED,
            outcome if status < 500 else AuditOutcome.FAILED,
            who=f"host {host}" if key is None else key.holder,
            host=host,
            request_id=label_of(Request(scope)),
            endpoint=endpoint,
            status=status,
        )


_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERROR = {
    "description": "Error",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}


def _responses(route: Route) -> dict[int | str, dict[str, Any]]:
    content: dict[str, Any] = {route.media_type: {"schema": {}}}
    if route.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {200: {"description": "Success", "content": content}, "4XX": _ERROR, "5XX": _ERROR}


def _parameters(route: Route) -> dict[str, Any]:
    """Describe the parameters of a path, which handlers read themselves."""
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)", route.path)
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in route.query.items()]
    return {"parameters": parameters} if parameters else {}


def _request_body(body: type[RequestBody] | None, schemas: dict[str, Any]) -> dict[str, Any]:
    """Describe the body, which handlers parse themselves, and add its parts to `schemas`."""
    if body is None:
        return {}
    schemas |= _schemas_of(body)
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


@cache
def _schemas_of(body: type[RequestBody]) -> Mapping[str, Any]:
    """Schemas of a body and its parts, by name; made once, as several paths take the same body."""
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    return {**schema.pop("$defs", {}), body.__name__: schema}


def _add_schemas(app: FastAPI, schemas: dict[str, Any]) -> None:
    make_schema = app.openapi

    def openapi() -> dict[str, Any]:
        document = make_schema()
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
