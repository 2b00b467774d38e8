"""Copies to and from the device that the tests run on."""

from __future__ import annotations

import torch

from stage_worker.backends.hop_memory import PageLocks
from stage_worker.backends.transfers import CudaPageLocks, CudaQueue, DeviceQueue
from tests.fake_device import FakeLocks, FakeQueue


def queue_of(device: torch.device) -> DeviceQueue:
    """Streams of a GPU; on a CPU a double, so that steps go through staging memory there, too."""
    return CudaQueue(device) if device.type == "cuda" else FakeQueue()


def locks_of(device: torch.device) -> PageLocks:
    """Page locks of a GPU; on a CPU a double."""
    return CudaPageLocks(device) if device.type == "cuda" else FakeLocks()
