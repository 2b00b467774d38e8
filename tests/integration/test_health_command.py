"""`stageline health` against real servers, with and without certificates."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from certificates.identity import Identity, Role
from gateway.config import GatewayConfig
from gateway.server import GatewayServer
from stageline.cli import main
from tests.integration.cluster import DEADLINE_S, Cluster
from tests.integration.test_mock_cluster import mock_cluster
from tests.issued import Certificates
from wire.interceptors import READINESS
from wire.transport import PLAIN, PLAIN_SETTINGS, TransportSettings

SLOW = ("torch", "transformers", "opentelemetry.sdk", "numpy", "tokenizers", "uvicorn")


@asynccontextmanager
async def gateway_of(
    cluster: Cluster, transport: TransportSettings = PLAIN_SETTINGS
) -> AsyncIterator[GatewayServer]:
    config = GatewayConfig(coordinator=cluster.address, listen="127.0.0.1:0", transport=transport)
    server = GatewayServer(config, template=None)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


class Asked:
    """Runs the command beside the servers of the test."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    async def __call__(self, role: str, address: str, *flags: str) -> tuple[int, str]:
        code = await asyncio.to_thread(main, ["health", "--for", role, address, *flags])
        output = self._capsys.readouterr()
        text = output.out or output.err
        assert text.count("\n") == 1, text
        return code, text.strip()

    async def until(self, expected: tuple[int, str], role: str, address: str, *flags: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while await self(role, address, *flags) != expected:
                await asyncio.sleep(0.02)


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str]) -> Asked:
    return Asked(capsys)


def not_ready(role: str, address: str, state: str) -> tuple[int, str]:
    return 1, f"stageline: error[NOT_READY]: {role} at {address} is not ready: {state}"


async def test_each_process_is_asked_in_its_way(asked: Asked) -> None:
    async with mock_cluster(2) as cluster, gateway_of(cluster) as gateway:
        worker = cluster.workers["w1"].worker.listen_address
        for role, address, state in (
            ("coordinator", cluster.address, "serving"),
            ("worker", worker, "serving a stage"),
            ("gateway", gateway.address, "ready"),
        ):
            assert await asked(role, address) == (0, f"{role} at {address}: {state}")
            assert (await asked(role, address, "--live"))[0] == 0
        await cluster.workers["w0"].stop()
        await cluster.workers["w1"].stop()
        await asked.until(
            not_ready("coordinator", cluster.address, "waiting for workers"), "coordinator", cluster.address
        )
        assert await asked("coordinator", cluster.address, "--live") == (
            0,
            f"coordinator at {cluster.address}: waiting for workers",
        )
        await gateway.drain()
        expected = not_ready("gateway", gateway.address, "the gateway is draining")
        assert await asked("gateway", gateway.address) == expected
        assert (await asked("gateway", gateway.address, "--live"))[0] == 0


async def test_a_worker_that_waits_for_others_is_ready_and_does_not_serve(asked: Asked) -> None:
    async with mock_cluster(2, num_workers=1, waits=False) as cluster:
        worker = cluster.workers["w0"].worker.listen_address
        await asked.until((0, f"worker at {worker}: joined without a stage"), "worker", worker)
        async with PLAIN.channel(worker) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for service, status in (("", "NOT_SERVING"), (READINESS, "SERVING")):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_S)
                assert health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status) == status


async def test_a_process_of_another_role_is_not_the_one_that_was_asked_for(asked: Asked) -> None:
    async with mock_cluster(1) as cluster:
        worker = cluster.workers["w0"].worker.listen_address
        assert (await asked("worker", worker))[0] == (await asked("coordinator", cluster.address))[0] == 0
        for role, address in (("worker", cluster.address), ("coordinator", worker)):
            code, text = await asked(role, address)
            assert code == 1 and text.endswith(f"this is no {role}"), text


async def test_certificates_are_used_and_checked(asked: Asked, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    (tmp_path / "strangers").mkdir()
    strangers = Certificates(tmp_path / "strangers")
    async with mock_cluster(1, certificates=certificates) as cluster:
        worker = cluster.workers["w0"].worker.listen_address
        me = ("--tls-dir", str(certificates.of("me", Role.CLIENT)))
        for role, address in (("coordinator", cluster.address), ("worker", worker)):
            assert (await asked(role, address, *me))[0] == 0
            plain = await asked(role, address, "--timeout", "2s")
            assert plain[0] == 1 and "is not ready" in plain[1], plain
            stranger = ("--tls-dir", str(strangers.of("me", Role.CLIENT)))
            assert (await asked(role, address, *stranger))[0] == 1
        transport = TransportSettings(tls_directory=certificates.of("gw", Role.GATEWAY))
        async with gateway_of(cluster, transport) as gateway:
            async with asyncio.timeout(DEADLINE_S):  # it has not heard of the pipeline at once
                while (await asked("gateway", gateway.address, *me))[0] != 0:
                    await asyncio.sleep(0.02)
            assert (await asked("gateway", gateway.address))[0] == 1
            assert (await asked("gateway", gateway.address, *stranger))[0] == 1


async def test_a_process_asks_itself_with_a_certificate_for_another_address(
    asked: Asked, tmp_path: Path
) -> None:
    """As a container's health check does; another's certificate does not pass for its own."""
    certificates = Certificates(tmp_path)
    own = certificates.of("coordinator", Role.COORDINATOR)
    identity = Identity(cluster="default", role=Role.COORDINATOR, name="coordinator")
    certificates.write(own, identity, hosts=["head.cluster"])
    async with Cluster(
        None, layers=(2,), mock_model="layers=2", waits=False, num_workers=0, certificates=certificates
    ) as cluster:
        answer = await asked("coordinator", cluster.address, "--tls-dir", str(own), "--live")
        assert answer == (0, f"coordinator at {cluster.address}: waiting for workers")
        me = certificates.of("me", Role.CLIENT)
        assert (await asked("coordinator", cluster.address, "--tls-dir", str(me), "--live"))[0] == 1


async def test_dead_silent_and_strange_processes_are_one_line(asked: Asked) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        for role in ("worker", "coordinator", "gateway"):
            code, text = await asked(role, address, "--timeout", "300ms")
            assert (code, text.startswith(not_ready(role, address, "")[1])) == (1, True)
    for role in ("worker", "gateway"):
        code, text = await asked(role, address, "--timeout", "300ms")
        assert (code, text.startswith(f"stageline: error[NOT_READY]: {role} at {address}")) == (1, True)
    async with mock_cluster(1) as cluster:
        assert (await asked("gateway", cluster.address))[0] == 1


def test_wrong_command_lines_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for line, problem in (
        ("health --for engine a:1", "'engine' is not one of worker, coordinator, gateway"),
        ("health a:1", "Missing option '--for'"),
        ("health --for worker", "Missing argument 'ADDRESS'"),
        ("health --for worker here", "address 'here' is not HOST:PORT"),
        ("health --for worker a:1 --timeout soon", "'soon' is not a time above 0"),
        ("health --for worker a:1 --timeout 0s", "'0s' is not a time above 0"),
    ):
        assert main(line.split()) == 2
        assert problem in capsys.readouterr().err


def test_it_starts_without_slow_libraries() -> None:
    """It runs every few seconds in each container."""
    command = (
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "stageline",
        "health",
        "--for",
        "worker",
        "127.0.0.1:1",
    )
    finished = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    imported = [line.rpartition("|")[2].strip() for line in finished.stderr.splitlines() if "|" in line]
    assert finished.returncode == 1 and "grpc" in imported
    assert not [name for name in imported if name in SLOW]
