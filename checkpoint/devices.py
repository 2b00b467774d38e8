"""What Triton kernels compute of a model; torch's operators compute other models on GPUs."""

from __future__ import annotations

from collections.abc import Collection

from checkpoint.blueprint import Latent, LayerPlan
from checkpoint.choices import no_choice_kernels_because
from checkpoint.compressed import Compressed


def no_kernels_because(layers: Collection[LayerPlan], *, is_float32: bool) -> str | None:
    """Why Triton kernels do not compute `layers` on a GPU, or not in float32; None if they do."""
    if is_float32 and (reason := _no_tiles_because(layers)) is not None:
        return reason
    return no_choice_kernels_because(layers)


def _no_tiles_because(layers: Collection[LayerPlan]) -> str | None:
    """Why Triton kernels do not compute `layers` in float32; None if they do."""
    names = {Latent: "latents", Compressed: "compressed attention"}
    found = (names.get(type(layer.mixer)) for layer in layers)
    if (name := next((name for name in found if name is not None), None)) is None:
        return None
    return f"Triton kernels for {name} are for bf16 and f16: tiles of float32 exceed a GPU's registers"
