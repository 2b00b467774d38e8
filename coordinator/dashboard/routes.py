"""Paths of the dashboard: decode, one call, encode."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import xxhash
from aiohttp import hdrs, web

from coordinator.api.activity import ActivityReporter, encode_activity
from coordinator.api.status import StatusReporter
from coordinator.cluster.controller import Controller
from coordinator.cluster.transitions import ClusterPhase
from coordinator.dashboard.auth import DashboardAuth
from coordinator.engine.engine import Engine
from coordinator.observability.activity import (
    Snapshot,
    pipeline_load,
)
from coordinator.observability.trace_reader import TraceReader
from stageline_rpc.v1 import cluster_pb2, inference_pb2
from telemetry.trace_view.facts import encode_summary
from wire.ids import parse_request_id
from wire.status_codec import message_fields

MetricsText: TypeAlias = Callable[[str], Awaitable[tuple[bytes, str]]]
"""From what a client accepts to the metrics and their content type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardContext:
    """`metrics` None: there are none to show."""

    status: StatusReporter
    activity: ActivityReporter
    engine: Engine
    controller: Controller
    traces: TraceReader
    metrics: MetricsText | None = None


_DIRECTORY = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """`etag` changes with its content."""

    body: bytes
    content_type: str
    etag: str


def load_static_files() -> dict[str, StaticFile]:
    """By name. Nothing else is ever read from the disk for a client."""
    return {path.name: _load(path) for path in sorted(_DIRECTORY.iterdir()) if path.suffix in _TYPES}


def _load(path: Path) -> StaticFile:
    body = path.read_bytes()
    return StaticFile(body, _TYPES[path.suffix], xxhash.xxh3_64_hexdigest(body))


def status_fields(
    status: cluster_pb2.GetStatusResponse, model: inference_pb2.GetModelResponse, *, can_act: bool
) -> dict[str, Any]:
    """`can_act`: a reader with the token may cancel requests and drain workers."""
    return {
        **message_fields(status),
        "architecture": model.architecture,
        "max_sequence_tokens": model.max_sequence_tokens,
        "can_act": can_act,
    }


def activity_json(snapshot: Snapshot, *, after_step: int, since_us: int) -> bytes:
    """Steps answered after number `after_step`, and seconds from `since_us` on."""
    message = encode_activity(snapshot, pipeline_load(snapshot), after_step=after_step, since_us=since_us)
    return to_json(message_fields(message))


def to_json(value: Mapping[str, Any]) -> bytes:
    """Without spaces; what is no number in JSON (NaN, infinity) is a ValueError."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


MAX_THREADS = 2
"""For all readers together; further requests wait."""
LISTED_TRACES = 100
"""Default limit of the list of traces."""
MOST_LISTED_TRACES = 512


class Routes:
    """One handler per path."""

    def __init__(self, sources: DashboardContext, guard: DashboardAuth) -> None:
        self._sources = sources
        self._guard = guard
        self._files = load_static_files()
        self._threads = asyncio.Semaphore(MAX_THREADS)
        self._drains = set[asyncio.Task[None]]()

    def table(self) -> list[web.RouteDef]:
        return [
            web.get("/", self.page),
            web.get("/static/{name}", self.static),
            web.get("/favicon.ico", self.icon),
            web.get("/api/status", self.status),
            web.get("/api/activity", self.activity),
            web.get("/api/traces", self.traces),
            web.get("/api/traces/{request_id}", self.trace),
            web.get("/metrics", self.metrics),
            web.get("/healthz", self.health),
            web.get("/readyz", self.ready),
            web.post("/api/token", self.check_token),
            web.post("/api/requests/{request_id}/cancel", self.cancel),
            web.post("/api/workers/{name}/drain", self.drain),
        ]

    def close(self) -> None:
        """Stop waiting for draining workers; they continue to drain."""
        for task in self._drains:
            task.cancel()

    async def page(self, request: web.Request) -> web.Response:
        return _file_response(request, self._files["index.html"])

    async def icon(self, request: web.Request) -> web.Response:
        return _file_response(request, self._files["icon.svg"])

    async def static(self, request: web.Request) -> web.Response:
        file = self._files.get(request.match_info["name"])
        if file is None:
            raise web.HTTPNotFound(text=f"there is no file {request.match_info['name']!r}")
        return _file_response(request, file)

    async def status(self, request: web.Request) -> web.Response:
        reporter = self._sources.status
        fields = status_fields(reporter.cluster(), reporter.model(), can_act=self._guard.has_token)
        return _json_response(fields)

    async def activity(self, request: web.Request) -> web.Response:
        """`?after=STEP_NUMBER&since=US` leaves out steps and seconds that the client already has."""
        after_step, since_us = _number(request, "after"), _number(request, "since")
        async with self._threads:
            snapshot = self._sources.activity.snapshot()
            body = await asyncio.to_thread(activity_json, snapshot, after_step=after_step, since_us=since_us)
        return web.Response(body=body, content_type="application/json")

    async def traces(self, request: web.Request) -> web.Response:
        """The newest `?limit=N` requests with a stored trace."""
        limit = _number(request, "limit", LISTED_TRACES)
        if not 1 <= limit <= MOST_LISTED_TRACES:
            raise web.HTTPBadRequest(text=f"limit is {limit}, but must be 1 to {MOST_LISTED_TRACES}")
        found = await self._sources.traces.summaries(limit)
        async with self._threads:
            fields = [message_fields(encode_summary(each)) for each in found]
            body = await asyncio.to_thread(to_json, {"traces": fields})
        return web.Response(body=body, content_type="application/json")

    async def trace(self, request: web.Request) -> web.Response:
        """A trace by its request id, or the beginning of it."""
        facts = await self._sources.traces.facts(request.match_info["request_id"])
        async with self._threads:
            body = await asyncio.to_thread(to_json, facts)
        return web.Response(body=body, content_type="application/json")

    async def metrics(self, request: web.Request) -> web.Response:
        if self._sources.metrics is None:
            raise web.HTTPNotFound(text="this coordinator has no metrics")
        body, content_type = await self._sources.metrics(request.headers.get(hdrs.ACCEPT, ""))
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})

    async def health(self, request: web.Request) -> web.Response:
        return _text_response("ok\n")

    async def ready(self, request: web.Request) -> web.Response:
        """200 only while the cluster serves and accepts new requests."""
        state, availability = self._sources.controller.state, self._sources.controller.availability
        if state.phase is ClusterPhase.SERVING and availability.health == cluster_pb2.HEALTH_SERVING:
            return _text_response("serving\n")
        if (failure := self._sources.engine.durability.failure) is not None:
            return _text_response(f"{failure}\n", status=503)
        return _text_response(f"{state.detail or state.phase.name.lower().replace('_', ' ')}\n", status=503)

    async def check_token(self, request: web.Request) -> web.Response:
        self._guard.check_token(request)
        return _json_response({})

    async def cancel(self, request: web.Request) -> web.Response:
        self._guard.check_token(request)
        try:
            request_id = parse_request_id(request.match_info["request_id"])
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        if self._sources.engine.registry.live_request(request_id) is None:
            raise web.HTTPNotFound(text=f"request {request.match_info['request_id']} is not live")
        self._sources.engine.cancel(request_id)
        return _json_response({})

    async def drain(self, request: web.Request) -> web.Response:
        """Respond at once; the worker leaves after its layers have moved."""
        self._guard.check_token(request)
        name = request.match_info["name"]
        if name not in self._sources.controller.connections:
            raise web.HTTPNotFound(text=f"no worker {name!r} is here")
        task = asyncio.create_task(self._sources.controller.drain(name), name=f"drain {name}")
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)
        return _json_response({}, status=202)


def _number(request: web.Request, name: str, default: int = 0) -> int:
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise web.HTTPBadRequest(text=f"{name} is {text[:40]!r}, but must be a whole number")
    return int(text)


def _json_response(value: Mapping[str, Any], *, status: int = 200) -> web.Response:
    return web.Response(body=to_json(value), content_type="application/json", status=status)


def _text_response(text: str, *, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status)


def _file_response(request: web.Request, file: StaticFile) -> web.Response:
    headers = {hdrs.ETAG: f'"{file.etag}"', hdrs.CACHE_CONTROL: "no-cache"}
    if any(each.value == file.etag for each in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    return web.Response(body=file.body, content_type=file.content_type, charset="utf-8", headers=headers)
