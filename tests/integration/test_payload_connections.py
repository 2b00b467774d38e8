"""Hidden states on payload connections: tokens stay the same, whatever happens to the connections."""

import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stage_worker.config import WorkerConfig
from tests.faults.byte_proxy import ByteProxy, Direction
from tests.integration.calls import until
from tests.integration.cluster import Answer, Cluster
from tests.integration.request_cases import SoloRuns, mixed_cases
from tests.integration.test_cluster_faults import reported_faults
from tests.ports import unused_address
from wire import payload_sockets, payloads
from wire.addresses import parse_address

NUM_STAGES = 3
MIDDLE = "w1"
Change = Callable[[ByteProxy], Any]


class PayloadCluster(Cluster):
    """All hidden states travel on payload connections; those into MIDDLE pass `line`."""

    def __init__(self, model: Path, line: ByteProxy, **settings: Any) -> None:
        super().__init__(model, layers=(1,) * NUM_STAGES)
        self._line = line
        self._settings = settings

    def worker_config(self, name: str, *arguments: Any, **more: Any) -> WorkerConfig:
        config = replace(super().worker_config(name, *arguments, **more), min_payload_bytes=1)
        if name != MIDDLE:
            return config
        through_line = {"payload_listen": self._line.target, "payload_advertise": self._line.address}
        return replace(config, **through_line | self._settings)


@pytest.fixture(scope="module")
def solo(varied_llama: Path) -> SoloRuns:
    return SoloRuns(varied_llama)


@asynccontextmanager
async def serving(model: Path, **settings: Any) -> AsyncIterator[tuple[PayloadCluster, ByteProxy]]:
    """No thread and no port is left behind."""
    async with ByteProxy(unused_address()) as line:
        async with PayloadCluster(model, line, **settings) as cluster:
            yield cluster, line
        await until(lambda: not [t for t in threading.enumerate() if t.name.startswith("payload-")])
        address = parse_address(line.target)
        with socket.socket() as probe:
            assert probe.connect_ex((address.host, address.port)) != 0


def has_begun(answers: list[Answer]) -> bool:
    return all(len(answer.tokens) >= 3 for answer in answers)


def fallbacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if line.startswith("hidden states travel over gRPC")]


async def test_hidden_states_travel_on_payload_connections(
    varied_llama: Path, solo: SoloRuns, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(varied_llama) as (cluster, line):
        solo.check(await cluster.generate_all(mixed_cases(6)))
        assert line.num_connections == cluster.epoch
        assert line.num_bytes > 10_000
    assert fallbacks(caplog) == []


@pytest.mark.full
async def test_without_an_offer_hidden_states_travel_over_grpc(
    varied_llama: Path, solo: SoloRuns, caplog: pytest.LogCaptureFixture
) -> None:
    off = {"payload_listen": "off", "payload_advertise": None}
    async with serving(varied_llama, **off) as (cluster, line):
        solo.check(await cluster.generate_all(mixed_cases(6)))
        assert line.num_connections == 0
    assert fallbacks(caplog) == []


@pytest.mark.full
async def test_small_hidden_states_travel_over_grpc(varied_llama: Path, solo: SoloRuns) -> None:
    async with serving(varied_llama, min_payload_bytes=1 << 20) as (cluster, line):
        solo.check(await cluster.generate_all(mixed_cases(6)))
        assert line.num_connections == 0


@pytest.mark.matrix(1)
@pytest.mark.parametrize("is_silent", [False, True], ids=["refused", "silent"])
async def test_a_blocked_port_costs_one_log_line(
    varied_llama: Path,
    solo: SoloRuns,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    is_silent: bool,
) -> None:
    monkeypatch.setattr(payload_sockets, "GREETING_TIMEOUT_S", 0.5)
    with socket.socket() as blocked:
        blocked.bind(("127.0.0.1", 0))
        if is_silent:
            blocked.listen()
        address = f"127.0.0.1:{blocked.getsockname()[1]}"
        async with serving(varied_llama, payload_advertise=address) as (cluster, _):
            epoch = cluster.epoch
            solo.check(await cluster.generate_all(mixed_cases(6)))
            assert cluster.epoch == epoch
            reason = "timed out" if is_silent else "Connection refused"
            problem = f"the payload connection to {address} could not be opened: {reason}"
            status = await cluster.wait_status(
                lambda status: any(worker.payload_fallback for worker in status.workers)
            )
            told = {worker.stage: worker.payload_fallback for worker in status.workers}
            assert told == {0: problem, 1: "", 2: ""}
    assert fallbacks(caplog) == [f"hidden states travel over gRPC for 30 s: {problem}"]


def _cut(line: ByteProxy) -> None:
    line.cut()


def _stall(line: ByteProxy) -> None:
    line.stall()


def _flip(line: ByteProxy) -> None:
    line.flip(Direction.FORTH, within_bytes=50)


@pytest.mark.matrix(0)
@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (_cut, {"NEIGHBOUR"}),
        (_stall, {"NEIGHBOUR"}),
        (_flip, {"CHECKSUM", "UNDECODABLE", "SHAPE", "NEIGHBOUR"}),
    ],
    ids=["cut", "stalled", "falsified"],
)
async def test_a_fault_of_the_connection_ends_one_epoch_and_changes_no_token(
    varied_llama: Path,
    solo: SoloRuns,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    change: Change,
    kinds: set[str],
) -> None:
    monkeypatch.setattr(payloads, "PAYLOAD_TIMEOUT_S", 0.3)
    async with serving(varied_llama) as (cluster, line):
        epoch, num_connections = cluster.epoch, line.num_connections
        async with cluster.generating(mixed_cases(6)) as answers:
            await until(lambda: has_begun(answers))
            change(line)
        line.flow()
        solo.check(answers)
        assert cluster.epoch == epoch + 1
        # The next epoch has no connection on this hop.
        assert line.num_connections == num_connections
    assert {kind for _, kind in reported_faults(caplog)} <= kinds
    assert len(fallbacks(caplog)) >= 1
