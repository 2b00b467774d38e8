"""`stageline deploy run|status|stop ENGINE`: which programs it runs, with stand-ins that log."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.engines import host_services
from stageline.cli import main
from tests.unit.deploy.cluster_files import HOSTS, JOB, LEAST, write

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts programs, the bodies of shell scripts, into the PATH; returns the log of their arguments."""
    programs, log = tmp_path / "programs", tmp_path / "log"
    programs.mkdir()
    log.touch()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(host_services, "UNIT_DIRECTORY", tmp_path)
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-b")

    def put(**bodies: str) -> Path:
        for name, body in bodies.items():
            (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\n{body}\n')
            (programs / name).chmod(0o755)
        return log

    return put


def _deploy(action: str, engine: str, text: str, directory: Path) -> int:
    return main(["deploy", action, engine, "-f", str(write(directory, text))])


def test_systemd_installs_starts_shows_and_stops_the_units_of_this_host(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = install(systemctl="echo shown")
    assert _deploy("run", "systemd", HOSTS, tmp_path) == 0
    units = {path.stem for path in tmp_path.glob("*.service")}
    assert units == {"stories-spare", "stories-gpu-b"}
    assert _deploy("status", "systemd", HOSTS, tmp_path) == 0
    assert capsys.readouterr().out.endswith("shown\n")
    assert _deploy("stop", "systemd", HOSTS, tmp_path) == 0
    assert log.read_text().splitlines() == [
        "systemctl daemon-reload",
        "systemctl enable stories-spare stories-gpu-b",
        "systemctl start --no-block stories-spare stories-gpu-b",
        "systemctl list-units --all --plain --no-legend stories-spare.service stories-gpu-b.service",
        "systemctl disable --now stories-spare stories-gpu-b",
    ]


def test_systemd_restarts_the_units_that_a_changed_file_changes(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = install(systemctl="")
    assert _deploy("run", "systemd", HOSTS, tmp_path) == 0
    assert "restart" not in log.read_text()
    log.write_text("")
    capsys.readouterr()
    assert _deploy("run", "systemd", HOSTS.replace("threads: 64", "threads: 32"), tmp_path) == 0
    assert log.read_text().splitlines()[2:] == [
        "systemctl restart --no-block stories-spare",
        "systemctl start --no-block stories-spare stories-gpu-b",
    ]
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["stories-spare restarts with its new settings", "stories-gpu-b starts"]
    assert "--threads 32" in (tmp_path / "stories-spare.service").read_text()


def test_compose_starts_shows_and_stops_the_services_of_this_host(install: Install, tmp_path: Path) -> None:
    log = install(docker="cat > /dev/null")
    for action in ("run", "status", "stop"):
        assert _deploy(action, "compose", HOSTS, tmp_path) == 0
    (file,) = (tmp_path / "state").rglob("compose.yaml")
    assert "--name gpu-b" in file.read_text() and "--name gpu-a" not in file.read_text()
    compose = f"docker compose --file {file}"
    assert log.read_text().splitlines() == [
        f"{compose} up --detach",
        f"{compose} ps --all",
        f"{compose} down",
    ]


@pytest.mark.parametrize("action", ["status", "stop"])
def test_compose_asks_nothing_about_a_cluster_that_was_not_started(
    action: str, install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = install(docker="")
    assert _deploy(action, "compose", HOSTS, tmp_path) == 1
    assert "cluster stories was not started by this user" in capsys.readouterr().err
    assert not log.read_text()


def test_a_host_is_known_by_its_addresses_too(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(systemctl="")
    monkeypatch.setattr(socket, "gethostname", lambda: "laptop")
    assert _deploy("run", "systemd", HOSTS.replace("host: gpu-a", "host: 127.0.0.1"), tmp_path) == 0
    assert [path.stem for path in tmp_path.glob("*.service")] == ["stories-gpu-a"]


def test_kubernetes_installs_shows_and_removes_a_release(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = install(helm='test "$1" = uninstall || ls "$5"', kubectl="echo pods")
    for action in ("run", "status", "stop"):
        assert _deploy(action, "kubernetes", LEAST + "security: {insecure: true}\n", tmp_path) == 0
    printed = capsys.readouterr().out.splitlines()
    assert {"Chart.yaml", "values.yaml", "templates"} <= set(printed)
    upgrade, *others = log.read_text().splitlines()
    *words, chart = upgrade.split()
    assert words == ["helm", "upgrade", "--install", "--reset-then-reuse-values", "stageline"]
    assert not Path(chart).exists()
    assert others == [
        "kubectl get pods --selector=app.kubernetes.io/instance=stageline --output=wide",
        "helm uninstall --wait --timeout=150s stageline",
    ]


def test_a_host_without_processes_is_named(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(systemctl="")
    monkeypatch.setattr(socket, "gethostname", lambda: "laptop")
    assert _deploy("run", "systemd", HOSTS, tmp_path) == 2
    assert "this host is 'laptop', the file has gpu-a, gpu-b, head" in capsys.readouterr().err


def test_slurm_submits_once_and_drains(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "running"
    queue = (
        f'case $* in *--steps*) echo "7.0 gpu-a n1" ;; *outside*) ;; *) cat {state} 2> /dev/null || : ;; esac'
    )
    log = install(
        squeue=queue,
        sbatch=f"cat > {tmp_path}/script; echo '7|RUNNING|n0|n[0-1]' > {state}; echo '7;cluster'",
        scancel=f"rm {state}",
    )
    assert _deploy("run", "slurm", JOB, tmp_path) == 0
    assert (tmp_path / "script").read_text().startswith("#!/bin/bash\n")
    assert _deploy("run", "slurm", JOB, tmp_path) == 1
    assert "cluster stageline runs already, as job 7" in capsys.readouterr().err
    assert _deploy("status", "slurm", JOB, tmp_path) == 0
    assert capsys.readouterr().out.splitlines() == [
        "job 7 RUNNING on n[0-1], coordinator at n0:7480",
        "7.0 gpu-a n1",
    ]
    assert _deploy("stop", "slurm", JOB, tmp_path) == 0
    assert "scancel --batch --signal=TERM 7" in log.read_text().splitlines()
    assert _deploy("stop", "slurm", JOB, tmp_path) == 1
    assert "cluster stageline has no job of this user" in capsys.readouterr().err


def test_a_pending_job_is_cancelled(install: Install, tmp_path: Path) -> None:
    state = tmp_path / "pending"
    state.write_text("7|PENDING||\n")
    log = install(squeue=f"cat {state} 2> /dev/null || :", scancel=f"rm {state}")
    assert _deploy("stop", "slurm", JOB, tmp_path) == 0
    assert "scancel 7" in log.read_text().splitlines()


def test_a_missing_or_failing_program_is_named(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(systemctl="echo cannot >&2; exit 3")
    assert _deploy("run", "systemd", LEAST, tmp_path) == 1
    assert "`systemctl daemon-reload` ended with exit code 3: cannot" in capsys.readouterr().err
    hinting = "printf 'cannot\\n\\nUsage: x\\n\\nRun x --help\\n' >&2; exit 3"
    install(systemctl=hinting)
    assert _deploy("run", "systemd", LEAST, tmp_path) == 1
    assert "`systemctl daemon-reload` ended with exit code 3: cannot" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _deploy("run", "systemd", LEAST, tmp_path) == 1
    assert "systemctl not found: run the command on a host that has it" in capsys.readouterr().err


def test_json_is_for_the_local_engine(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, JOB)
    assert main(["deploy", "status", "slurm", "--json", "-f", str(file)]) == 2
    assert "--json is for local and ray" in capsys.readouterr().err
