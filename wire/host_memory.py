"""Memory of the host, or of the container that a process runs in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """Files of a memory limit: the limit, what counts against it, and statistics of this."""

    limit: Path
    usage: Path
    statistics: Path

    @property
    def available_bytes(self) -> int | None:
        """What is left below the limit, with file pages that the kernel may drop; None without a limit."""
        limit, usage = _read_number(self.limit), _read_number(self.usage)
        return None if limit is None or usage is None else limit - usage + self._droppable_bytes()

    def _droppable_bytes(self) -> int:
        """File pages that were not used for a while, such as those of checkpoints that were read."""
        try:
            lines = self.statistics.read_text().splitlines()
        except OSError:
            return 0
        fields = dict(line.split(maxsplit=1) for line in lines)
        return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


_V2, _V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
CONTROL_GROUPS = (
    ControlGroup(_V2 / "memory.max", _V2 / "memory.current", _V2 / "memory.stat"),
    ControlGroup(_V1 / "memory.limit_in_bytes", _V1 / "memory.usage_in_bytes", _V1 / "memory.stat"),
)
"""Of the container that this process runs in: cgroup v2, then v1."""


def available_memory_bytes() -> int:
    """Memory that can be allocated without swapping: the machine's, or the container's if that is less."""
    available = int(psutil.virtual_memory().available)
    for group in CONTROL_GROUPS:
        if (left := group.available_bytes) is not None:
            return max(0, min(available, left))
    return available


def _read_number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit
