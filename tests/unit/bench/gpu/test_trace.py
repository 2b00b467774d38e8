from __future__ import annotations

from typing import Any

import pytest

from bench.gpu.trace import STEP, device_use, steps_of


def event(cat: str, name: str, ts: float, dur: float, correlation: int | None = None) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def step(number: int) -> list[dict[str, Any]]:
    """Launched at 100 * number, computed 1,000 us later: a copy, two kernels that overlap, attention."""
    begin, first = 100.0 * number, 10 * number
    late = begin + 1000
    return [
        event("user_annotation", STEP, begin, 50.0),
        event("cuda_runtime", "cudaMemcpyAsync", begin + 1, 1.0, first),
        event("cuda_runtime", "cudaLaunchKernel", begin + 2, 1.0, first + 1),
        event("cuda_driver", "cuLaunchKernelEx", begin + 3, 1.0, first + 2),
        event("cuda_runtime", "cudaGraphLaunch", begin + 4, 1.0, first + 3),
        event("cuda_runtime", "cudaMemcpyAsync", begin + 5, 1.0, first + 4),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", late - 40, 30.0, first),
        event("kernel", "gemm", late, 20.0, first + 1),
        event("kernel", "attend_kernel", late + 10, 20.0, first + 2),
        event("kernel", "norm", late + 40, 10.0, first + 3),
        event("kernel", "gate", late + 50, 10.0, first + 3),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", late + 60, 5.0, first + 4),
    ]


def test_kernels_belong_to_the_step_that_launched_them() -> None:
    events = [*step(1), *step(2), event("kernel", "of nobody", 5000.0, 1.0, 999), {"ph": "M"}]
    steps = steps_of(reversed(events))
    assert [found.num_kernels for found in steps] == [4, 4]
    assert [(found.num_launches, found.num_up, found.num_down) for found in steps] == [(3, 1, 1)] * 2


def test_busy_time_is_the_union_and_a_gap_is_without_copies() -> None:
    use = device_use(steps_of([*step(1), *step(2), *step(3)]))
    assert use.busy_us == 50.0
    assert use.gap_us == 40.0
    assert use.attention_us == 20.0


def test_the_slowest_kernels_are_named_without_their_templates() -> None:
    others = [
        found | {"name": f"void at::native::{found['name']}<float>(int)"}
        if found["cat"] == "kernel"
        else found
        for found in [*step(1), *step(2), event("kernel", "gemm", 1220.0, 15.0, 21)]
    ]
    assert device_use(steps_of(others)).slowest == (
        "2 x gemm 35.0 us; 1 x attend_kernel 20.0 us; 1 x norm 10.0 us; 1 x gate 10.0 us"
    )


def test_kernels_of_the_next_step_that_overlap_leave_no_gap() -> None:
    early = [{**found, "ts": found["ts"] - 60} if found["cat"] == "kernel" else found for found in step(2)]
    assert device_use(steps_of([*step(1), *early])).gap_us == 0.0


def test_a_trace_without_kernels_is_an_error() -> None:
    with pytest.raises(ValueError, match="kernels of 0 steps"):
        device_use(steps_of([event("user_annotation", STEP, 0.0, 1.0)] * 3))
