"""How much of this machine a local cluster may use."""

import os
from pathlib import Path

import psutil

_MEMORY_SHARE = 0.6
# Limit and use of the container that this process runs in: cgroup v2, then v1.
_CGROUP_FILES = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def memory_per_worker(num_workers: int) -> int:
    """An even share, in bytes, of 60 % of the memory that is available now."""
    return int(available_memory_bytes() * _MEMORY_SHARE) // num_workers


def threads_per_worker(num_workers: int) -> int:
    """An even share of the cores that this process may run on, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // num_workers)


def cpus_of_worker(worker: int, num_workers: int) -> tuple[int, ...] | None:
    """The share of worker 0, 1, ... as neighbouring CPUs; None where there are fewer CPUs than workers."""
    cpus, share = sorted(os.sched_getaffinity(0)), threads_per_worker(num_workers)
    if len(cpus) < num_workers:
        return None
    return tuple(cpus[worker * share : (worker + 1) * share])


def available_memory_bytes() -> int:
    """What can be allocated without swapping: of the machine, or of the container where that is less."""
    available = int(psutil.virtual_memory().available)
    for limit_file, usage_file in _CGROUP_FILES:
        limit, usage = _read_number(limit_file), _read_number(usage_file)
        if limit is not None and usage is not None:
            return max(0, min(available, limit - usage))
    return available


def _read_number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit
