"""The GPUs of this host, as the kernel and as a process of its own see them, and the choice of a free one."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wire.sizes import format_size

log = logging.getLogger(__name__)

FREE_SHARE = 0.9
"""Of its memory, a GPU that no other process uses has more than this free: the driver keeps a little."""
GPU_ADVICE = "check driver and torch build, or use --device cpu"
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
        raise NoFreeGpu(f"torch sees no GPU on this host: {GPU_ADVICE}")
    return gpus


_PCI_GPUS = {
    ("0x10de", "0x0300"): "NVIDIA",
    ("0x10de", "0x0302"): "NVIDIA",
    ("0x1002", "0x0302"): "AMD",
    ("0x1002", "0x0380"): "AMD",
    ("0x1002", "0x1200"): "AMD",
}
"""Makers by vendor and class of a PCI device. AMD's VGA controllers may be graphics of a CPU: only the
compute driver, which has `_KFD_NODES`, tells."""
_PROC_GPUS = "proc/driver/nvidia/gpus"
_PCI_DEVICES = "sys/bus/pci/devices"
_KFD, _KFD_NODES = "dev/kfd", "sys/class/kfd/kfd/topology/nodes"
_SMI_TIMEOUT_S = 5.0


def gpus_of_host(root: Path = Path("/")) -> str:
    """The GPUs that computation could use, such as "2 NVIDIA GPUs"; empty without any.

    Asks the kernel and nvidia-smi, not torch: a torch build for CPUs, and a process from which the GPUs are
    hidden, see none. May take seconds.
    """
    on_bus = Counter(filter(None, map(_pci_maker, _listed(root / _PCI_DEVICES))))
    found = {
        "NVIDIA": max(on_bus["NVIDIA"], len(_listed(root / _PROC_GPUS)), _num_device_files(root)),
        "AMD": max(on_bus["AMD"], _num_of_kfd(root)),
    }
    if not any(found.values()):
        found["NVIDIA"] = _num_of_smi()
    return " and ".join(
        f"{count} {maker} GPU{'s' if count > 1 else ''}" for maker, count in found.items() if count
    )


def warn_of_unused_gpus(root: Path = Path("/")) -> None:
    """Log a warning if this host has GPUs; for a worker that computes on the CPU."""
    if gpus := gpus_of_host(root):
        log.warning(
            "this worker computes on the CPU, much slower than on a GPU, and the host has %s: start it with "
            "--device auto to use a free one, or with --device cuda:all for a worker on each",
            gpus,
        )


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def _pci_maker(device: Path) -> str | None:
    return _PCI_GPUS.get((_text(device / "vendor"), _text(device / "class")[:6]))


def _num_device_files(root: Path) -> int:
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in _listed(root / "dev"))


def _num_of_kfd(root: Path) -> int:
    """Nodes of AMD's compute driver that are not CPUs; at least one where it names no nodes."""
    if not (root / _KFD).exists():
        return 0
    nodes = _listed(root / _KFD_NODES)
    return sum(_text(node / "gpu_id") not in ("", "0") for node in nodes) if nodes else 1


def _num_of_smi() -> int:
    """GPUs that nvidia-smi lists, which also works where the kernel shows no device, as in WSL."""
    if (program := shutil.which("nvidia-smi")) is None:
        return 0
    try:
        listed = subprocess.run((program, "-L"), capture_output=True, text=True, timeout=_SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.debug("nvidia-smi does not list GPUs: %s", error)
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


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
