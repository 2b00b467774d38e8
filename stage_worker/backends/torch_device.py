"""Device selection, memory budget and device faults, as torch reports them."""

import gc

import psutil
import torch

from stage_worker.backends.contract import DeviceError
from stage_worker.config import MemoryTooLarge
from wire.errors import StepFaultKind

CUDA_SHARE = 0.9
CPU_SHARE = 0.5


def parse_device(text: str) -> torch.device:
    """The device behind "cpu", "cuda", "cuda:1". Raises ValueError when this machine does not have it."""
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ValueError(f"device {text!r} is not known") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(f"device {text!r} is neither cpu nor cuda")
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= available:
        raise ValueError(
            f"device {text!r} is not here: this machine offers {available} CUDA devices to torch"
        )
    return torch.device("cuda", device.index or 0)


def check_memory(memory_bytes: int, device: torch.device) -> None:
    """Raises MemoryTooLarge."""
    total_bytes = total_memory_bytes(device)
    if memory_bytes > total_bytes:
        raise MemoryTooLarge(
            f"--memory is {memory_bytes} bytes ({memory_bytes / 2**30:.1f} GiB), device {device} has "
            f"{total_bytes} ({total_bytes / 2**30:.1f} GiB): pass less, or leave it out"
        )


def total_memory_bytes(device: torch.device) -> int:
    """Physical memory of the host for a CPU, of the device for a GPU; free or not."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def prepare_process(device: torch.device) -> None:
    """To be called once before anything computes on `device`.

    cuDNN's attention builds a plan for each shape, which takes 55 ms to 1 s, and a stage meets new shapes in
    nearly every step.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def prepare_thread(device: torch.device) -> None:
    """To be called on each thread that uses `device`: kernels that are not torch's go to the current one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def has_native_bf16(device: torch.device) -> bool:
    """Whether the device has bfloat16 arithmetic; without, torch computes it in float32 and rounds."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    has_onednn = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return has_onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def default_memory_bytes(device: torch.device) -> int:
    """90 % of the free memory of a GPU, 50 % of the RAM that is available now."""
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return int(free_bytes * CUDA_SHARE)
    return int(psutil.virtual_memory().available * CPU_SHARE)


def fault_kind_of(error: Exception, device: torch.device) -> StepFaultKind:
    """Whether `error` is one of memory, of the device, or of our own code.

    A GPU reports errors late, at any later call, and its context is then of no use to this process: every
    RuntimeError on a GPU counts as the device's, a wrong shape included. A CPU has no such state and fails by
    signals: a RuntimeError there is a defect of ours.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _is_failed_allocation(error):
        return StepFaultKind.OUT_OF_MEMORY
    if isinstance(error, DeviceError) or _is_accelerator_error(error):
        return StepFaultKind.DEVICE
    is_ours = isinstance(error, (NotImplementedError, RecursionError)) or not isinstance(error, RuntimeError)
    return StepFaultKind.INTERNAL if is_ours or device.type == "cpu" else StepFaultKind.DEVICE


def free_memory(device: torch.device) -> None:
    """Returns memory that torch has cached and nothing uses to the device."""
    gc.collect()
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def _is_failed_allocation(error: Exception) -> bool:
    """Of host memory, for which torch has no type of its own (c10/core/impl/alloc_cpu.cpp)."""
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _is_accelerator_error(error: Exception) -> bool:
    """torch 2.8 and later have a type for it; before, the text begins so."""
    kind = getattr(torch, "AcceleratorError", None)
    is_typed = kind is not None and isinstance(error, kind)
    return is_typed or (isinstance(error, RuntimeError) and str(error).startswith("CUDA error"))
