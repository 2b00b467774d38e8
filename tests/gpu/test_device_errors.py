"""Errors of a device, provoked: a failed allocation passes, a poisoned context and a hung step do not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu.faulty import ASSERT, MEMORY
from stage_worker.backends.torch_device import fault_kind_of, free_memory
from tests.checkpoints import make_checkpoint
from tests.gpu.failing_stage import HANG, STEP_TIMEOUT_S
from wire.errors import StepFaultKind

pytestmark = pytest.mark.gpu

TIMEOUT_S = 240.0
MOST_S = 5.0
"""Until a failed device is reported."""


def test_an_allocation_that_does_not_fit_is_out_of_memory_and_the_next_one_fits(
    prepared: torch.device,
) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8, device=prepared)
    assert fault_kind_of(caught.value, prepared) is StepFaultKind.OUT_OF_MEMORY
    free_memory(prepared)
    assert float(torch.ones(8, device=prepared).sum().cpu()) == 8.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama") / "model", "llama", num_layers=3)


def told_by(model: Path, device: torch.device, fault: str) -> dict[str, Any]:
    """What the backend of a stage told, whose device fails in its second step."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.gpu.failing_stage", str(model), str(device), fault],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=Path(__file__).parents[2],
    )
    lines = run.stdout.splitlines()
    assert run.returncode == 0 and lines, run.stderr
    told: dict[str, Any] = json.loads(lines[-1])
    return told


def test_a_step_without_memory_fails_alone(model: Path, prepared: torch.device) -> None:
    told = told_by(model, prepared, MEMORY)
    assert told["kind"] == StepFaultKind.OUT_OF_MEMORY.name
    assert told["failures"] == []
    assert told["next"] == "same"


def test_a_device_side_assert_ends_the_backend(model: Path, prepared: torch.device) -> None:
    """A CPU raises what a poisoned context would."""
    told = told_by(model, prepared, ASSERT)
    assert told["kind"] == StepFaultKind.DEVICE.name
    assert any("device-side assert" in reason for reason in told["failures"])
    assert told["next"] == "failed"
    assert told["took_s"] < MOST_S


def test_a_step_that_hangs_is_reported(model: Path, prepared: torch.device) -> None:
    told = told_by(model, prepared, HANG)
    assert told["failures"] == [
        f"a step still computes {STEP_TIMEOUT_S:g} s after it was given up (--step-timeout)"
    ]
    assert told["next"] == "hangs"
    assert STEP_TIMEOUT_S <= told["took_s"] < MOST_S
