"""What is asked for by which path: decodes, makes one call, encodes."""

import asyncio
from collections.abc import Mapping
from typing import Any

from aiohttp import hdrs, web

from coordinator.cluster.phase import ClusterPhase
from coordinator.dashboard.activity_json import activity_json, to_json
from coordinator.dashboard.guard import Guard
from coordinator.dashboard.sources import Sources
from coordinator.dashboard.static_files import StaticFile, load_static_files
from coordinator.dashboard.status_json import status_fields
from stageline_rpc.v1 import cluster_pb2
from telemetry.trace_view.facts import summary_facts
from wire.ids import parse_request_id

MAX_THREADS = 2
"""That work for all readers together; who comes later waits."""
LISTED_TRACES = 100
"""Unless told otherwise."""
MOST_LISTED_TRACES = 512


class Routes:
    """One handler for each path."""

    def __init__(self, sources: Sources, guard: Guard) -> None:
        self._sources = sources
        self._guard = guard
        self._files = load_static_files()
        self._threads = asyncio.Semaphore(MAX_THREADS)
        self._drains = set[asyncio.Task[None]]()

    def table(self) -> list[web.RouteDef]:
        """For the server."""
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
        """Nobody waits for workers that leave any more; they leave all the same."""
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
        """`?after=STEP_NUMBER&since=US` leaves out what the client has already."""
        after_step, since_us = _number(request, "after"), _number(request, "since")
        async with self._threads:
            snapshot = self._sources.activity.snapshot()
            body = await asyncio.to_thread(activity_json, snapshot, after_step=after_step, since_us=since_us)
        return web.Response(body=body, content_type="application/json")

    async def traces(self, request: web.Request) -> web.Response:
        """`?limit=N` of the requests whose traces are kept, latest first."""
        limit = _number(request, "limit", LISTED_TRACES)
        if not 1 <= limit <= MOST_LISTED_TRACES:
            raise web.HTTPBadRequest(text=f"limit is {limit}, but must be 1 to {MOST_LISTED_TRACES}")
        found = await self._sources.traces.summaries(limit)
        async with self._threads:
            body = await asyncio.to_thread(to_json, {"traces": [summary_facts(each) for each in found]})
        return web.Response(body=body, content_type="application/json")

    async def trace(self, request: web.Request) -> web.Response:
        """By the id of its request, or the beginning of it."""
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
        """200 only while tokens are produced, and new requests are welcome."""
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
        """Answers at once; the worker leaves when its layers have moved."""
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
