"""What a GPU did during steps, from events of torch.profiler's trace. Pure.

The trace is Chrome's format: "X" events with begin `ts` and `dur` in microseconds. A kernel or copy has the
`correlation` of the call that launched it; a graph's kernels all have its launch's. A step is a range
with the name STEP on the launching thread, so what belongs to it is known however late it runs.
"""

from __future__ import annotations

import re
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

STEP = "bench step"
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ON_DEVICE = ("kernel", "gpu_memset", "gpu_memcpy")
ATTENTION = re.compile("attend_kernel|merge_kernel")
"""Names of the Triton kernels of attention."""
NUM_SLOWEST = 20
_SHORT_NAME = re.compile(r"(?:void )?(?:\w+::)*(\w+)")


@dataclass(slots=True)
class TracedStep:
    """Intervals (begin, end) in microseconds of one step's kernels, and counts of what it launched.

    `kernels` has the number of runs of each kernel and their microseconds, by its name.
    """

    computing_us: list[tuple[float, float]] = field(default_factory=list)
    attention_us: float = 0.0
    kernels: dict[str, tuple[int, float]] = field(default_factory=dict)
    num_kernels: int = 0
    num_launches: int = 0
    num_up: int = 0
    num_down: int = 0


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Medians over steps: time with a kernel running, idle time until the next step's first kernel, time in
    kernels of attention, and counts. `slowest` has the kernels with the most time, as text.
    """

    busy_us: float
    gap_us: float
    attention_us: float
    num_kernels: float
    num_launches: float
    num_up: float
    num_down: float
    slowest: str


def steps_of(events: Iterable[Mapping[str, Any]]) -> list[TracedStep]:
    """The steps of a trace, in order."""
    complete = [event for event in events if event.get("ph") == "X"]
    ranges = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in complete
        if event.get("name") == STEP and event.get("cat") == "user_annotation"
    )
    begins = [begin for begin, _ in ranges]
    steps = [TracedStep() for _ in ranges]
    by_launch: dict[int, TracedStep] = {}
    for event in complete:
        if event.get("cat") in _LAUNCHES and (found := _around(event, begins, ranges)) is not None:
            steps[found].num_launches += "Launch" in event["name"]
            by_launch[_correlation(event)] = steps[found]
    for event in complete:
        if event.get("cat") in _ON_DEVICE and (step := by_launch.get(_correlation(event))) is not None:
            _add(step, event)
    for step in steps:
        step.computing_us.sort()
    return steps


def device_use(steps: Sequence[TracedStep]) -> DeviceUse:
    """Medians. Raises ValueError for fewer than two steps with kernels."""
    ran = [step for step in steps if step.computing_us]
    if len(ran) < 2:
        raise ValueError(f"the trace has kernels of {len(ran)} steps, needed are 2")
    gaps = [
        max(0.0, after.computing_us[0][0] - max(end for _, end in before.computing_us))
        for before, after in pairwise(ran)
    ]
    return DeviceUse(
        busy_us=statistics.median(_union_us(step.computing_us) for step in ran),
        gap_us=statistics.median(gaps),
        attention_us=statistics.median(step.attention_us for step in ran),
        num_kernels=statistics.median(step.num_kernels for step in ran),
        num_launches=statistics.median(step.num_launches for step in ran),
        num_up=statistics.median(step.num_up for step in ran),
        num_down=statistics.median(step.num_down for step in ran),
        slowest=_slowest(ran),
    )


def _slowest(steps: Sequence[TracedStep]) -> str:
    """Kernels of the last of `steps`, such as "14 x gemm 310.2 us; 14 x norm 41.0 us"."""
    by_time = sorted(steps[-1].kernels.items(), key=lambda item: -item[1][1])
    return "; ".join(f"{count} x {name} {took_us:.1f} us" for name, (count, took_us) in by_time[:NUM_SLOWEST])


def _add(step: TracedStep, event: Mapping[str, Any]) -> None:
    begin, duration = float(event["ts"]), float(event["dur"])
    if event["cat"] == "gpu_memcpy":
        # Copies to and from the host are beside the computation.
        if "HtoD" in event["name"]:
            step.num_up += 1
            return
        if "DtoH" in event["name"]:
            step.num_down += 1
            return
    step.num_kernels += 1
    match = _SHORT_NAME.match(event["name"])
    name = match[1] if match else event["name"]
    count, took_us = step.kernels.get(name, (0, 0.0))
    step.kernels[name] = (count + 1, took_us + duration)
    step.computing_us.append((begin, begin + duration))
    if ATTENTION.search(event["name"]):
        step.attention_us += duration


def _around(
    event: Mapping[str, Any], begins: Sequence[float], ranges: Sequence[tuple[float, float]]
) -> int | None:
    """Index of the range that contains the event's begin."""
    at = float(event["ts"])
    index = bisect_right(begins, at) - 1
    return index if index >= 0 and at <= ranges[index][1] else None


def _correlation(event: Mapping[str, Any]) -> int:
    return int(event.get("args", {}).get("correlation", -1))


def _union_us(intervals: Sequence[tuple[float, float]]) -> float:
    """Length of the union of sorted intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in intervals:
        if end > reached:
            total += end - max(begin, reached)
            reached = end
    return total
