"""A GPU as its driver describes it, between workers, coordinator and clients."""

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
