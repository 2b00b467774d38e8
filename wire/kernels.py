"""Whether the stages of a pipeline compute alike, for logs of the coordinator and tables of commands."""

from collections import abc
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageKernels:
    """`device` is "cpu", "cuda:1" or "mock"; `kernels` is "compiled", "plain", or empty if unknown."""

    device: str
    kernels: str

    @property
    def kind(self) -> str:
        """Stages of the same kind round alike and are about equally fast."""
        device = self.device.partition(":")[0]
        return f"{self.kernels} on {device}"


def differing_kernels(stages: abc.Sequence[StageKernels | None]) -> str:
    """Describe differing kernels of stages (in stage order); empty if there are none."""
    by_kind: dict[str, list[str]] = {}
    for index, stage in enumerate(stages):
        if stage is not None and stage.kernels:
            by_kind.setdefault(stage.kind, []).append(str(index))
    if len(by_kind) < 2:
        return ""
    kinds = (
        f"{'stage' if len(indexes) == 1 else 'stages'} {', '.join(indexes)}: {kind}"
        for kind, indexes in by_kind.items()
    )
    return f"stages compute differently: {'; '.join(kinds)}"
