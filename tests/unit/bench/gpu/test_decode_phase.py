"""Cells of decode steps where there is no time or no profile."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu.model import TINY, write_checkpoint
from bench.gpu.phase import Order, Recorder
from bench.gpu.phases import decode
from bench.gpu.stage import BenchStage
from bench.gpu.targets import LOADING_NAME, PEAK_NAME
from wire.steps import Step


def recorder(folder: Path, *, device: str = "cpu", left_s: float = 60.0) -> tuple[Recorder, io.StringIO]:
    order = Order(
        phase="decode",
        device=device,
        is_quick=True,
        deadline_s=time.monotonic() + left_s,
        work=folder,
        logs=folder,
        rows_file=folder / "rows",
    )
    file = io.StringIO()
    return Recorder(order, file), file


@pytest.mark.parametrize(("is_quick", "target"), [(True, None), (False, 0.8)])
def test_figures_of_quick_runs_have_no_target(is_quick: bool, target: float | None, tmp_path: Path) -> None:
    """A busy CPU may read as slowly without tensors as with them."""
    recording, file = recorder(tmp_path)
    recording.order = replace(recording.order, is_quick=is_quick)
    recording.figure(LOADING_NAME, 0.059, "GB/s", bound=0.059)
    assert json.loads(file.getvalue())["target"] == target


def reasons(file: io.StringIO) -> dict[str, str]:
    rows: list[dict[str, Any]] = [json.loads(line) for line in file.getvalue().splitlines()]
    return {row["name"]: row["reason"] for row in rows}


def run_without_counting(stage: BenchStage, steps: Sequence[Step]) -> float:
    """torch counts waits on a GPU only; the steps after these need them computed."""
    stage.host_s(steps)
    return 0.0


async def test_cells_without_time_are_not_measured(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", TINY, torch.device("cpu"), torch.float32)
    recording, file = recorder(tmp_path, left_s=0.1)
    await decode.measure(recording)
    found = reasons(file)
    assert found.pop(LOADING_NAME) == ""
    assert "needs a CUDA device" in found.pop(PEAK_NAME)
    assert found == dict.fromkeys(
        [
            "decode step, batch 1, context 32",
            "decode step, batch 4, context 32",
            "decode step, batch 1, context 32, plain kernels",
        ],
        decode.NO_TIME,
    )


async def test_steps_are_timed_where_the_profiler_sees_no_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU whose driver does not allow it; this CPU stands in for the GPU."""
    write_checkpoint(tmp_path / "model", TINY, torch.device("cpu"), torch.float32)
    recording, file = recorder(tmp_path)
    monkeypatch.setattr(BenchStage, "num_waits", run_without_counting)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
    monkeypatch.setattr(Order, "is_cuda", True)
    await decode.measure(recording)
    found = reasons(file)
    assert found["decode step, batch 4, context 32"] == ""
    assert found["attention of a decode step, batch 4, context 32"].startswith(
        "profile: the trace has kernels of 0"
    )
