"""HTTP responses of the coordinator and their authorization."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
from httpx2 import AsyncClient as Http
from httpx2 import Response

from coordinator.cluster.transitions import ClusterPhase
from coordinator.dashboard import auth, server
from coordinator.dashboard.routes import DashboardContext
from coordinator.dashboard.server import DashboardServer
from coordinator.observability.activity import ActivityRecorder
from coordinator.observability.facts import FactRecorder
from stageline_rpc.v1 import cluster_pb2, inference_pb2
from telemetry.trace_view.facts import TraceSummary
from tests.unit.coordinator.observability.makers import new_request, result, sequence_of, step
from wire.errors import InvalidRequest, RequestNotFound, WorkerNotFound
from wire.ids import RequestId, id_text, new_request_id

TOKEN = "correct-horse-battery"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


class Coordinator:
    """Has one live request, one worker and one trace; records its calls."""

    def __init__(self) -> None:
        self.request = new_request()
        self.cancelled: list[RequestId] = []
        self.drained: list[str] = []
        self.phase = ClusterPhase.SERVING
        self.health = cluster_pb2.HEALTH_SERVING
        self.journal_failure: str | None = None
        self.recorder = ActivityRecorder(1000.0)
        self.facts = FactRecorder((self.recorder,))
        self.facts.accepted(self.request, 1000.0)
        self.connections = {"worker-0": object()}

    @property
    def sources(self) -> DashboardContext:
        own: Any = self
        return DashboardContext(
            status=own,
            activity=own,
            engine=own,
            controller=own,
            traces=cast(Any, Traces()),
            metrics=self.metrics,
        )

    def is_live(self, request_id: RequestId) -> bool:
        return request_id == self.request.id

    @property
    def state(self) -> Any:
        return SimpleNamespace(phase=self.phase, detail="2 of 3 workers joined")

    @property
    def availability(self) -> Any:
        return SimpleNamespace(health=self.health)

    def cluster(self) -> cluster_pb2.GetStatusResponse:
        worker = cluster_pb2.WorkerStatus(name="worker-0", stage=0, state=cluster_pb2.WORKER_STATE_READY)
        return cluster_pb2.GetStatusResponse(
            model="mock", state=cluster_pb2.CLUSTER_STATE_WAITING_FOR_WORKERS, workers=[worker]
        )

    def model(self) -> inference_pb2.GetModelResponse:
        return inference_pb2.GetModelResponse(architecture="llama")

    def snapshot(self) -> Any:
        return self.recorder.snapshot(1001.0, now_unix_s=5.0, workers=("worker-0", "worker-1"))

    def cancel(self, request_id: RequestId) -> None:
        self.cancelled.append(request_id)

    async def drain(self, name: str) -> None:
        if name not in self.connections:
            raise WorkerNotFound(name)
        self.drained.append(name)

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        return f"# accepts {accept}\n".encode(), "text/plain; version=0.0.4; charset=utf-8"


class Traces:
    """Keeps one."""

    async def summaries(self, num_requests: int | None = None) -> list[TraceSummary]:
        return [
            TraceSummary(
                request_id="0199",
                trace_id="5b8e",
                started_ns=1,
                duration_s=1.0,
                outcome="finished",
                num_prompt_tokens=3,
                num_completion_tokens=4,
                time_in_queue_s=None,
                time_to_first_token_s=0.5,
                slowest=None,
                num_preemptions=0,
                num_recoveries=0,
                num_spans=9,
            )
        ]

    async def facts(self, wanted: str) -> dict[str, Any]:
        if wanted == "0":
            raise InvalidRequest("0 matches 2 requests")
        if wanted != "0199":
            raise RequestNotFound(f"no trace of request {wanted} is stored")
        return {"request_id": "0199", "explanation": "1 s: all of it."}


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@asynccontextmanager
async def served(
    coordinator: Coordinator, *, listen: str = "127.0.0.1:0", token: str | None = None
) -> AsyncIterator[Http]:
    server = DashboardServer(coordinator.sources, listen=listen, token=token)
    await server.start()
    try:
        async with Http(base_url=server.url) as client:
            yield client
    finally:
        await server.stop()


@pytest.fixture
async def http(coordinator: Coordinator) -> AsyncIterator[Http]:
    async with served(coordinator, token=TOKEN) as client:
        yield client


@pytest.fixture
async def read_only(coordinator: Coordinator) -> AsyncIterator[Http]:
    async with served(coordinator) as client:
        yield client


def error_of(response: Response) -> str:
    return cast(str, response.json()["error"])


async def test_the_page_is_served_with_its_resources(http: Http) -> None:
    page = await http.get("/")
    assert page.status_code == 200
    text = page.text
    assert "http://" not in text
    assert "https://" not in text
    for name in ("main.js", "theme.js", "style.css", "trace.css", "icon.svg"):
        assert f"/static/{name}" in text
        response = await http.get(f"/static/{name}")
        assert response.status_code == 200
        assert response.headers["Cache-Control"] == "no-cache"
    assert (await http.get("/static/timeline.js")).headers["Content-Type"].startswith("text/javascript")


async def test_a_file_that_the_browser_has_is_not_sent_again(http: Http) -> None:
    first = await http.get("/static/style.css")
    again = await http.get("/static/style.css", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fserver.py", "%2e%2e/%2e%2e/app.py", "static_files.py"])
async def test_nothing_else_is_read_from_the_disk(http: Http, name: str) -> None:
    assert (await http.get(f"/static/{name}")).status_code == 404


@pytest.mark.parametrize("path", ["/", "/api/status", "/static/main.js", "/nowhere", "/api/traces/none"])
async def test_every_answer_has_the_headers_that_browsers_heed(http: Http, path: str) -> None:
    headers = (await http.get(path)).headers
    assert headers["Content-Security-Policy"].startswith("default-src 'none';")
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert "Server" not in headers


@pytest.mark.parametrize("name", ["evil.example", "evil.example:7481", "127.0.0.1.evil.example", ""])
async def test_other_names_are_not_served_on_loopback(http: Http, name: str) -> None:
    response = await http.get("/api/status", headers={"Host": name})
    assert response.status_code == 421
    assert "is not served" in error_of(response)


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST:9", "127.0.0.1:7481", "[::1]:7481", "[::1]"])
async def test_names_of_this_machine_are_served_through_any_forwarded_port(http: Http, name: str) -> None:
    assert (await http.get("/api/status", headers={"Host": name})).status_code == 200


async def test_any_host_name_is_served_on_other_interfaces(coordinator: Coordinator) -> None:
    async with served(coordinator, listen="0.0.0.0:0") as client:
        assert (await client.get("/api/status", headers={"Host": "gpu-a.lan:7481"})).status_code == 200


async def test_status_is_the_json_of_the_grpc_response(http: Http) -> None:
    status = (await http.get("/api/status")).json()
    assert (status["model"], status["state"], status["can_act"]) == (
        "mock",
        "CLUSTER_STATE_WAITING_FOR_WORKERS",
        True,
    )
    worker = status["workers"][0]
    assert (worker["stage"], worker["role"], worker["layer_end"]) == (0, "STAGE_ROLE_UNSPECIFIED", 0)


async def test_activity_has_the_steps_that_the_reader_lacks(coordinator: Coordinator, http: Http) -> None:
    sequence = sequence_of(coordinator.request)
    for index in range(4):
        coordinator.facts.step_sent(step(index, decodes=[sequence]), 1000.0 + index / 10)
        coordinator.facts.step_completed(result(index, 100, 300), (), 0.0, 1000.1 + index / 10)
    whole = (await http.get("/api/activity")).json()
    assert [step["number"] for step in whole["steps"]] == ["1", "2", "3", "4"]
    assert whole["steps"][0]["computed_us"] == [0, 100000, 100000, 400000]
    assert whole["steps"][0]["kind"] == "STEP_KIND_DECODE"
    assert (whole["slowest_stage"], whole["num_answered"]) == (1, "4")
    assert whole["summary"].startswith("Stage 1 (worker-1) is the slowest: ")
    assert whole["requests"][0]["request_id"] == id_text(coordinator.request.id)
    rest = (await http.get("/api/activity?after=3&since=1001000000")).json()
    assert ([step["number"] for step in rest["steps"]], rest["seconds"]) == (["4"], [])


@pytest.mark.parametrize(
    "query", ["after=-1", "after=x", "since=1e3", "after=9999999999999999999", "since=%D9%A3"]
)
async def test_malformed_numbers_are_rejected(http: Http, query: str) -> None:
    response = await http.get(f"/api/activity?{query}")
    assert response.status_code == 400
    assert "must be a whole number" in error_of(response)


async def test_traces_are_listed_and_read(http: Http) -> None:
    (summary,) = ((await http.get("/api/traces")).json())["traces"]
    assert (summary["request_id"], summary["spans"], summary["slowest_stage"]) == ("0199", 9, None)
    assert (summary["prompt_tokens"], summary["completion_tokens"], summary["started_at"]) == (
        3,
        4,
        "1970-01-01T00:00:00.000000001Z",
    )
    assert ((await http.get("/api/traces/0199")).json())["explanation"] == "1 s: all of it."
    missing = await http.get("/api/traces/abc")
    assert missing.status_code == 404
    assert error_of(missing) == "no trace of request abc is stored"
    assert (await http.get("/api/traces/0")).status_code == 400


@pytest.mark.parametrize(
    ("query", "status"),
    [("", 200), ("?limit=512", 200), ("?limit=513", 400), ("?limit=0", 400), ("?limit=x", 400)],
)
async def test_the_number_of_listed_traces_is_bounded(
    http: Http, query: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int | None] = []

    async def summaries(self: Traces, num_requests: int | None = None) -> list[TraceSummary]:
        limits.append(num_requests)
        return []

    monkeypatch.setattr(Traces, "summaries", summaries)
    assert (await http.get(f"/api/traces{query}")).status_code == status
    assert limits == {"": [100], "?limit=512": [512]}.get(query, [])


async def test_metrics_are_served_in_the_accepted_format(http: Http) -> None:
    response = await http.get("/metrics", headers={"Accept": "application/openmetrics-text"})
    assert response.text == "# accepts application/openmetrics-text\n"
    assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"


@pytest.mark.parametrize(
    ("phase", "health", "status"),
    [
        (ClusterPhase.SERVING, cluster_pb2.HEALTH_SERVING, 200),
        (ClusterPhase.SERVING, cluster_pb2.HEALTH_DRAINING, 503),
        (ClusterPhase.LOADING, cluster_pb2.HEALTH_STARTING, 503),
        (ClusterPhase.BLOCKED, cluster_pb2.HEALTH_DEGRADED, 503),
    ],
)
async def test_ready_means_serving_and_healthy_means_answering(
    coordinator: Coordinator,
    http: Http,
    phase: ClusterPhase,
    health: cluster_pb2.Health.ValueType,
    status: int,
) -> None:
    coordinator.phase, coordinator.health = phase, health
    ready = await http.get("/readyz")
    assert ready.status_code == status
    assert (ready.text == "serving\n") == (status == 200)
    assert (await http.get("/healthz")).status_code == 200


def actions(coordinator: Coordinator) -> list[str]:
    return [f"/api/requests/{id_text(coordinator.request.id)}/cancel", "/api/workers/worker-0/drain"]


async def test_changes_require_a_token_of_the_coordinator(coordinator: Coordinator, read_only: Http) -> None:
    for path in actions(coordinator):
        response = await read_only.post(path, headers=BEARER)
        assert response.status_code == 403
        assert "--token-file" in error_of(response)
    assert not ((await read_only.get("/api/status")).json())["can_act"]
    assert (coordinator.cancelled, coordinator.drained) == ([], [])


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN],
)
async def test_a_missing_or_wrong_token_changes_nothing(
    coordinator: Coordinator, http: Http, header: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    for path in (*actions(coordinator), "/api/token"):
        response = await http.post(path, headers={} if header is None else {"Authorization": header})
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
    line = "refused an HTTP request: wrong operator token, host=127.0.0.1 tries="
    has_token = header is not None and " " in header.strip()
    assert [text for text in caplog.messages if text.startswith(line)] == [
        f"{line}{number}" for number in range(1, 4) if has_token
    ]
    assert (coordinator.cancelled, coordinator.drained) == ([], [])


async def test_cancel_and_drain_work_with_the_token(coordinator: Coordinator, http: Http) -> None:
    cancel, drain = actions(coordinator)
    assert (await http.post("/api/token", headers=BEARER)).status_code == 200
    assert (await http.post(cancel, headers=BEARER)).status_code == 200
    assert (await http.post(drain, headers=BEARER)).status_code == 202
    assert (coordinator.cancelled, coordinator.drained) == ([coordinator.request.id], ["worker-0"])


async def test_unknown_requests_and_workers_are_not_found(http: Http) -> None:
    gone = await http.post(f"/api/requests/{id_text(new_request_id())}/cancel", headers=BEARER)
    assert (gone.status_code, (error_of(gone))[-9:]) == (404, "not found")
    assert (await http.post("/api/requests/nonsense/cancel", headers=BEARER)).status_code == 400
    assert (await http.post("/api/workers/worker-9/drain", headers=BEARER)).status_code == 404


@pytest.mark.parametrize("path", ["/api/token", "/api/workers/worker-0/drain"])
async def test_nothing_is_changed_by_reading(coordinator: Coordinator, http: Http, path: str) -> None:
    assert (await http.get(path, headers=BEARER)).status_code == 405
    assert coordinator.drained == []


async def _chunks() -> AsyncIterator[bytes]:
    yield b"some"
    yield b"more"


async def test_bodies_that_are_large_or_of_unknown_size_are_not_taken(http: Http) -> None:
    for body in (b"x" * (auth.MAX_BODY_BYTES + 1), _chunks()):
        assert (await http.post("/api/token", headers=BEARER, content=body)).status_code == 413
    assert (
        await http.post("/api/token", headers=BEARER, content=b"x" * auth.MAX_BODY_BYTES)
    ).status_code == 200


async def test_defects_are_logged_and_not_shown(
    coordinator: Coordinator,
    http: Http,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> Any:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(coordinator, "cluster", fail)
    response = await http.get("/api/status")
    assert response.status_code == 500
    assert "secret" not in response.text
    assert "secret detail" in caplog.text


async def test_slow_operations_are_answered_with_a_timeout(
    coordinator: Coordinator, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(self: object, num_requests: int) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(server, "REQUEST_TIMEOUT_S", 0.01)
    monkeypatch.setattr(Traces, "summaries", never)
    assert (await http.get("/api/traces")).status_code == 504


async def test_a_port_in_use_is_one_clear_line(coordinator: Coordinator) -> None:
    first = DashboardServer(coordinator.sources, listen="127.0.0.1:0", token=None)
    await first.start()
    try:
        taken = first.url.removeprefix("http://").rstrip("/")
        second = DashboardServer(coordinator.sources, listen=taken, token=None)
        with pytest.raises(
            OSError, match=rf"^cannot serve the dashboard on {taken}: address already in use; choose"
        ):
            await second.start()
    finally:
        await first.stop()


def test_the_url_can_be_opened(coordinator: Coordinator) -> None:
    for listen, url in (("0.0.0.0:7481", "http://127.0.0.1:7481/"), ("[::]:7481", "http://[::1]:7481/")):
        assert DashboardServer(coordinator.sources, listen=listen, token=None).url == url


@pytest.mark.parametrize("line", [b"GET /api/status HTTP/9.x\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n"])
async def test_connections_other_than_http_are_not_logged_as_errors(
    line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = DashboardServer(Coordinator().sources, listen="127.0.0.1:0", token=None)
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(server.url).port)
        for part in (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", line):
            writer.write(part)
        assert b"400" in (await reader.read()).split(b"HTTP/1.")[-1]
        writer.close()
    finally:
        await server.stop()
    records = [record for record in caplog.records if "Invalid HTTP request" in record.getMessage()]
    assert [record.levelno for record in records] == [logging.DEBUG]
    assert not any(record.exc_info or record.levelno >= logging.WARNING for record in caplog.records)
