"""One worker per GPU: their settings, and a process that keeps them running."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deploy import gpu_workers
from deploy.gpu_workers import GpuWorkers, worker_configs
from stage_worker.backends.gpu_choice import ListedGpu
from stage_worker.config import ALL_GPUS, WorkerConfig
from stageline.cli.config_flags import flags_of
from telemetry.logs import LogSettings
from telemetry.service_manager import NotifySettings
from wire.exit_codes import ExitCode
from wire.transport import TransportSettings

GPUS = [
    ListedGpu(index=index, uuid=f"GPU-{index}", free_bytes=80 << 30, total_bytes=80 << 30) for index in (0, 2)
]
DEADLINE_S = 30.0
FAKE = """
import signal, sys, time
name, folder = sys.argv[1:]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with open(f"{folder}/{name}", "a") as file:
    import os; file.write(f"{os.getpid()}\\n")
while True:
    time.sleep(1)
"""


def test_every_gpu_has_a_worker_with_ports_and_certificates_of_its_own() -> None:
    config = WorkerConfig(
        name="host",
        device=ALL_GPUS,
        listen="10.0.0.2:7500",
        health_listen="0.0.0.0:7600",
        payload_listen="off",
        memory_bytes=20 << 30,
        weights_directory=Path("/data/weights"),
        transport=TransportSettings(tls_directory=Path("/tls")),
        logs=LogSettings(audit_log=Path("/logs/audit.jsonl")),
    )
    first, third = worker_configs(config, GPUS).items()
    assert [first[0], third[0]] == ["host-0", "host-2"]
    for name, made, port in ((*first, 7500), (*third, 7502)):
        expected = replace(
            config,
            name=name,
            device=f"cuda:{name[-1]}",
            listen=f"10.0.0.2:{port}",
            health_listen=f"0.0.0.0:{port + 100}",
            weights_directory=Path("/data/weights") / name,
            transport=TransportSettings(tls_directory=Path("/tls") / name),
            logs=LogSettings(audit_log=Path(f"/logs/audit-{name}.jsonl")),
        )
        assert made == expected
        assert "cuda:all" not in flags_of(made)


def test_a_free_port_stays_free_and_a_host_gives_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-host")
    found = worker_configs(WorkerConfig(device=ALL_GPUS, listen="127.0.0.1:0"), GPUS)
    assert {name: config.listen for name, config in found.items()} == {
        "gpu-host-0": "127.0.0.1:0",
        "gpu-host-2": "127.0.0.1:0",
    }


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder in which each fake worker writes its process id."""
    program = tmp_path / "fake.py"
    program.write_text(FAKE)
    monkeypatch.setattr(gpu_workers, "_STAGELINE", (sys.executable, str(program)))
    folder = tmp_path / "started"
    folder.mkdir()
    return folder


async def pids(folder: Path, name: str, *, count: int) -> list[int]:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            file = folder / name
            found = file.read_text().split() if file.exists() else []
            if len(found) >= count:
                return [int(pid) for pid in found]
            await asyncio.sleep(0.02)


async def test_a_killed_worker_starts_again_beside_the_others_and_sigterm_ends_all(started: Path) -> None:
    workers = GpuWorkers({name: (name, str(started)) for name in ("host-0", "host-1")})
    running = asyncio.create_task(workers.run())
    (killed,), (other,) = await pids(started, "host-0", count=1), await pids(started, "host-1", count=1)
    os.kill(killed, signal.SIGKILL)
    assert (await pids(started, "host-0", count=2))[1] != killed
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, DEADLINE_S) == ExitCode.DONE
    assert await pids(started, "host-1", count=1) == [other]
    with pytest.raises(ProcessLookupError):
        os.kill(other, 0)


async def test_a_stop_reaches_workers_that_are_being_started(started: Path) -> None:
    running = asyncio.create_task(GpuWorkers({"host-0": ("host-0", str(started))}).run())
    await asyncio.sleep(0)  # the handler is there, the process is not
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, DEADLINE_S)


async def test_a_stop_ends_the_wait_before_a_restart(
    started: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("deploy.process.FIRST_DELAY_S", 10 * DEADLINE_S)
    monkeypatch.setattr("deploy.process.MAX_DELAY_S", 10 * DEADLINE_S)
    running = asyncio.create_task(GpuWorkers({"host-0": ("host-0", str(started))}).run())
    (killed,) = await pids(started, "host-0", count=1)
    os.kill(killed, signal.SIGKILL)
    async with asyncio.timeout(DEADLINE_S):
        while "starting again" not in caplog.text:
            await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, DEADLINE_S) == ExitCode.DONE


async def test_a_service_manager_hears_of_one_service(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = str(started.parent / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.setblocking(False)
        loop = asyncio.get_running_loop()
        workers = GpuWorkers(
            {name: (name, str(started)) for name in ("host-0", "host-1")}, NotifySettings(socket=address)
        )
        running = asyncio.create_task(workers.run())
        text = ""
        async with asyncio.timeout(DEADLINE_S):
            while "READY=1\nSTATUS=2 of 2 workers run" not in text:
                text += (await loop.sock_recv(manager, 4096)).decode()
        (first,) = await pids(started, "host-0", count=1)
        await pids(started, "host-1", count=1)
        environment = Path(f"/proc/{first}/environ").read_bytes()
        assert b"NOTIFY_SOCKET" not in environment
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(running, DEADLINE_S) == ExitCode.DONE


async def test_wrong_settings_are_not_tried_again(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_workers, "_STAGELINE", (sys.executable, "-c", "raise SystemExit(2)"))
    code = await asyncio.wait_for(GpuWorkers({"host-0": (), "host-1": ()}).run(), DEADLINE_S)
    assert code == ExitCode.USAGE
