"""A layer's operations as compiled functions (_cpu_kernels.c): bfloat16 on a CPU that computes with it.

Rounding follows torch's operators: float32 inside, bfloat16 where
`norms`, `rope` and silu round; attention keeps its weights in float32.

The functions run on the calling thread alone, and let other Python threads run meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stage_worker.models.attention_views import DecodeView
from stage_worker.models.native_kernels import load
from stage_worker.models.paged_kv import PagedKv
from stage_worker.models.step_layout import StepLayout


class NativeOperations:
    """See `operations.Operations`. Tensors are bfloat16 on the CPU, rows contiguous."""

    def __init__(self) -> None:
        module = load()
        self._rms_norm, self._gate = module.rms_norm, module.gate
        self._rotate_and_write, self._attend = module.rotate_and_write, module.attend

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, width = x.shape
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._rms_norm(x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), width, rows, width, eps)
        return out

    def rotate_and_write(
        self, heads: Tensor, num_heads: int, layer: int, step: StepLayout, pages: PagedKv
    ) -> None:
        num_tokens, all_heads, head_dim = heads.shape
        store, cos, sin = pages.store(layer), step.cos, step.sin
        if step.writes.highest_slot >= store.shape[0] * store.shape[3]:
            raise IndexError(f"slot {step.writes.highest_slot} of {store.shape[0] * store.shape[3]} needed")
        shape = (num_heads, (all_heads - num_heads) // 2, head_dim, store.shape[3])
        self._rotate_and_write(
            heads.data_ptr(),
            heads.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.stride(0),
            step.writes.by_row.data_ptr(),
            store.data_ptr(),
            num_tokens,
            shape,
        )

    def decode(
        self, query: Tensor, output: Tensor, layer: int, view: DecodeView, step: StepLayout, pages: PagedKv
    ) -> None:
        _, num_heads, head_dim = query.shape
        batch, width = view.pages.shape
        store = pages.store(layer)
        num_blocks, _, kv_heads, block_size, _ = store.shape
        if view.highest_page >= num_blocks:
            raise IndexError(f"page {view.highest_page} needed, {num_blocks} available")
        assert view.ranges is not None, "a view of another kind"
        self._attend(
            query.data_ptr(),
            query.stride(0),
            store.data_ptr(),
            view.pages.data_ptr(),
            width,
            view.ranges.data_ptr(),
            0 if view.rows is None else view.rows.data_ptr(),
            output.data_ptr(),
            output.stride(0),
            batch,
            width * block_size,
            head_dim**-0.5,
            (num_heads, kv_heads, head_dim, block_size),
        )

    def gate(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        self._gate(gate_up.data_ptr(), out.data_ptr(), rows, width // 2)
        return out
