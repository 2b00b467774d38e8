"""What layers need of a device."""

from __future__ import annotations

from collections.abc import Iterable

from checkpoint.blueprint import LayerPlan
from checkpoint.compressed import Compressed
from checkpoint.streams import GatedConnection


def only_on_cpus(layers: Iterable[LayerPlan]) -> str | None:
    """What GPUs do not compute; None if they compute all `layers`."""
    found = (_only_on_cpus(layer) for layer in layers)
    return next((name for name in found if name is not None), None)


def _only_on_cpus(layer: LayerPlan) -> str | None:
    if isinstance(layer.connection, GatedConnection):
        return "mixing of gated residual streams"
    return "compressed attention" if isinstance(layer.mixer, Compressed) else None
