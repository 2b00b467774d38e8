"""Which CPUs a worker runs on."""

import os
import re

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
