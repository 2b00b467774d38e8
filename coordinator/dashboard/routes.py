"""Routes of the dashboard: decode, one call, encode."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from coordinator.api.activity import ActivityReporter, encode_activity
from coordinator.api.status import StatusReporter
from coordinator.cluster.controller import Controller
from coordinator.cluster.transitions import ClusterPhase
from coordinator.dashboard.auth import Access, DashboardAuth
from coordinator.dashboard.login import user_fields
from coordinator.dashboard.sessions import User
from coordinator.engine.engine import Engine
from coordinator.observability.activity import Snapshot, pipeline_load
from coordinator.observability.trace_reader import TraceReader
from stageline_rpc.v1 import cluster_pb2, inference_pb2
from telemetry.trace_view.facts import encode_summary
from web.static_files import load_static_files
from wire.audit import Action
from wire.foreign_text import parse_digits
from wire.ids import id_text, parse_request_id
from wire.status_codec import message_fields

MetricsText: TypeAlias = Callable[[str], Awaitable[tuple[bytes, str]]]
"""Returns the metrics and their content type for an Accept header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardContext:
    """Parts of the coordinator that the dashboard uses; `metrics` is None if there are none."""

    status: StatusReporter
    activity: ActivityReporter
    engine: Engine
    controller: Controller
    traces: TraceReader
    metrics: MetricsText | None = None


Handler: TypeAlias = Callable[[Request, User], Awaitable[Response]]
_DIRECTORY = Path(__file__).parent / "static"


def status_fields(
    status: cluster_pb2.GetStatusResponse,
    model: inference_pb2.GetModelResponse,
    *,
    can_act: bool,
    user: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Status and model as JSON; `can_act`: the user, or without a login the operator token, may cancel and
    drain.
    """
    return {
        **message_fields(status),
        "architecture": model.architecture,
        "max_sequence_tokens": model.max_sequence_tokens,
        "can_act": can_act,
        "user": user,
    }


def activity_json(snapshot: Snapshot, *, after_step: int, since_us: int) -> bytes:
    """Activity with steps after number `after_step`, and seconds from `since_us` on."""
    message = encode_activity(snapshot, pipeline_load(snapshot), after_step=after_step, since_us=since_us)
    return to_json(message_fields(message))


def to_json(value: Mapping[str, Any]) -> bytes:
    """Compact JSON. Raises ValueError for NaN and infinity."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


MAX_THREADS = 2
"""Limit over all readers; further requests wait."""
LISTED_TRACES = 100
"""Default limit of the list of traces."""
MAX_LISTED_TRACES = 512


class Routes:
    """One handler per path."""

    def __init__(self, context: DashboardContext, auth: DashboardAuth) -> None:
        self._auth = auth
        self._status, self._activity = context.status, context.activity
        self._engine, self._controller = context.engine, context.controller
        self._traces, self._metrics = context.traces, context.metrics
        self._files = load_static_files(_DIRECTORY)
        self._threads = asyncio.Semaphore(MAX_THREADS)
        self._drains = set[asyncio.Task[None]]()

    def table(self) -> list[Route]:
        routes = [
            self._route("/", Access.VIEW, self.page),
            self._route("/static/{name}", Access.OPEN, self.static),
            self._route("/favicon.ico", Access.OPEN, self.icon),
            self._route("/api/status", Access.VIEW, self.status),
            self._route("/api/activity", Access.VIEW, self.activity),
            self._route("/api/traces", Access.VIEW, self.traces),
            self._route("/api/traces/{request_id}", Access.VIEW, self.trace),
            self._route("/metrics", Access.VIEW, self.metrics),
            self._route("/healthz", Access.OPEN, self.health),
            self._route("/readyz", Access.OPEN, self.ready),
            self._route("/api/token", Access.ACT, self.check_token, method="POST"),
            self._route("/api/requests/{request_id}/cancel", Access.ACT, self.cancel, method="POST"),
            self._route("/api/workers/{name}/drain", Access.ACT, self.drain, method="POST"),
        ]
        if (login := self._auth.login) is not None:
            routes += [
                self._route("/login", Access.OPEN, self.login_page),
                self._route("/login", Access.OPEN, lambda request, user: login.begin(request), method="POST"),
                self._route("/logout", Access.VIEW, lambda request, user: login.end(request), method="POST"),
            ]
        return routes

    def _route(self, path: str, access: Access, handler: Handler, *, method: str = "GET") -> Route:
        async def handle(request: Request) -> Response:
            try:
                user = await self._auth.admit(request, access)
            except HTTPException as error:
                if error.status_code == 401 and _is_navigation(request):
                    return RedirectResponse("/login", 303)
                raise
            return await handler(request, user)

        return Route(path, handle, methods=[method])

    def close(self) -> None:
        """Stop waiting for draining workers; they continue to drain."""
        for task in self._drains:
            task.cancel()

    async def page(self, request: Request, user: User) -> Response:
        return self._files["index.html"].response(request)

    async def icon(self, request: Request, user: User) -> Response:
        return self._files["icon.svg"].response(request)

    async def login_page(self, request: Request, user: User) -> Response:
        return self._files["login.html"].response(request)

    async def static(self, request: Request, user: User) -> Response:
        file = self._files.get(request.path_params["name"])
        if file is None:
            raise HTTPException(404, f"file {request.path_params['name']!r} not found")
        return file.response(request)

    async def status(self, request: Request, user: User) -> Response:
        fields = status_fields(
            self._status.cluster(),
            self._status.model(),
            can_act=self._auth.may_act(user),
            user=None if self._auth.login is None else user_fields(user),
        )
        return _json_response(fields)

    async def activity(self, request: Request, user: User) -> Response:
        """`?after=STEP_NUMBER&since=US` omits steps and seconds that the client has."""
        after_step, since_us = _number(request, "after"), _number(request, "since")
        async with self._threads:
            snapshot = self._activity.snapshot()
            body = await asyncio.to_thread(activity_json, snapshot, after_step=after_step, since_us=since_us)
        return Response(body, media_type="application/json")

    async def traces(self, request: Request, user: User) -> Response:
        """The newest `?limit=N` requests with a stored trace."""
        limit = _number(request, "limit", LISTED_TRACES)
        if not 1 <= limit <= MAX_LISTED_TRACES:
            raise HTTPException(400, f"limit is {limit}, must be in [1, {MAX_LISTED_TRACES}]")
        found = await self._traces.summaries(limit)
        async with self._threads:
            fields = [message_fields(encode_summary(summary)) for summary in found]
            body = await asyncio.to_thread(to_json, {"traces": fields})
        return Response(body, media_type="application/json")

    async def trace(self, request: Request, user: User) -> Response:
        """A trace, by its request id or the beginning of it."""
        facts = await self._traces.facts(request.path_params["request_id"])
        async with self._threads:
            body = await asyncio.to_thread(to_json, facts)
        return Response(body, media_type="application/json")

    async def metrics(self, request: Request, user: User) -> Response:
        if self._metrics is None:
            raise HTTPException(404, "this coordinator has no metrics")
        body, content_type = await self._metrics(request.headers.get("Accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    async def health(self, request: Request, user: User) -> Response:
        return _text_response("ok\n")

    async def ready(self, request: Request, user: User) -> Response:
        """200 only while the cluster serves and accepts new requests."""
        state, availability = self._controller.state, self._controller.availability
        if state.phase is ClusterPhase.SERVING and availability.health == cluster_pb2.HEALTH_SERVING:
            return _text_response("serving\n")
        if (failure := self._engine.journal_failure) is not None:
            return _text_response(f"{failure}\n", status=503)
        return _text_response(f"{state.detail or state.phase.name.lower().replace('_', ' ')}\n", status=503)

    async def check_token(self, request: Request, user: User) -> Response:
        return _json_response({})

    async def cancel(self, request: Request, user: User) -> Response:
        try:
            request_id = parse_request_id(request.path_params["request_id"])
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        if not self._engine.is_live(request_id):
            raise HTTPException(404, f"request {request.path_params['request_id']} not found")
        self._engine.cancel(request_id)
        self._auth.record(Action.CANCEL, request, user, request_id=id_text(request_id))
        return _json_response({})

    async def drain(self, request: Request, user: User) -> Response:
        """Respond at once; the worker leaves after its layers have moved."""
        name = request.path_params["name"]
        if name not in self._controller.connections:
            raise HTTPException(404, f"worker {name!r} not found")
        self._auth.record(Action.DRAIN, request, user, worker=name)
        task = asyncio.create_task(self._controller.drain(name), name=f"drain {name}")
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)
        return _json_response({}, status=202)


def _is_navigation(request: Request) -> bool:
    """Whether a browser opens a page: it shows what it is sent to."""
    return request.method == "GET" and "text/html" in request.headers.get("Accept", "")


def _number(request: Request, name: str, default: int = 0) -> int:
    text = request.query_params.get(name, str(default))
    if (number := parse_digits(text, limit=10**18 - 1)) is None:
        raise HTTPException(400, f"{name} is {text[:40]!r}, must be a whole number")
    return number


def _json_response(value: Mapping[str, Any], *, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")


def _text_response(text: str, *, status: int = 200) -> Response:
    return PlainTextResponse(text, status)
