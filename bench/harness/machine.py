"""Machine of the figures, and its use by other processes."""

from __future__ import annotations

import os
import platform
import resource
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import psutil

_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Hardware and versions, without names of the host."""

    processor: str
    cores: int
    memory_gib: int
    matrix_units: str
    python: str
    torch: str
    grpc: str

    @classmethod
    def here(cls) -> Self:
        return cls(
            processor=_processor(),
            cores=len(os.sched_getaffinity(0)),
            memory_gib=round(psutil.virtual_memory().total / 2**30),
            matrix_units=_matrix_units(),
            python=platform.python_version(),
            torch=version("torch"),
            grpc=version("grpcio"),
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.cores} cores of {self.processor} ({self.matrix_units}), {self.memory_gib} GiB; "
            f"Python {self.python}, torch {self.torch}, grpcio {self.grpc}"
        )


def _processor() -> str:
    return _cpu_line("model name") or platform.processor() or platform.machine()


def _matrix_units() -> str:
    flags = (_cpu_line("flags") or "").split()
    found = [flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in flags]
    return ", ".join(found) or "unknown vector units"


def _cpu_line(key: str) -> str | None:
    if not _CPU_INFO.exists():
        return None
    lines = (line.partition(":") for line in _CPU_INFO.read_text().splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == key), None)


MIN_NEIGHBOUR_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A process of others and its share of all cores' time, 0 to 1."""

    name: str
    share: float


class ForeignLoad:
    """Share of the processors used by others: all busy time but of this process and its children.

    Children count once they were waited for, so `share` is right after all of them have ended. Over less than
    a second it is taken as 0: the kernel counts in ticks.
    """

    def __init__(self) -> None:
        self._start = _snapshot()
        self._cpu_s = _foreign_cpu_s()

    def share(self) -> float:
        """Share of all cores' time since the beginning, 0 to 1."""
        now_s, busy_s, own_s = _snapshot()
        started_s, busy_then_s, own_then_s = self._start
        if now_s - started_s < 1:
            return 0.0
        foreign_s = (busy_s - busy_then_s) - (own_s - own_then_s)
        return min(1.0, max(0.0, foreign_s / ((now_s - started_s) * (psutil.cpu_count() or 1))))

    def neighbours(self) -> tuple[Neighbour, ...]:
        """Running processes of others with at least 1 % of all cores' time since the beginning, busiest
        first.
        """
        duration_s = time.monotonic() - self._start[0]
        if duration_s < 1:
            return ()
        total_s = duration_s * (psutil.cpu_count() or 1)
        found = [
            Neighbour(name, (cpu_s - self._cpu_s.get((process, name), 0.0)) / total_s)
            for (process, name), cpu_s in _foreign_cpu_s().items()
        ]
        busy = [neighbour for neighbour in found if neighbour.share >= MIN_NEIGHBOUR_SHARE]
        return tuple(sorted(busy, key=lambda neighbour: -neighbour.share))


def _foreign_cpu_s() -> dict[tuple[tuple[int, float], str], float]:
    """CPU seconds of each process but this one and its children, by (pid, start) and name."""
    this = psutil.Process()
    own = {this.pid, *(child.pid for child in this.children(recursive=True))}
    found = {}
    for process in psutil.process_iter(["pid", "create_time", "name", "cpu_times"]):
        facts = process.info
        if facts["pid"] not in own and facts["cpu_times"] is not None:
            times = facts["cpu_times"]
            found[(facts["pid"], facts["create_time"]), facts["name"]] = times.user + times.system
    return found


def _snapshot() -> tuple[float, float, float]:
    times = psutil.cpu_times()
    busy_s = sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.monotonic(), busy_s, sum(counted.ru_utime + counted.ru_stime for counted in usage)
