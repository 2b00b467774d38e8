"""The process that runs a local cluster, found again by the name of the cluster."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from checkpoint.files import replace_file
from deploy import ClusterFailed

_POLL_INTERVAL_S = 0.05


class Launcher:
    """A file with the id and start time of the process; pids are used again, start times are not."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make the file while this process runs the cluster. Raises ClusterFailed if another one does."""
        if (other := self._process()) is not None:
            raise ClusterFailed(f"cluster {self._path.stem} runs already, started by process {other.pid}")
        directory = self._path.parent
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        entry = {"pid": os.getpid(), "started_s": psutil.Process().create_time()}
        replace_file(self._path, json.dumps(entry))
        try:
            yield
        finally:
            self._path.unlink(missing_ok=True)

    def stop(self, *, timeout_s: float) -> None:
        """Send SIGTERM and wait for the end. Raises ClusterFailed if nothing runs, or not in time."""
        process = self._process()
        if process is None:
            raise ClusterFailed(f"cluster {self._path.stem} is not running on this machine")
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while _is_running(process):
            if time.monotonic() > deadline:
                raise ClusterFailed(f"process {process.pid} still runs after {timeout_s:g} s")
            time.sleep(_POLL_INTERVAL_S)

    def _process(self) -> psutil.Process | None:
        try:
            entry = json.loads(self._path.read_text())
            pid, started_s = int(entry["pid"]), float(entry["started_s"])
            if pid <= 0:
                raise ValueError(f"pid {pid} is not positive")
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as error:
            raise ClusterFailed(f"{self._path} cannot be read: {error}: delete it") from None
        try:
            process = psutil.Process(pid)
            is_same = process.create_time() == started_s and _is_running(process)
            return process if is_same else None
        except psutil.NoSuchProcess:
            return None


def _is_running(process: psutil.Process) -> bool:
    """Whether it has not ended; its parent may not have asked for its exit code yet."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
