"""The engine ray without Ray: processes that actors keep, and what is rejected before Ray is asked."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from signal import SIGTERM
from types import SimpleNamespace
from typing import Any

import pytest

from deploy import ClusterFailed
from deploy.commands import commands, read_cluster_spec
from deploy.engines import ray as engine
from deploy.engines.ray import KeptProcess, PlacedProcess, RayCluster
from deploy.spec.cluster_spec import ClusterSpec
from deploy.spec.document import WrongField
from stageline.cli import main
from tests.integration.calls import until
from tests.unit.deploy.cluster_files import HOSTS, LEAST, write

ENDS = """\
trap 'echo drained >> "$1"; exit 0' TERM
echo start >> "$1"
[ "$(wc -l < "$1")" -gt "$2" ] || exit "$3"
while :; do sleep 0.05; done
"""
"""Exits with $3 at its first $2 starts; then runs until SIGTERM."""


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Handlers of SIGTERM that processes would have set in this one."""
    found: list[Any] = []
    recorder = SimpleNamespace(SIGTERM=SIGTERM, signal=lambda number, handler: found.append(handler))
    monkeypatch.setattr(engine, "signal", recorder)
    monkeypatch.setattr(engine, "RESTART_DELAY_S", 0.01)
    return found


@pytest.fixture
def keep(tmp_path: Path, handlers: list[Any]) -> Callable[[int, int], KeptProcess]:
    (tmp_path / "ends.sh").write_text(ENDS)

    def kept(num_failures: int, code: int) -> KeptProcess:
        words = (str(tmp_path / "ends.sh"), str(tmp_path / "log"), str(num_failures), str(code))
        return KeptProcess("w", "node", "bash", words, {})

    return kept


async def test_a_process_that_fails_starts_again(keep: Callable[..., KeptProcess], tmp_path: Path) -> None:
    process = keep(2, 3)
    await until(lambda: process.state().num_starts == 3)
    await until(lambda: (tmp_path / "log").read_text() == "start\n" * 3)
    assert process.state() == PlacedProcess(name="w", node="node", num_starts=3)
    process.stop()
    assert (tmp_path / "log").read_text() == "start\n" * 3 + "drained\n"
    assert process.state().text == "exit code 0"


@pytest.mark.parametrize("code", [0, 2])
async def test_a_drained_process_and_wrong_settings_are_left_alone(
    keep: Callable[..., KeptProcess], code: int
) -> None:
    process = keep(1, code)
    await until(lambda: process.state().ended == f"exit code {code}")
    process.stop()
    assert process.state().num_starts == 1


async def test_sigterm_reaches_the_process_and_ends_the_actor(
    keep: Callable[..., KeptProcess], handlers: list[Any], tmp_path: Path
) -> None:
    process = keep(0, 0)
    await until(lambda: (tmp_path / "log").exists() and "start" in (tmp_path / "log").read_text())
    (handler,) = handlers
    with pytest.raises(SystemExit) as ended:
        handler(SIGTERM, None)
    assert ended.value.code == 1
    assert process.state().ended == "exit code 0"


def test_a_program_that_is_not_there_is_named_with_the_node(handlers: list[Any]) -> None:
    with pytest.raises(FileNotFoundError, match=r"program 'no-such-program' not found on 10\.0\.0\.2"):
        KeptProcess("w", "10.0.0.2", "no-such-program", (), {})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (HOSTS, "coordinator.host: Ray chooses the hosts of processes: remove the key"),
        (
            LEAST.replace("gpu-b, device: cuda:0", "gpu-b, device: cuda:1"),
            "workers[1].device: is cuda:1, but Ray chooses the GPU of a worker: write cuda",
        ),
    ],
)
def test_what_ray_chooses_is_rejected(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(WrongField) as rejected:
        RayCluster(read_cluster_spec(write(tmp_path, text)))
    assert str(rejected.value) == problem


def test_a_host_without_ray_is_told_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    importlib.invalidate_caches()
    with pytest.raises(ClusterFailed, match=r"needs Ray on this host: pip install 'ray>=2.50,<3'"):
        RayCluster(read_cluster_spec(write(tmp_path, LEAST)))


def test_ray_reserves_what_the_file_says_and_else_a_cpu_and_a_gpu(tmp_path: Path) -> None:
    spec = read_cluster_spec(write(tmp_path, LEAST))
    coordinator, gateway, worker, _ = commands(spec)
    assert engine._resources(coordinator) == engine._resources(gateway) == {"CPU": 0}
    assert engine._resources(worker) == {"CPU": 1, "GPU": 1}
    given = replace(worker.resources, cpus=8, gpus=0, memory_bytes=2**30)
    assert engine._resources(replace(worker, resources=given)) == {"CPU": 8, "memory": 2**30}


class ConnectedCluster:
    """Stands for a cluster on Ray, whose spec has the head's address."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = replace(spec, coordinator=replace(spec.coordinator, host="10.0.0.1"))

    def states(self) -> list[PlacedProcess]:
        print("a node is lost, as Ray tells")
        return [
            PlacedProcess(name="coordinator", node="10.0.0.1 (f66d10f2)", num_starts=1),
            PlacedProcess(name="gpu-a"),
        ]

    def close(self) -> None:
        """It has no connection."""


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_the_status_of_a_cluster_with_certificates_shows_its_processes(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stageline.cli.deploy.RayCluster", ConnectedCluster)
    file = write(tmp_path, LEAST + "security: {tls-dir: /etc/stageline/tls}\n")
    code = main(["deploy", "status", "ray", "-f", str(file), *more])
    output = capsys.readouterr()
    hint = "stageline status --coordinator 10.0.0.1:7480 --tls-dir DIR"
    assert "a node is lost" in output.err
    if more:
        assert (code, output.out) == (1, "")
        assert f"error[USAGE]: an operator's certificate is needed: run {hint} --json" in output.err
    else:
        assert code == 0
        assert output.out.splitlines() == [
            "coordinator  10.0.0.1 (f66d10f2)  runs, start 1",
            "gpu-a                             waits for a node",
            f"{hint} shows the plan, with an operator's certificate",
        ]
