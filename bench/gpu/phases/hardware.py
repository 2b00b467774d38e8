"""Rates of the device and of its copies, and the cost of a launch: bounds of all other figures."""

from __future__ import annotations

import os

import torch

from bench.gpu import facts
from bench.gpu.model import dtype_of
from bench.gpu.phase import Recorder, needs_cuda
from bench.gpu.rates import Rates
from bench.gpu.timing import host_seconds_of, seconds_of, synchronize
from bench.harness.figure import Better

COPY_SIZES = {"8 KiB": 8 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
LARGEST_COPY = "16 MiB"
NUM_LAUNCHES = 200
CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu", "driver_version")


async def measure(recorder: Recorder) -> None:
    """Device, memory, products, copies, launches."""
    device = torch.device(recorder.order.device)
    recorder.facts(_device_name(device), facts.versions())
    _clocks(recorder)
    memory = _memory_rate(recorder, device)
    products = _product_rate(recorder, device)
    up = down = 0.0
    if device.type == "cuda":
        up, down = _copies(recorder, device)
        _launches(recorder, device)
    else:
        reason = needs_cuda(recorder.order)
        for name in COPY_SIZES:
            recorder.not_measured(f"copy of {name} to the device, pinned", "GB/s", reason)
        recorder.not_measured("eager launch", "us", reason, better=Better.LOWER)
        recorder.not_measured("graph launch", "us", reason, better=Better.LOWER)
    recorder.rates(Rates(memory=memory, products=products, up=up, down=down).as_json())


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _clocks(recorder: Recorder) -> None:
    values = facts.nvidia_smi(",".join(CLOCKS)) if recorder.order.is_cuda else []
    if len(values) != len(CLOCKS) or not values[0].isdigit():
        reason = "nvidia-smi does not tell it" if recorder.order.is_cuda else needs_cuda(recorder.order)
        recorder.not_measured("SM clock", "MHz", reason)
        return
    details = {name.replace(".", "_"): value for name, value in zip(CLOCKS, values, strict=True)}
    recorder.figure("SM clock", float(values[0]), "MHz", details=details)


def _memory_rate(recorder: Recorder, device: torch.device) -> float:
    """The higher of two rates: copies count reads and writes, sums read only, as most of a step does."""
    size_bytes = (16 << 20) if recorder.order.is_quick else (4 << 30)
    source = torch.zeros(size_bytes // 4, device=device)
    target = torch.empty_like(source)
    copy_s = seconds_of(lambda: target.copy_(source), device, rounds=5, repeats=2)
    read_s = seconds_of(source.sum, device, rounds=5, repeats=2)
    copied, read = 2 * size_bytes / copy_s, size_bytes / read_s
    recorder.figure("copy within the device, read and written", copied / 1e12, "TB/s")
    recorder.figure("reading the device's memory", read / 1e12, "TB/s")
    return max(copied, read)


def _product_rate(recorder: Recorder, device: torch.device) -> float:
    """Of square matrices, and of a prompt's gate and up products; the higher one."""
    dtype, rates = dtype_of(recorder.order.device), []
    shapes = [(256, 256, 256)] if recorder.order.is_quick else [(8192, 8192, 8192), (2048, 28672, 4096)]
    for rows, columns, inner in shapes:
        left = torch.randn((rows, inner), device=device).to(dtype)
        right = torch.randn((columns, inner), device=device).to(dtype)
        out = torch.empty((rows, columns), device=device, dtype=dtype)
        took_s = seconds_of(
            lambda left=left, right=right, out=out: torch.mm(left, right.t(), out=out),  # type: ignore[misc]
            device,
            rounds=5,
            repeats=10,
        )
        rates.append(2 * rows * columns * inner / took_s)
        name = f"product {rows} x {columns} x {inner}, {str(dtype).removeprefix('torch.')}"
        recorder.figure(name, rates[-1] / 1e12, "TFLOP/s")
    return max(rates)


def _copies(recorder: Recorder, device: torch.device) -> tuple[float, float]:
    """Rates up and down of the largest size from and to pinned memory."""
    largest = (0.0, 0.0)
    for name, size_bytes in COPY_SIZES.items():
        on_device = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        for kind, is_pinned in (("pinned", True), ("pageable", False)):
            on_host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=is_pinned)
            up_s = seconds_of(
                lambda there=on_device, here=on_host: there.copy_(here, non_blocking=True),  # type: ignore[misc]
                device,
                rounds=9,
            )
            down_s = seconds_of(
                lambda there=on_device, here=on_host: here.copy_(there, non_blocking=True),  # type: ignore[misc]
                device,
                rounds=9,
            )
            recorder.figure(f"copy of {name} to the device, {kind}", size_bytes / up_s / 1e9, "GB/s")
            recorder.figure(f"copy of {name} from the device, {kind}", size_bytes / down_s / 1e9, "GB/s")
            if is_pinned and name == LARGEST_COPY:
                largest = (size_bytes / up_s, size_bytes / down_s)
    return largest


def _launches(recorder: Recorder, device: torch.device) -> None:
    """Host time of a launch of one small kernel, and of a graph of 100 of them."""
    x = torch.zeros(1024, device=device)
    eager_s = host_seconds_of(lambda: x.add_(1.0), device, repeats=NUM_LAUNCHES)
    recorder.figure("eager launch", eager_s * 1e6, "us", better=Better.LOWER)
    graph = torch.cuda.CUDAGraph()
    synchronize(device)
    with torch.cuda.graph(graph):
        for _ in range(100):
            x.add_(1.0)
    graph_s = host_seconds_of(graph.replay, device, repeats=20)
    device_s = seconds_of(graph.replay, device, rounds=9)
    recorder.figure(
        "graph launch",
        graph_s * 1e6,
        "us",
        better=Better.LOWER,
        details={"us_per_kernel_on_device": device_s * 1e6 / 100, "cpus": str(os.cpu_count())},
    )
