"""Device selection, memory budget, rates and device faults with torch."""

import contextlib
import ctypes
import gc
import logging
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from stage_worker.backends.contract import DeviceError
from stage_worker.backends.gpu_choice import GPU_ADVICE
from stage_worker.config import MemoryTooLarge, parse_cpu_set, pin_to
from wire.device_rates import DeviceRates
from wire.errors import StepFaultKind
from wire.gpu import DeviceMemory, Gpu
from wire.host_memory import available_memory_bytes

log = logging.getLogger(__name__)

CUDA_SHARE = 0.9
CPU_SHARE = 0.5
TABLE_SHARE = 0.9
PCI_DEVICES = Path("/sys/bus/pci/devices")
_PCI_FIELDS = ("pci_domain_id", "pci_bus_id", "pci_device_id")
RATE_BUDGET_S = 0.3
"""Of each measurement of a rate, after its first run, which loads libraries."""
_COPIED_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Above all caches, and a copy reads and writes as much."""
_PRODUCT_SIZE = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of both factors."""
_DRIVER_FILES = {
    Path("/proc/driver/nvidia/version"): re.compile(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s"),
    Path("/sys/module/amdgpu/version"): re.compile(r"(\S+)"),
}


def parse_device(text: str) -> torch.device:
    """Parse "cpu", "cuda" or "cuda:1". Raises ValueError for a device that this host lacks."""
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ValueError(f"unknown device {text!r}") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(f"device {text!r} is neither cpu nor cuda")
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= available:
        raise ValueError(f"device {text!r} not found: torch sees {available} CUDA devices; {GPU_ADVICE}")
    return torch.device("cuda", device.index or 0)


def check_memory(memory_bytes: int, device: torch.device) -> None:
    """Compare a budget with the free memory of a GPU, or all memory of a host, where free memory returns.

    Raises MemoryTooLarge.
    """
    if device.type == "cuda":
        limit_bytes, total_bytes = torch.cuda.mem_get_info(device)
        limit = f"{limit_bytes} ({_gib(limit_bytes)}) of {total_bytes} free: other processes use the rest"
    else:
        limit_bytes = int(psutil.virtual_memory().total)
        limit = f"{limit_bytes} ({_gib(limit_bytes)})"
    if memory_bytes > limit_bytes:
        raise MemoryTooLarge(
            f"--memory is {memory_bytes} bytes ({_gib(memory_bytes)}), device {device} has {limit}: "
            "lower --memory or omit it"
        )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


def describe_gpu(device: torch.device) -> Gpu:
    """Describe a GPU of CUDA or ROCm."""
    properties = torch.cuda.get_device_properties(device)
    architecture = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    return Gpu(
        model=properties.name,
        uuid=f"GPU-{properties.uuid}" if hasattr(properties, "uuid") else "",
        compute_capability=architecture or f"{properties.major}.{properties.minor}",
        memory_bytes=int(properties.total_memory),
        driver=_driver_version(),
    )


def _driver_version() -> str:
    """The version of the kernel driver, empty where it does not say."""
    for file, pattern in _DRIVER_FILES.items():
        with contextlib.suppress(OSError):
            if match := pattern.search(file.read_text()):
                return match[1]
    return ""


def near_cpus(device: torch.device) -> tuple[int, ...] | None:
    """CPUs of the GPU's NUMA node which this process may use; None if the system does not say."""
    properties = torch.cuda.get_device_properties(device)
    if not all(hasattr(properties, name) for name in _PCI_FIELDS):
        return None
    domain, bus, slot = (getattr(properties, name) for name in _PCI_FIELDS)
    file = PCI_DEVICES / f"{domain:04x}:{bus:02x}:{slot:02x}.0" / "local_cpulist"
    try:
        near = parse_cpu_set(file.read_text().strip())
    except (OSError, ValueError):
        return None
    allowed = os.sched_getaffinity(0)
    return tuple(cpu for cpu in near if cpu in allowed) or None


def prepare_process(device: torch.device) -> None:
    """Configure torch, once, before the first computation on `device`.

    Disables cuDNN's attention: it builds a plan for each shape in 55 ms to 1 s, and nearly every step has
    new shapes.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def move_near(device: torch.device) -> None:
    """Keep this thread, and all that it starts, on the CPUs near a GPU: copies through another NUMA node
    are slower.
    """
    if device.type == "cuda" and (cpus := near_cpus(device)) is not None:
        pin_to(cpus)
        log.info("using CPUs %s near %s", ",".join(map(str, cpus)), device)


def prepare_thread(device: torch.device) -> None:
    """Select `device` on this thread, as kernels outside torch need; once per thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def has_native_bf16(device: torch.device) -> bool:
    """Whether the device has bfloat16 arithmetic; otherwise torch computes in float32 and rounds."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    has_onednn = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return has_onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_fast_f16(device: torch.device) -> bool:
    """Whether float16 is faster than float32; torch sums its products in float32 on a GPU."""
    return device.type == "cuda"


def default_memory_bytes(device: torch.device) -> int:
    """90 % of the free memory of a GPU, 50 % of the available RAM."""
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return int(free_bytes * CUDA_SHARE)
    return int(available_memory_bytes() * CPU_SHARE)


def table_memory_bytes(device: torch.device) -> int:
    """Memory of a GPU's host for tables that the GPU reads there, 90 % of the available RAM; 0 for a CPU,
    whose budget has them.
    """
    return int(available_memory_bytes() * TABLE_SHARE) if device.type == "cuda" else 0


class DeviceMeter(ABC):
    """Reads the memory of a device."""

    @abstractmethod
    def read(self) -> DeviceMemory:
        """Its memory now."""

    @abstractmethod
    def restart_peak(self) -> None:
        """Let the peak begin with what is allocated now."""


class CudaMeter(DeviceMeter):
    """Of this process, by torch's allocator; free memory by the driver."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> DeviceMemory:
        return DeviceMemory(
            allocated_bytes=torch.cuda.memory_allocated(self._device),
            reserved_bytes=torch.cuda.memory_reserved(self._device),
            free_bytes=torch.cuda.mem_get_info(self._device)[0],
            peak_bytes=torch.cuda.max_memory_allocated(self._device),
        )

    def restart_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


def fault_kind_of(error: Exception, device: torch.device) -> StepFaultKind:
    """Classify `error`: out of memory, device, or internal.

    A GPU reports errors late, at any later call, and its context is then unusable in this process: every
    RuntimeError on a GPU counts as the device's, including a wrong shape. A CPU has no such state and
    fails by signals: a RuntimeError there is a defect of Stageline.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _is_failed_allocation(error):
        return StepFaultKind.OUT_OF_MEMORY
    if isinstance(error, DeviceError) or _is_accelerator_error(error):
        return StepFaultKind.DEVICE
    is_ours = isinstance(error, (NotImplementedError, RecursionError)) or not isinstance(error, RuntimeError)
    return StepFaultKind.INTERNAL if is_ours or device.type == "cpu" else StepFaultKind.DEVICE


def free_workspaces() -> None:
    """Give the workspaces of products back to torch's allocator, which otherwise keeps one for every stream
    that ever had a product: 32 MiB each on Hopper. The next product takes one again.
    """
    torch._C._cuda_clearCublasWorkspaces()


def free_memory(device: torch.device) -> None:
    """Return unused memory to the system: temporaries of a load otherwise stay between the weights."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)
    if device.type == "cuda":
        free_workspaces()
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # pinned memory; it has no other name before torch 2.13


def _is_failed_allocation(error: Exception) -> bool:
    """Match failed host allocations, for which torch has no type (c10/core/impl/alloc_cpu.cpp)."""
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _is_accelerator_error(error: Exception) -> bool:
    """Match CUDA errors: by type from torch 2.8 on, by text before."""
    kind = getattr(torch, "AcceleratorError", None)
    is_typed = kind is not None and isinstance(error, kind)
    return is_typed or (isinstance(error, RuntimeError) and str(error).startswith("CUDA error"))


def measure_rates(device: torch.device) -> DeviceRates:
    """Copy and multiply on `device` with the threads of the caller.

    Products are of bfloat16 where the device has it, else of float16 or float32. Raises errors of the device.
    """
    with torch.inference_mode():
        return DeviceRates(bytes_per_s=_copy_rate(device), operations_per_s=_product_rate(device))


def _copy_rate(device: torch.device) -> float:
    num_bytes = _COPIED_BYTES[device.type]
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return best_rate(lambda: target.copy_(source), _synchronize(device), amount=2.0 * num_bytes)


def _product_rate(device: torch.device) -> float:
    size = _PRODUCT_SIZE[device.type]
    left, right = (torch.ones(size, size, dtype=_dtype(device), device=device) for _ in range(2))
    product = torch.empty_like(left)
    return best_rate(lambda: torch.mm(left, right, out=product), _synchronize(device), amount=2.0 * size**3)


def _dtype(device: torch.device) -> torch.dtype:
    if has_native_bf16(device):
        return torch.bfloat16
    return torch.float16 if has_fast_f16(device) else torch.float32


def _synchronize(device: torch.device) -> Callable[[], None]:
    if device.type == "cpu":
        return lambda: None
    return lambda: torch.cuda.synchronize(device)


def best_rate(
    work: Callable[[], object],
    synchronize: Callable[[], None],
    *,
    amount: float,
    clock: Callable[[], float] = time.perf_counter,
    budget_s: float = RATE_BUDGET_S,
) -> float:
    """The amount per second of the fastest run, after a first one that does not count.

    Runs until `budget_s` has passed, but once at least: the others of a device or host only ever slow it.
    """
    work()
    synchronize()
    began = clock()
    fastest_s = float("inf")
    while True:
        started = clock()
        work()
        synchronize()
        ended = clock()
        fastest_s = min(fastest_s, ended - started)
        if ended - began >= budget_s:
            return amount / fastest_s
