"""Classification of errors: memory, device, or our own code."""

from __future__ import annotations

import pytest
import torch

from stage_worker.backends.contract import DeviceError
from stage_worker.backends.torch_device import fault_kind_of
from wire.errors import StepFaultKind

CPU, CUDA = torch.device("cpu"), torch.device("cuda:1")
MEMORY, DEVICE, OURS = StepFaultKind.OUT_OF_MEMORY, StepFaultKind.DEVICE, StepFaultKind.INTERNAL


@pytest.mark.parametrize(
    ("error", "on_cpu", "on_cuda"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), MEMORY, MEMORY),
        (MemoryError(), MEMORY, MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), MEMORY, MEMORY),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), DEVICE, DEVICE),
        (DeviceError("poisoned"), DEVICE, DEVICE),
        (RuntimeError("CUDA error: unspecified launch failure"), DEVICE, DEVICE),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), OURS, DEVICE),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), OURS, DEVICE),
        (NotImplementedError("no such kernel"), OURS, OURS),
        (RecursionError("too deep"), OURS, OURS),
        (KeyError("a defect"), OURS, OURS),
        (ValueError("a defect"), OURS, OURS),
    ],
)
def test_device_errors_are_classified(
    error: Exception, on_cpu: StepFaultKind, on_cuda: StepFaultKind
) -> None:
    assert fault_kind_of(error, CPU) is on_cpu
    assert fault_kind_of(error, CUDA) is on_cuda
