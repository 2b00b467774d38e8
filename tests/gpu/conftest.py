"""Tests of stages on a GPU. Another device, to try the tests themselves: STAGELINE_TEST_GPU_DEVICE=cpu."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from stage_worker.backends.torch_device import prepare_process, prepare_thread

DEVICE = os.environ.get("STAGELINE_TEST_GPU_DEVICE", "cuda:0")
NO_DEVICE = "no CUDA device: these tests need one GPU and a torch build with CUDA"


def pytest_runtest_setup() -> None:
    """Skip all tests here, in one line of the summary, before fixtures make their checkpoints."""
    if DEVICE != "cpu" and not torch.cuda.is_available():
        pytest.skip(NO_DEVICE)


@pytest.fixture(scope="session")
def device() -> str:
    """Device of the stages."""
    return DEVICE


@pytest.fixture
def prepared(device: str) -> Iterator[torch.device]:
    """The device, as a worker prepares it for its process and for the thread that computes."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    prepare_process(torch.device(device))
    prepare_thread(torch.device(device))
    yield torch.device(device)
    torch.backends.cuda.enable_cudnn_sdp(before)
