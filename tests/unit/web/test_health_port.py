"""The port of probes: answers, what it tells, its limits, and a busy process."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

import pytest

from coordinator.config import CoordinatorConfig
from stage_worker.config import WorkerConfig
from web.connection_limits import FOR_OPERATORS, MAX_HEAD_BYTES, HttpLimits
from web.health_port import HealthPort
from wire.condition import STARTING, Condition, ProcessState

TIMEOUT_S = 60.0


@contextmanager
def probed(state: ProcessState, limits: HttpLimits = FOR_OPERATORS) -> Iterator[tuple[str, int]]:
    port = HealthPort("127.0.0.1:0", state.current, limits=limits)
    port.start()
    parts = urlsplit(port.url)
    assert parts.hostname is not None and parts.port is not None
    try:
        yield parts.hostname, parts.port
    finally:
        port.stop()


def ask(
    address: tuple[str, int], path: str, method: str = "GET", headers: dict[str, str] | None = None
) -> tuple[int, str]:
    with closing(http.client.HTTPConnection(*address, timeout=TIMEOUT_S)) as connection:
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        return response.status, response.read().decode()


def test_a_process_is_healthy_before_it_is_ready() -> None:
    state = ProcessState()
    with probed(state) as address:
        assert ask(address, "/healthz") == (200, "ok\n")
        assert ask(address, "/readyz") == (503, f"{STARTING.text}\n")
        state.follow(lambda: Condition("serving", is_ready=True))
        assert ask(address, "/readyz") == (200, "serving\n")
        state.follow(lambda: Condition("draining"))
        assert ask(address, "/readyz") == (503, "draining\n")
        assert ask(address, "/healthz") == (200, "ok\n")


async def test_probes_are_answered_while_the_event_loop_is_busy() -> None:
    with probed(ProcessState()) as address:
        assert ask(address, "/healthz") == (200, "ok\n")  # which blocks the loop of this test


@pytest.mark.parametrize("path", ["/", "/metrics", "/healthz/", "/readyz/../metrics", "/%2e%2e/etc/passwd"])
def test_nothing_else_is_served(path: str) -> None:
    with probed(ProcessState()) as address:
        assert ask(address, path) == (404, "not found\n")


def test_other_methods_are_refused() -> None:
    with probed(ProcessState()) as address:
        assert ask(address, "/healthz", "POST") == (405, "method not allowed\n")
        assert ask(address, "/healthz", "HEAD") == (200, "")


def test_connections_and_heads_are_bounded() -> None:
    limits = HttpLimits(max_connections=2, max_connections_per_host=1)
    with probed(ProcessState(), limits) as address:
        with socket.create_connection(address, timeout=TIMEOUT_S) as idle:
            assert ask(address, "/healthz")[0] == 503  # the idle connection has the place of this host
            idle.shutdown(socket.SHUT_WR)
            assert idle.recv(1) == b""
        assert ask(address, "/healthz", headers={"x-large": "x" * MAX_HEAD_BYTES})[0] == 431


def test_an_address_in_use_is_one_line() -> None:
    with probed(ProcessState()) as (host, port):
        late = HealthPort(f"{host}:{port}", ProcessState().current)
        problem = rf"^cannot serve health on {host}:{port}: .*--health-listen [^\n]*$"
        with pytest.raises(OSError, match=problem):
            late.start()


def test_it_may_listen_beyond_the_host_without_certificates() -> None:
    """It tells its callers nothing that strangers may not know; every other port is refused."""
    assert CoordinatorConfig(num_stages=1, health_listen="0.0.0.0:7484").health_listen == "0.0.0.0:7484"
    assert WorkerConfig(health_listen="0.0.0.0:7485").health_listen == "0.0.0.0:7485"
    with pytest.raises(ValueError, match=r"--listen 0\.0\.0\.0:7484 can be reached from other hosts"):
        CoordinatorConfig(num_stages=1, listen="0.0.0.0:7484")
