"""What Triton kernels compute of a model; torch's operators compute other models on GPUs."""

from __future__ import annotations

from collections.abc import Collection

from checkpoint.blueprint import LayerPlan
from checkpoint.choices import no_choice_kernels_because
from checkpoint.compressed import Compressed


def no_kernels_because(layers: Collection[LayerPlan]) -> str | None:
    """Why Triton kernels do not compute `layers` on a GPU; None if they do."""
    if any(isinstance(layer.mixer, Compressed) for layer in layers):
        return "Triton kernels compute no compressed attention"
    if (reason := no_choice_kernels_because(layers)) is not None:
        return reason
    return None
