"""`stageline doctor` over the hosts of a cluster: agents on addresses of this machine, with certificates."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import psutil
import pytest

from certificates.identity import Identity, Role
from deploy.commands import read_cluster_spec
from deploy.doctor.agent import DoctorAgent
from deploy.doctor.facts import versions_here
from deploy.doctor.findings import problems_of_survey
from deploy.doctor.places import Place, places_at, places_of
from deploy.doctor.survey import Survey, survey
from stageline.cli import main
from stageline.client.errors import StatusDetails
from stageline_rpc.internal.v1 import doctor_pb2, doctor_pb2_grpc
from tests.integration.test_mock_cluster import mock_cluster
from tests.issued import Certificates, careless_channel
from tests.ports import unused_address
from wire.channels import PROTOCOL_VERSION
from wire.clock import wall_clock_us
from wire.sizes import format_size
from wire.transport import Transport, client_transport

DEADLINE_S = 120.0
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
FILE = """\
coordinator: {{host: 127.0.0.1, listen: "127.0.0.1:{0}", http: "off"}}
gateways: []
workers:
  - {{name: gpu-a, host: 127.0.0.2, listen: "127.0.0.2:{1}"}}
  - {{name: gpu-b, host: 127.0.0.3, listen: "127.0.0.3:{2}", flags: {{payload-listen: "127.0.0.3:{3}"}}}}
security: {{tls-dir: {4}}}
"""


class Hosts:
    """Three hosts of one cluster file, and the operator who asks them."""

    def __init__(self, folder: Path) -> None:
        certificates = Certificates(folder)
        self.ports = [unused_address().rpartition(":")[2] for _ in range(4)]
        self.file = folder / "cluster.yaml"
        for name, role, host in (
            ("coordinator", Role.COORDINATOR, HOSTS[0]),
            ("gpu-a", Role.WORKER, HOSTS[1]),
            ("gpu-b", Role.WORKER, HOSTS[2]),
        ):
            directory = folder / "tls" / name
            directory.mkdir(parents=True, mode=0o700)
            identity = Identity(cluster="default", role=role, name=name)
            certificates.write(directory, identity, hosts=[host])
        self.file.write_text(FILE.format(*self.ports, folder / "tls"))
        self.places = places_of(read_cluster_spec(self.file))
        self.me = certificates.of("me", Role.OPERATOR)
        self.transport: Transport = client_transport(self.me)
        self.certificates = certificates

    @asynccontextmanager
    async def agent(
        self,
        name: str,
        *,
        versions: Mapping[str, str] | None = None,
        now_us: Callable[[], int] = wall_clock_us,
    ) -> AsyncIterator[DoctorAgent]:
        agent = DoctorAgent(
            name,
            places_at(self.places, name),
            self.places,
            versions={**versions_here("1"), **(versions or {})},
            now_us=now_us,
        )
        await agent.start()
        try:
            yield agent
        finally:
            await agent.stop()

    async def survey(self) -> tuple[Survey, list[str]]:
        async with asyncio.timeout(DEADLINE_S):
            found = await survey(self.places, self.transport)
        return found, problems_of_survey(found, self.places)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    monkeypatch.setattr("deploy.doctor.probe.TRANSFER_TIME_S", 0.05)
    # Whatever CPU runs the tests; what doctor says of one without the kernels is tested with the findings.
    monkeypatch.setattr("deploy.doctor.facts._kernels_problem", lambda: "")
    return Hosts(tmp_path)


def ways(found: Survey) -> dict[tuple[str, str], doctor_pb2.Measurement]:
    return {(way.path.caller.name, way.path.callee.name): way.result for way in found.measured}


async def test_sound_hosts_are_measured_between_all_that_talk(
    hosts: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    async with hosts.agent(HOSTS[0]), hosts.agent(HOSTS[1]), hosts.agent(HOSTS[2]):
        found, problems = await hosts.survey()
        assert problems == []
        assert sorted(found.facts) == list(HOSTS)
        measured = ways(found)
        assert set(measured) == {
            *{("gpu-a", "coordinator"), ("gpu-b", "coordinator"), ("coordinator", "gpu-a")},
            *{("coordinator", "gpu-b"), ("gpu-a", "gpu-b"), ("gpu-b", "gpu-a")},
        }
        with_data = {pair for pair, result in measured.items() if result.upload_rate and result.download_rate}
        assert with_data == {("gpu-a", "coordinator"), ("gpu-b", "coordinator"), ("gpu-a", "gpu-b")}
        for result in measured.values():
            assert 0 < result.median_us <= result.p99_us
            assert abs(result.clock_offset_us) <= result.clock_uncertainty_us + 1  # one clock, whole us
        command = ["doctor", "-f", str(hosts.file), "--tls-dir", str(hosts.me)]
        assert await asyncio.to_thread(main, [*command, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert (len(shown["ways"]), shown["problems"], shown["silent"]) == (6, [], {})
        assert await asyncio.to_thread(main, command) == 0
        assert capsys.readouterr().out.endswith("no problem found\n")


async def test_each_planted_problem_is_one_sentence(hosts: Hosts) -> None:
    payloads = ("127.0.0.3", int(hosts.ports[3]))
    with socket.create_server(payloads):
        async with (
            hosts.agent(HOSTS[1], now_us=lambda: wall_clock_us() - 90_000_000),
            hosts.agent(HOSTS[0], versions={"protocol": "12"}),
            hosts.agent(HOSTS[2]),
        ):
            found, problems = await hosts.survey()
    assert len(problems) == 3, problems
    in_use, version, clock = problems
    assert in_use.startswith(f"127.0.0.3: gpu-b cannot listen on 127.0.0.3:{payloads[1]} (payloads): another")
    versions = f"12 on 127.0.0.1; {PROTOCOL_VERSION} on 127.0.0.2, 127.0.0.3"
    assert version.startswith(f"versions of protocol differ ({versions}): ")
    assert clock.startswith("the clock of 127.0.0.2 is 90.0")
    assert "s behind 127.0.0.1 (at most" in clock
    result = ways(found)["gpu-b", "gpu-a"]
    assert abs(result.clock_offset_us + 90_000_000) <= result.clock_uncertainty_us + 1


async def test_a_dead_host_is_one_sentence_and_the_others_are_measured(
    hosts: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    async with hosts.agent(HOSTS[0]), hosts.agent(HOSTS[1]):
        found, problems = await hosts.survey()
        command = ["doctor", "-f", str(hosts.file), "--tls-dir", str(hosts.me)]
        assert await asyncio.to_thread(main, command) == 1
        assert "* 127.0.0.3 does not answer at 127.0.0.3:" in capsys.readouterr().out
    assert len(problems) == 1, problems
    assert problems[0].startswith(f"127.0.0.3 does not answer at 127.0.0.3:{hosts.ports[2]} (")
    assert "run `stageline doctor --serve 127.0.0.3 -f FILE` there" in problems[0]
    measured = ways(found)
    assert not measured["gpu-a", "coordinator"].problem
    assert measured["gpu-a", "gpu-b"].problem


async def test_a_host_that_ends_meanwhile_is_no_hang(hosts: Hosts) -> None:
    async with hosts.agent(HOSTS[0]), hosts.agent(HOSTS[1]):
        async with hosts.agent(HOSTS[2]) as lost:
            asking = asyncio.create_task(hosts.survey())
            await _called(hosts.places[2], hosts)
            await lost.stop()
        _, problems = await asking
    assert any("gpu-b" in problem or HOSTS[2] in problem for problem in problems), problems


async def _called(place: Place, hosts: Hosts) -> None:
    """Wait until an agent answers."""
    async with hosts.transport.channel(str(place.reached)) as channel:
        stub = doctor_pb2_grpc.DoctorServiceStub(channel)
        await stub.GetFacts(doctor_pb2.GetFactsRequest(), timeout=DEADLINE_S, wait_for_ready=True)


def test_this_host_is_checked_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json", str(tmp_path / "new")])
    shown = json.loads(capsys.readouterr().out)
    assert code == (1 if shown["problems"] else 0)
    assert str(tmp_path / "new") in [disk["path"] for disk in shown["host"]["disks"]]
    (tmp_path / "file").write_text("")
    assert main(["doctor", str(tmp_path / "file" / "below")]) == 1
    assert f"cannot be written: {tmp_path}/file is not a directory" in capsys.readouterr().out


def test_an_agent_without_any_port_is_one_line(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.3", int(hosts.ports[2]))):
        assert main(["doctor", "--serve", "gpu-b", "-f", str(hosts.file)]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith(f"stageline: error[OS_ERROR]: cannot listen on 127.0.0.3:{hosts.ports[2]}: ")
    assert errors.count("\n") == 1


async def test_a_cluster_that_runs_is_named(hosts: Hosts) -> None:
    async with mock_cluster(1) as cluster:
        file = hosts.file.with_name("running.yaml")
        listen = f'{{listen: "{cluster.address}", http: "off"}}'
        file.write_text(f"coordinator: {listen}\ngateways: []\nworkers: [{{name: w}}]\n")
        places = places_of(read_cluster_spec(file))
        found = await survey(places, Transport())
    problems = problems_of_survey(found, places)
    assert len(problems) == 1 and "another Stageline process listens there" in problems[0], problems


async def test_without_hosts_this_host_is_checked_for_all_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address, port = unused_address(), unused_address().rpartition(":")[2]
    file = tmp_path / "cluster.yaml"
    file.write_text(
        f'coordinator: {{listen: "{address}", http: "127.0.0.1:{port}"}}\ngateways: []\n'
        "workers: [{name: w, memory: 1000TiB}]\n"
    )
    command = ["doctor", "-f", str(file)]
    with socket.create_server(("127.0.0.1", int(port))):
        assert await asyncio.to_thread(main, [*command, "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert {found["address"] for found in shown["host"]["ports"]} == {address, f"127.0.0.1:{port}"}
    total = format_size(psutil.virtual_memory().total)
    memory = f"localhost: w asks for 1000.0 TiB of {total} that the host has"
    assert any(problem.startswith(memory) for problem in shown["problems"]), shown["problems"]
    in_use = f"localhost: coordinator cannot listen on 127.0.0.1:{port} (dashboard): another process listens"
    assert any(problem.startswith(in_use) for problem in shown["problems"]), shown["problems"]
    file.write_text(file.read_text() + f"security: {{tls-dir: {tmp_path}}}\n")
    assert await asyncio.to_thread(main, command) == 1
    assert f"* coordinator: {tmp_path}" in capsys.readouterr().out


async def test_only_operators_ask_and_only_for_processes_of_the_file(hosts: Hosts) -> None:
    async with hosts.agent(HOSTS[0]):
        address = str(hosts.places[0].reached)
        async with careless_channel(hosts.certificates.of("x", Role.CLIENT), address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await doctor_pb2_grpc.DoctorServiceStub(channel).GetFacts(doctor_pb2.GetFactsRequest())
        assert StatusDetails.of(refused.value).reason == "ACCESS_DENIED"
        async with hosts.transport.channel(address) as channel:
            request = doctor_pb2.MeasureRequest(process="169.254.169.254:80")
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await doctor_pb2_grpc.DoctorServiceStub(channel).Measure(request)
        assert unknown.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_wrong_command_lines_exit_with_2(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    client = hosts.certificates.of("someone", Role.CLIENT)
    file = ("-f", str(hosts.file))
    alone = hosts.file.with_name("alone.yaml")
    alone.write_text("workers: [{name: w}]\n")
    for line, problem in (
        (("--serve", "gpu-a"), "--serve answers for a host of a cluster file: give -f FILE"),
        (("--serve", "gpu-z", *file), "'gpu-z' is no host or process of the cluster file: 127.0.0.1"),
        (("--serve", "gpu-a", "--json", *file), "--serve prints no facts"),
        (("/tmp", *file), "directories are in the cluster file"),
        (("--serve", "w", "-f", str(alone)), "--serve and --tls-dir are for a file with hosts"),
        (file, "the cluster has certificates: give --tls-dir with one of an operator"),
        ((*file, "--tls-dir", str(client)), "--tls-dir is of client someone, must be of an operator"),
    ):
        assert main(["doctor", *line]) == 2
        assert problem in capsys.readouterr().err
