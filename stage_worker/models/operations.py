"""What a decoder layer does between its matrix products, as one of two implementations does it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn.functional import silu

from stage_worker.models.attention_views import DecodeView
from stage_worker.models.decode_attention import decode_products, decode_sdpa
from stage_worker.models.kernels import AttentionMethod, Kernels
from stage_worker.models.native_operations import NativeOperations
from stage_worker.models.norms import rms_norm
from stage_worker.models.paged_kv import PagedKv
from stage_worker.models.rope import rotate_
from stage_worker.models.step_layout import StepLayout


class Operations(Protocol):
    """Shapes are those of a step of n tokens; `layer` counts from the stage's first."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `norms.rms_norm`; `x` [n, width]."""

    def rotate_and_write(
        self, heads: Tensor, num_heads: int, layer: int, step: StepLayout, pages: PagedKv
    ) -> None:
        """Turn queries and keys, the first of `heads` [n, num_heads + 2 * kv_heads, head_dim], in place, and
        write keys and values to the pages as the step says."""

    def decode(
        self, query: Tensor, output: Tensor, layer: int, view: DecodeView, step: StepLayout, pages: PagedKv
    ) -> None:
        """Attend with the view's rows of `query` [n, heads, head_dim]; fills the same rows of `output`."""

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, [n, width], for both beside each other, [n, 2 * width]."""


def operations(kernels: Kernels) -> Operations:
    """The implementation that `kernels` names."""
    return NativeOperations() if kernels.decode is AttentionMethod.IN_PLACE else TorchOperations()


class TorchOperations:
    """torch's operators, for every device and dtype."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def rotate_and_write(
        self, heads: Tensor, num_heads: int, layer: int, step: StepLayout, pages: PagedKv
    ) -> None:
        kv_heads = (heads.shape[1] - num_heads) // 2
        rotate_(heads[:, : num_heads + kv_heads], step.cos, step.sin)
        fresh, rows = heads[:, num_heads:], step.writes.rows
        pages.write(layer, fresh if rows is None else fresh.index_select(0, rows), step.writes.slots)

    def decode(
        self, query: Tensor, output: Tensor, layer: int, view: DecodeView, step: StepLayout, pages: PagedKv
    ) -> None:
        chosen = query if view.rows is None else query.index_select(0, view.rows)
        batch, num_heads, head_dim = chosen.shape
        keys, values = pages.gather(layer, view.pages)
        grouped = chosen.reshape(batch, keys.shape[0], -1, head_dim).transpose(0, 1)
        attend = decode_sdpa if step.kernels.decode is AttentionMethod.SDPA else decode_products
        found = attend(grouped, keys, values, view.mask).transpose(0, 1).reshape(batch, num_heads, head_dim)
        if view.rows is None:
            output.copy_(found)
        else:
            output.index_copy_(0, view.rows, found)

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate).mul_(up)
