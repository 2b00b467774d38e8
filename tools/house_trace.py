"""Measures which functions run during a text request and after a worker's death, in all processes.

`tools/house.py` runs this script with the measured tree first on PYTHONPATH. It prints one JSON object: for
each window its length in seconds and its functions as [process, file, qualified name].

| window | from | to |
|---|---|---|
| `request` | call of `Client.generate` (built-in model, 2 stages, greedy) | last output |
| `request_idle` | the same cluster without requests | at least as long, and several heartbeats |
| `death` | `kill -9` of a worker of 2 mock stages with a spare | serving again, and nothing new runs |
| `death_idle` | the same cluster before that | about as long as `death` |
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stageline import Client

_PROBE = Path(__file__).resolve().with_name("house_probe.py")
_POLL_INTERVAL_S = 0.05
_QUIET_S = 3.0  # longer than a worker's lease, so that work after it is seen
_START_TIMEOUT_S = 180.0
_SWITCH_TIMEOUT_S = 20.0
_REAL_WORKER = ("--memory", "512MiB", "--threads", "1")
_MOCK_WORKER = ("--mock", "step=5ms")

Functions = set[tuple[str, str, str]]
"""Process (`coordinator`, `client`, name of a worker), file, qualified name."""


class Windows:
    """Opens and closes windows in all processes that run the probe of `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._opened_s = 0.0
        self.lengths_s: dict[str, float] = {}
        self.process_names = {os.getpid(): "client"}
        (directory / "control").write_text("")

    def open(self, window: str) -> None:
        """Open a window; returns when every process records."""
        self._switch(window)
        self._opened_s = time.monotonic()

    def close(self, window: str) -> None:
        """Close the window; returns when every process has written its functions."""
        self.lengths_s[window] = self.lengths_s.get(window, 0.0) + time.monotonic() - self._opened_s
        self._switch("")

    def functions(self, window: str) -> Functions:
        """Functions recorded by all processes so far."""
        found: Functions = set()
        for file in self._directory.glob(f"{window}.*"):
            if file.suffix != ".new":
                process = self.process_names.get(int(file.suffix[1:]), "other")
                for line in file.read_text().splitlines():
                    path, _, name = line.partition("\t")
                    found.add((process, path, name))
        return found

    def wait_until_quiet(self, window: str, timeout_s: float = 120.0) -> None:
        """Wait until no new function has run for `_QUIET_S`."""
        deadline_s = time.monotonic() + timeout_s
        num_functions, changed_s = -1, time.monotonic()
        while time.monotonic() - changed_s < _QUIET_S:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"window {window}: new functions still run after {timeout_s:g} s")
            if (num_now := len(self.functions(window))) != num_functions:
                num_functions, changed_s = num_now, time.monotonic()
            time.sleep(_POLL_INTERVAL_S)

    def _switch(self, window: str) -> None:
        control = self._directory / "control"
        control.with_suffix(".new").write_text(window)
        control.with_suffix(".new").replace(control)
        poll(lambda: not self._processes_not_in(window), _SWITCH_TIMEOUT_S, f"probes to enter {window!r}")

    def _processes_not_in(self, window: str) -> list[int]:
        states = {
            int(file.suffix[1:]): file.read_text()
            for file in self._directory.glob("state.*")
            if file.suffix != ".new"
        }
        return [pid for pid, state in states.items() if state != window and _is_running(pid)]


class Cluster:
    """A coordinator and workers, started with the command line of the measured tree."""

    def __init__(self, directory: Path, process_names: dict[int, str]) -> None:
        self._directory = directory
        self._process_names = process_names
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.address = f"127.0.0.1:{_free_port()}"

    def start_coordinator(self, *arguments: str) -> None:
        """Start a coordinator of two stages."""
        self._start(
            "coordinator", "coordinator", "--listen", self.address, "--stages", "2", "--no-http", *arguments
        )

    def start_worker(self, name: str, *arguments: str) -> None:
        """Start a worker that joins the coordinator."""
        self._start(name, "worker", "--coordinator", self.address, "--name", name, *arguments)

    def kill(self, name: str) -> None:
        """Send SIGKILL and wait for the exit."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def stop(self) -> None:
        """Kill every process."""
        for name in list(self._processes):
            self.kill(name)

    def wait_until_serving(self, *workers: str) -> None:
        """Wait until the cluster serves with these workers."""
        poll(lambda: self.is_serving(*workers), _START_TIMEOUT_S, "the cluster to serve")

    def is_serving(self, *workers: str) -> bool:
        """Whether the cluster serves with these workers. Raises RuntimeError if a process exited."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                log = (self._directory / f"{name}.log").read_text()
                raise RuntimeError(f"{name} ended with exit code {process.returncode}:\n{log}")
        environment = {
            name: value for name, value in os.environ.items() if name != "STAGELINE_TEST_HOUSE_PROBE"
        }
        command = [*_COMMAND, "status", "--json", "--coordinator", self.address]
        status = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=60)
        if status.returncode != 0:
            return False
        state = json.loads(status.stdout)["state"]
        return state == "CLUSTER_STATE_SERVING" and all(
            f'"{name}"'.encode() in status.stdout for name in workers
        )

    def _start(self, name: str, *arguments: str) -> None:
        with open(self._directory / f"{name}.log", "wb") as log:
            process = subprocess.Popen(
                [*_COMMAND, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        self._processes[name] = process
        self._process_names[process.pid] = name


_COMMAND = (sys.executable, "-P", "-m", "stageline")


def poll(is_done: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Wait until `is_done`. Raises TimeoutError with the name of the condition."""
    deadline_s = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {timeout_s:g} s for {what}")
        time.sleep(_POLL_INTERVAL_S)


@contextlib.contextmanager
def running_cluster(windows: Windows, directory: Path) -> Iterator[Cluster]:
    """A cluster whose processes are killed at the end of the block."""
    directory.mkdir()
    cluster = Cluster(directory, windows.process_names)
    try:
        yield cluster
    finally:
        cluster.stop()


def measure_request(windows: Windows, directory: Path) -> None:
    """Record one greedy text request, then an idle window."""
    with running_cluster(windows, directory) as cluster:
        cluster.start_coordinator()
        for name in ("worker-0", "worker-1"):
            cluster.start_worker(name, *_REAL_WORKER)
        cluster.wait_until_serving("worker-0", "worker-1")
        settle(windows)
        asyncio.run(_generate(windows, cluster.address))
        settle(windows)
        record_idle(windows, "request_idle", max(_QUIET_S, windows.lengths_s["request"]))


async def _generate(windows: Windows, address: str) -> None:
    async with Client(address) as client:
        windows.open("request")
        num_outputs = 0
        async for _ in client.generate("Once upon a time", temperature=0.0, max_tokens=16):
            num_outputs += 1
        windows.close("request")
    if num_outputs == 0:
        raise RuntimeError("the request has no output")


def measure_death(windows: Windows, directory: Path) -> None:
    """Record an idle window, then the loss of a worker that a spare replaces."""
    with running_cluster(windows, directory) as cluster:
        cluster.start_coordinator("--mock-model", "layers=4,vocab=1000")
        for name in ("worker-0", "worker-1"):
            cluster.start_worker(name, *_MOCK_WORKER)
        cluster.wait_until_serving("worker-0", "worker-1")
        cluster.start_worker("spare", *_MOCK_WORKER)
        cluster.wait_until_serving("spare")
        settle(windows)
        record_idle(windows, "death_idle", 2 * _QUIET_S)
        windows.open("death")
        cluster.kill("worker-1")
        windows.wait_until_quiet("death")
        windows.close("death")
        if not cluster.is_serving("spare"):
            raise RuntimeError("the cluster does not serve after the window of the death")


def settle(windows: Windows) -> None:
    """Wait for the work after a start or a request to end."""
    windows.open("settle")
    windows.wait_until_quiet("settle")
    windows.close("settle")


def record_idle(windows: Windows, window: str, length_s: float) -> None:
    """Record an idle cluster."""
    windows.open(window)
    time.sleep(length_s)
    windows.close(window)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end_on_sigterm() -> None:
    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def _start_probe(directory: Path, root: Path) -> None:
    """Run this script again with the probe on PYTHONPATH, to measure the client's process too."""
    shutil.copyfile(_PROBE, directory / "sitecustomize.py")
    (directory / "control").write_text("")
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        os.environ[name] = str(directory / name)
        (directory / name).mkdir()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(directory), os.environ["PYTHONPATH"]])
    os.environ |= {"STAGELINE_TEST_HOUSE_PROBE": str(directory), "STAGELINE_TEST_HOUSE_ROOT": f"{root}/"}
    subprocess.run([sys.executable, __file__, str(root)], check=True)


def _measure(directory: Path) -> dict[str, Any]:
    windows = Windows(directory)
    measure_request(windows, directory / "logs-request")
    measure_death(windows, directory / "logs-death")
    return {
        window: {"seconds": round(length_s, 3), "functions": sorted(windows.functions(window))}
        for window, length_s in windows.lengths_s.items()
        if window != "settle"
    }


def main() -> None:
    """Launcher at first, then the measured client."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, help="Top directory of the measured tree.")
    root = parser.parse_args().root.resolve()
    _end_on_sigterm()
    if "STAGELINE_TEST_HOUSE_PROBE" in os.environ:
        print(json.dumps(_measure(Path(os.environ["STAGELINE_TEST_HOUSE_PROBE"]))))
        return
    with tempfile.TemporaryDirectory(prefix="stageline-house-") as directory:
        _start_probe(Path(directory), root)


if __name__ == "__main__":
    main()
