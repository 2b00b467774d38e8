"""Times of a device, by its events; by the clock on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def synchronize(device: torch.device) -> None:
    """Wait until the device has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, *, rounds: int, repeats: int = 1) -> float:
    """Median seconds of one call of `work`, over `rounds` of `repeats` calls one after another."""
    work()
    synchronize(device)
    return statistics.median(_round_s(work, device, repeats) / repeats for _ in range(rounds))


def _round_s(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    if device.type != "cuda":
        began_s = time.perf_counter()
        for _ in range(repeats):
            work()
        return time.perf_counter() - began_s
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def host_seconds_of(work: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Seconds that the host needs for one call of `work`, which the device has not computed then."""
    work()
    synchronize(device)
    began_s = time.perf_counter()
    for _ in range(repeats):
        work()
    took_s = time.perf_counter() - began_s
    synchronize(device)
    return took_s / repeats
