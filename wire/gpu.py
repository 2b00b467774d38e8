"""A GPU as its driver describes it, and its memory, between workers, coordinator and clients."""

from __future__ import annotations

from dataclasses import dataclass

from stageline_rpc.v1 import cluster_pb2


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """`compute_capability` is such as "9.0", or "gfx942"; `uuid` and `driver` are empty if unknown."""

    model: str
    uuid: str
    compute_capability: str
    memory_bytes: int
    driver: str

    @property
    def texts(self) -> tuple[str, ...]:
        """Every text of it, which another process chose."""
        return (self.model, self.uuid, self.compute_capability, self.driver)


def encode_gpu(gpu: Gpu) -> cluster_pb2.Gpu:
    return cluster_pb2.Gpu(
        model=gpu.model,
        uuid=gpu.uuid,
        compute_capability=gpu.compute_capability,
        memory_bytes=gpu.memory_bytes,
        driver=gpu.driver,
    )


def decode_gpu(message: cluster_pb2.Gpu) -> Gpu:
    return Gpu(
        model=message.model,
        uuid=message.uuid,
        compute_capability=message.compute_capability,
        memory_bytes=message.memory_bytes,
        driver=message.driver,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Bytes of a GPU's memory in tensors, reserved for tensors, and free for all processes.

    `peak_bytes` is the most that was in tensors since the stage was loaded, `pinned_bytes` memory of the host
    for copies.
    """

    allocated_bytes: int
    reserved_bytes: int
    free_bytes: int
    peak_bytes: int
    pinned_bytes: int = 0


def encode_device_memory(memory: DeviceMemory) -> cluster_pb2.DeviceMemory:
    return cluster_pb2.DeviceMemory(
        allocated_bytes=memory.allocated_bytes,
        reserved_bytes=memory.reserved_bytes,
        free_bytes=memory.free_bytes,
        peak_bytes=memory.peak_bytes,
        pinned_bytes=memory.pinned_bytes,
    )
