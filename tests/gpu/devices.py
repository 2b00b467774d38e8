"""Copies to and from the device that the tests run on."""

from __future__ import annotations

import torch

from bench.gpu.hops import OwnMappings
from stage_worker.backends.contract import KernelChoice
from stage_worker.backends.hop_memory import DeviceMappings, PageLocks
from stage_worker.backends.transfers import CudaPageLocks, CudaQueue, DeviceQueue
from stage_worker.model.checksums import Checksum, checksum_of
from stage_worker.model.kernels import has_triton_kernels
from tests.fake_device import FakeGpu, FakeLocks, FakeMappings, FakeQueue


def queue_of(device: torch.device) -> DeviceQueue:
    """Streams of a GPU; on a CPU a double, so that steps go through staging memory there, too."""
    return CudaQueue(device) if device.type == "cuda" else FakeQueue()


def locks_of(device: torch.device) -> PageLocks:
    """Page locks of a GPU; on a CPU a double."""
    return CudaPageLocks(device) if device.type == "cuda" else FakeLocks()


def checksum_on(device: torch.device) -> Checksum:
    """As a stage on the device has it."""
    return checksum_of(has_triton=has_triton_kernels(KernelChoice.AUTO, device))


def mappings_of(device: torch.device) -> DeviceMappings:
    """Memory of a GPU for both ends in this process; on a CPU a double."""
    if device.type == "cuda":
        return OwnMappings(device, checksum_on(device))
    return FakeMappings(FakeGpu())
