"""Tests of stages on a GPU. Another device, to try the tests themselves: STAGELINE_GPU_TEST_DEVICE=cpu."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from stage_worker.backends.torch_device import prepare_process, prepare_thread

DEVICE_VARIABLE = "STAGELINE_GPU_TEST_DEVICE"


@pytest.fixture(scope="session")
def device() -> str:
    """Device of the stages. Skips without a GPU."""
    device = os.environ.get(DEVICE_VARIABLE, "cuda:0")
    if device != "cpu" and not torch.cuda.is_available():
        pytest.skip("no CUDA device: these tests need one GPU and a torch build with CUDA")
    return device


@pytest.fixture
def prepared(device: str) -> Iterator[torch.device]:
    """The device, as a worker prepares it for its process and for the thread that computes."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    prepare_process(torch.device(device))
    prepare_thread(torch.device(device))
    yield torch.device(device)
    torch.backends.cuda.enable_cudnn_sdp(before)
