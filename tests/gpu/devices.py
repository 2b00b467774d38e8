"""Copies to and from the device that the tests run on."""

from __future__ import annotations

import torch

from stage_worker.backends.transfers import CudaQueue, DeviceQueue
from tests.fake_device import FakeQueue


def queue_of(device: torch.device) -> DeviceQueue:
    """Streams of a GPU; on a CPU a double, so that steps go through staging memory there, too."""
    return CudaQueue(device) if device.type == "cuda" else FakeQueue()
