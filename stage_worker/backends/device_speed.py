"""Measures how fast a device copies memory and multiplies matrices, before a stage exists."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from stage_worker.backends.torch_device import has_fast_f16, has_native_bf16
from wire.device_rates import DeviceRates

BUDGET_S = 0.3
"""Of each measurement, after its first run, which loads libraries."""
_COPIED_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Above all caches, and a copy reads and writes as much."""
_PRODUCT_SIZE = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of both factors."""


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
    budget_s: float = BUDGET_S,
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
