"""Errors of a real GPU: out of memory is distinguished from a failed device."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from stage_worker.backends.torch_device import fault_kind_of, free_memory
from wire.errors import StepFaultKind

pytestmark = pytest.mark.gpu


def test_an_allocation_that_does_not_fit_is_out_of_memory_and_the_next_one_fits(
    prepared: torch.device,
) -> None:
    if prepared.type == "cpu":
        pytest.skip("a CPU has no limit of its own")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8, device=prepared)
    assert fault_kind_of(caught.value, prepared) is StepFaultKind.OUT_OF_MEMORY
    free_memory(prepared)
    assert float(torch.ones(8, device=prepared).sum().cpu()) == 8.0


def test_a_device_side_assert_is_a_failure_of_the_device(prepared: torch.device) -> None:
    """In a process of its own, whose context it poisons."""
    if prepared.type == "cpu":
        pytest.skip("a CPU raises IndexError")
    script = (
        "import torch\n"
        "from stage_worker.backends.torch_device import fault_kind_of\n"
        f"device = torch.device({str(prepared)!r})\n"
        "try:\n"
        "    torch.zeros(4, device=device)[torch.tensor([9], device=device)].cpu()\n"
        "except Exception as error:\n"
        "    print(fault_kind_of(error, device).name)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "DEVICE", run.stderr
