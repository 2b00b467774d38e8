"""What a stage hands to the next one, tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass

from checkpoint.dtypes import DType

HIDDEN_STATES = "hidden_states"
"""Name of the boundary's first tensor, the input of the next layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryTensor:
    """A tensor [tokens, width] that a stage hands to the next one.

    Without `dtype` it is in the run dtype, and a smaller one may carry it; with `dtype`, it travels in that.
    """

    name: str
    width: int
    dtype: DType | None = None
