"""Whether all stages compute alike: on the same kind of device, with the same kind of functions. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.cluster.worker_connection import WorkerConnection


@dataclass(frozen=True, slots=True)
class StageKernels:
    """`device` is "cpu", "cuda:1" or "mock"; `kernels` is "compiled", "plain", or empty where unknown."""

    device: str
    kernels: str

    @property
    def kind(self) -> str:
        """What must be equal for stages to round alike and to be about as fast."""
        device = self.device.partition(":")[0]
        return f"{self.kernels} on {device}"


def stage_kernels(connection: WorkerConnection | None) -> StageKernels | None:
    """How this worker's stage computes; None for a worker that is gone."""
    if connection is None:
        return None
    return StageKernels(connection.identity.device, connection.kernels)


def differing_kernels(stages: Sequence[StageKernels | None]) -> str:
    """What differs between stages, which are in order; empty where nothing does."""
    by_kind: dict[str, list[str]] = {}
    for index, stage in enumerate(stages):
        if stage is not None and stage.kernels:
            by_kind.setdefault(stage.kind, []).append(str(index))
    if len(by_kind) < 2:
        return ""
    each = (
        f"{'stage' if len(indexes) == 1 else 'stages'} {', '.join(indexes)}: {kind}"
        for kind, indexes in by_kind.items()
    )
    return f"stages compute differently: {'; '.join(each)}"
