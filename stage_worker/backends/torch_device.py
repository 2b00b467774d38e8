"""Device selection, memory budget and device faults with torch."""

import contextlib
import ctypes
import gc

import psutil
import torch

from stage_worker.backends.contract import DeviceError
from stage_worker.config import MemoryTooLarge
from wire.errors import StepFaultKind

CUDA_SHARE = 0.9
CPU_SHARE = 0.5


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
        raise ValueError(f"device {text!r} not found: torch sees {available} CUDA devices")
    return torch.device("cuda", device.index or 0)


def check_memory(memory_bytes: int, device: torch.device) -> None:
    total_bytes = total_memory_bytes(device)
    if memory_bytes > total_bytes:
        raise MemoryTooLarge(
            f"--memory is {memory_bytes} bytes ({memory_bytes / 2**30:.1f} GiB), device {device} has "
            f"{total_bytes} ({total_bytes / 2**30:.1f} GiB): lower --memory or omit it"
        )


def total_memory_bytes(device: torch.device) -> int:
    """Physical memory of the host for a CPU, of the device for a GPU, free or not."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def prepare_process(device: torch.device) -> None:
    """Configure torch, once, before the first computation on `device`.

    Disables cuDNN's attention: it builds a plan for each shape in 55 ms to 1 s, and nearly every step has
    new shapes.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


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


def default_memory_bytes(device: torch.device) -> int:
    """90 % of the free memory of a GPU, 50 % of the available RAM."""
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return int(free_bytes * CUDA_SHARE)
    return int(psutil.virtual_memory().available * CPU_SHARE)


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


def free_memory(device: torch.device) -> None:
    """Return unused memory to the system: temporaries of a load otherwise stay between the weights."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def _is_failed_allocation(error: Exception) -> bool:
    """Match failed host allocations, for which torch has no type (c10/core/impl/alloc_cpu.cpp)."""
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _is_accelerator_error(error: Exception) -> bool:
    """Match CUDA errors: by type from torch 2.8 on, by text before."""
    kind = getattr(torch, "AcceleratorError", None)
    is_typed = kind is not None and isinstance(error, kind)
    return is_typed or (isinstance(error, RuntimeError) and str(error).startswith("CUDA error"))
