"""Configuration of a stage worker."""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from stage_worker.backends.contract import KernelChoice
from stage_worker.backends.mock_spec import MockSpec
from telemetry.logs import DEFAULT_LOGS, LogSettings
from telemetry.settings import NO_SETTINGS, TelemetrySettings
from wire.addresses import parse_address, parse_peer_address
from wire.tensors import WireDType

_PART = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)


def parse_cpu_set(text: str) -> tuple[int, ...]:
    """The CPUs of a list such as 0-3,8, in order. Raises ValueError for anything else."""
    cpus: set[int] = set()
    for part in text.split(","):
        found = _PART.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise ValueError(f"CPU set {text!r} is not a list of numbers and ranges such as 0-3,8")
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def check_cpu_set(cpus: tuple[int, ...]) -> None:
    """Raises ValueError, with the numbers, for CPUs that this process may not run on or that do not exist."""
    allowed = os.sched_getaffinity(0)
    missing = [cpu for cpu in cpus if cpu not in allowed]
    if missing or not cpus:
        raise ValueError(
            f"CPUs {_listed(missing)} are not among those this process may use: {_listed(allowed)}"
        )


def pin_to(cpus: tuple[int, ...]) -> None:
    """Keeps this thread, and all that it starts from here on, on `cpus`."""
    os.sched_setaffinity(0, cpus)


def _listed(cpus: "set[int] | list[int]") -> str:
    return ",".join(map(str, sorted(cpus)))


_DEVICE = re.compile(r"cpu|cuda(:\d+)?", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)


class MemoryTooLarge(ValueError):
    """`memory_bytes` is more than the device has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """Validated when it is made; raises ValueError with the numbers.

    `None` stands for: what the device has to spare (`memory_bytes`), a name of host and device (`name`),
    any free port where the coordinator is reached from (`listen`), where it listens (`advertise`), the path
    that the coordinator names (`model_directory`), every CPU that the process may use (`cpu_set`), one thread
    for each of `cpu_set`, or torch's own choice without one (`num_threads`), a real stage (`mock`), and what
    the coordinator wants hidden states to be sent in (`wire_dtype`). A mock stage has neither model nor
    device nor threads. Hashes of weights are kept in `cache_directory`, if given. `telemetry` is what
    OpenTelemetry's variables say. A step that still computes `step_timeout_s` after the coordinator has given
    it up ends the process.
    """

    coordinator: str
    device: str
    memory_bytes: int | None
    name: str | None
    listen: str | None
    advertise: str | None
    model_directory: Path | None
    num_threads: int | None
    cpu_set: tuple[int, ...] | None = None
    mock: MockSpec | None = None
    wire_dtype: WireDType | None = None
    kernels: KernelChoice = KernelChoice.AUTO
    cache_directory: Path | None = None
    step_timeout_s: float = 30.0
    telemetry: TelemetrySettings = NO_SETTINGS
    logs: LogSettings = DEFAULT_LOGS

    def __post_init__(self) -> None:
        parse_peer_address(self.coordinator)
        if not _DEVICE.fullmatch(self.device):
            raise ValueError(f"device {self.device!r} is none of cpu, cuda, cuda:0, cuda:1, ...")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ValueError(f"memory_bytes is {self.memory_bytes}, but must be at least 1")
        if self.name is not None and not _NAME.fullmatch(self.name):
            raise ValueError(f"name {self.name!r} is not 1 to 63 letters, digits, '.', '_' or '-'")
        if self.listen is not None:
            parse_address(self.listen)
        if self.advertise is not None:
            parse_peer_address(self.advertise)
        if self.mock is not None:
            self._check_mock()
        if not 0 < self.step_timeout_s < math.inf:
            raise ValueError(f"step_timeout_s is {self.step_timeout_s:g}, must be positive and finite")
        if self.num_threads is not None and self.num_threads < 1:
            raise ValueError(f"num_threads is {self.num_threads}, but must be at least 1")
        if self.cpu_set is not None:
            check_cpu_set(self.cpu_set)

    @property
    def compute_threads(self) -> int | None:
        """Threads of torch inside one operation; None for torch's own choice."""
        if self.num_threads is None and self.cpu_set is not None:
            return len(self.cpu_set)
        return self.num_threads

    def _check_mock(self) -> None:
        given = [
            flag
            for flag, is_given in (
                ("--model", self.model_directory is not None),
                ("--device", self.device != "cpu"),
                ("--threads", self.num_threads is not None),
                ("--cpu-set", self.cpu_set is not None),
                ("--kernels", self.kernels is not KernelChoice.AUTO),
            )
            if is_given
        ]
        if given:
            raise ValueError(f"a mock stage computes nothing: --mock does not go with {' and '.join(given)}")
