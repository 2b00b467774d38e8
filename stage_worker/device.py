"""Which device a worker computes on, and how much of its memory it offers when nobody says."""

import psutil
import torch

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
