"""The GPUs of this host, as a process of its own sees them, and the choice of a free one."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wire.sizes import format_size

log = logging.getLogger(__name__)

FREE_SHARE = 0.9
"""Of its memory, a GPU that no other process uses has more than this free: the driver keeps a little."""
_LIST_TIMEOUT_S = 120.0
# In a process of its own: asking a GPU for its free memory takes some 300 MB of it until the process ends.
_LIST = """\
import json, torch
names = ("index", "uuid", "free_bytes", "total_bytes")
found = []
for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
    uuid = f"GPU-{getattr(torch.cuda.get_device_properties(index), 'uuid', index)}"
    found.append(dict(zip(names, (index, uuid, *torch.cuda.mem_get_info(index)))))
print(json.dumps(found))
"""


class NoFreeGpu(ValueError):
    """No GPU can be chosen; the text has the reason and the numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedGpu:
    """A GPU by its number among those that this process may use."""

    index: int
    uuid: str
    free_bytes: int
    total_bytes: int

    @property
    def device(self) -> str:
        return f"cuda:{self.index}"

    @property
    def is_free(self) -> bool:
        """No other process uses it."""
        return self.free_bytes >= FREE_SHARE * self.total_bytes

    def __str__(self) -> str:
        return f"{self.device} has {format_size(self.free_bytes)} of {format_size(self.total_bytes)} free"


def list_gpus() -> list[ListedGpu]:
    """The GPUs of this host. Raises NoFreeGpu if there are none, or torch cannot tell."""
    try:
        listed = subprocess.run(
            (sys.executable, "-P", "-c", _LIST), capture_output=True, text=True, timeout=_LIST_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise NoFreeGpu(f"torch does not list the GPUs of this host within {_LIST_TIMEOUT_S:g} s") from None
    if listed.returncode != 0:
        reason = (listed.stderr.strip().splitlines() or [f"exit code {listed.returncode}"])[-1]
        raise NoFreeGpu(f"torch cannot list the GPUs of this host: {reason}")
    if not (gpus := [ListedGpu(**entry) for entry in json.loads(listed.stdout)]):
        raise NoFreeGpu("torch sees no GPU on this host: check driver and torch build, or use --device cpu")
    return gpus


class GpuClaims:
    """Claims of a worker on GPUs of this host: a locked file each, until `close` or the end of the process.

    Memory shows the use of a GPU only after a worker has loaded its layers.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: list[int] = []

    def claim(self, uuid: str) -> bool:
        """Claim a GPU. Returns False if another process has."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(self._directory / f"{uuid}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._files.append(file)
        return True

    def close(self) -> None:
        """Give all claims up. Idempotent."""
        while self._files:
            os.close(self._files.pop())


def choose_gpu(gpus: Sequence[ListedGpu], claims: GpuClaims | None) -> ListedGpu:
    """Claim the first free GPU. Raises NoFreeGpu with the free memory of each."""
    for gpu in gpus:
        if gpu.is_free and (claims is None or claims.claim(gpu.uuid)):
            log.info("--device auto chose %s: %s", gpu.device, gpu)
            return gpu
    used = (f"{gpu}, claimed by another worker" if gpu.is_free else str(gpu) for gpu in gpus)
    raise NoFreeGpu(f"no free GPU: {'; '.join(used)}: choose one with --device cuda:N")
