"""One decoder layer: paged attention and gated MLP, each after a norm.

One-token slices attend in one call (`Operations.decode`), longer ones one at a time by SDPA. For bfloat16
on a CPU without AMX, where SDPA has a quarter of the speed of a product, they use batched products over
blocks of queries: scores and softmax in float32, weights rounded to bfloat16 for the product with the
values, as in SDPA. Heads that share a key access it with a stride of 0, or are stacked as rows. The compiled
function does the same; it divides by the sum of the weights after the product.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from checkpoint import ModelConfig
from stage_worker.model.kernels import AttentionMethod, Kernels, ProductMethod
from stage_worker.model.layer_weights import CompiledProjection, LayerWeights, project
from stage_worker.model.operations import Operations, attend_prompt, operations, rms_norm
from stage_worker.model.step_layout import PagedKv, PrefillView, StepLayout


def attend(
    query: Tensor,
    fresh: Tensor,
    output: Tensor,
    *,
    operations: Operations,
    layer: int,
    window: int | None,
    step: StepLayout,
    pages: PagedKv,
) -> None:
    """Fill `output` [n, heads, head_dim] from the rotated `query` [n, heads, head_dim].

    `fresh` [n, 2 * kv_heads, head_dim] are the step's keys and values, which are already in the pages;
    `layer` counts from the stage's first.
    """
    views = step.views[window]
    for view in views.decodes:
        operations.decode(query, output, layer, view, step, pages)
    for (begin, end), prefill in zip(step.prefill_rows, views.prefills, strict=True):
        rows = slice(begin, end)
        if step.kernels.prefill is AttentionMethod.IN_PLACE:
            attend_prompt(query[rows], fresh[rows], output[rows], pages.store(layer), prefill, window)
        else:
            _prefill(query[rows], fresh[rows], layer, prefill, step, pages, output[rows])


def _prefill(
    query: Tensor,
    fresh: Tensor,
    layer: int,
    view: PrefillView,
    step: StepLayout,
    pages: PagedKv,
    output: Tensor,
) -> None:
    """Fill `output` [n, heads, head_dim] for the n queries of one sequence."""
    if view.pages is None:
        keys, values = fresh.transpose(0, 1).chunk(2)
    else:
        keys, values = (x[:, 0, : view.num_keys] for x in pages.gather(layer, view.pages))
    num_tokens, num_heads, head_dim = query.shape
    kv_heads = keys.shape[0]
    sizes = (num_tokens, kv_heads, num_heads // kv_heads, head_dim)
    grouped, target = (x.view(sizes).permute(1, 2, 0, 3) for x in (query, output))
    if step.kernels.prefill is AttentionMethod.SDPA:
        _prefill_sdpa(grouped, keys, values, view, target)
    else:
        _prefill_products(grouped, keys, values, view, target)


def _prefill_sdpa(query: Tensor, keys: Tensor, values: Tensor, view: PrefillView, target: Tensor) -> None:
    shared = (-1, query.shape[1], -1, -1)
    found = scaled_dot_product_attention(
        query,
        keys[:, None].expand(shared),
        values[:, None].expand(shared),
        attn_mask=view.mask,
        is_causal=view.mask is None,
    )
    target.copy_(found)


def _prefill_products(query: Tensor, keys: Tensor, values: Tensor, view: PrefillView, target: Tensor) -> None:
    """`query` and `target` [kv_heads, group, n, head_dim], `keys` and `values` [kv_heads, s, head_dim]."""
    wide_keys = _contiguous(keys, torch.float32).transpose(1, 2)
    values = _contiguous(values, values.dtype)
    kv_heads, group, _, head_dim = query.shape
    for block in view.blocks:
        (first, last), (low, high) = block.queries, block.keys
        wide = _contiguous(query[:, :, first:last], torch.float32).mul_(head_dim**-0.5)
        scores = torch.bmm(wide.flatten(1, 2), wide_keys[:, :, low:high])
        by_query = scores.view(kv_heads, group, last - first, high - low)
        for begin, mask in block.edges:
            by_query[..., begin : begin + mask.shape[1]].add_(mask)
        weights = torch.softmax(scores, dim=-1).to(values.dtype)
        found = torch.bmm(weights, values[:, low:high])
        target[:, :, first:last].copy_(found.view(kv_heads, group, last - first, head_dim))


def _contiguous(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)


def _unchanged(gated: Tensor) -> Tensor:
    return gated


class DecoderLayer:
    """Weights and kernels of one layer, independent of steps and of the stage's other layers."""

    def __init__(
        self, config: ModelConfig, weights: LayerWeights, kernels: Kernels, *, window: int | None
    ) -> None:
        """Packed weights replace the given ones."""
        self._window = window
        self._operations = operations(kernels)
        self._eps = config.rms_norm_eps
        self._head_dim = config.head_dim
        self._num_heads = config.num_attention_heads
        self._num_rotated = config.num_attention_heads + config.num_kv_heads
        self._input_norm, self._mlp_norm = weights.input_norm, weights.post_attention_norm
        self._q_norm, self._k_norm = weights.q_norm, weights.k_norm
        self._qkv = project(weights.qkv, weights.qkv_bias, kernels)
        self._o = project(weights.o, weights.o_bias, kernels)
        self._gate_up = (
            CompiledProjection(weights.gate_up, weights.gate_up_bias, is_gated=True)
            if kernels.products is ProductMethod.COMPILED
            else project(weights.gate_up, weights.gate_up_bias, kernels)
        )
        self._gate = _unchanged if kernels.products is ProductMethod.COMPILED else self._operations.gate
        self._down = project(weights.down, weights.down_bias, kernels)

    def forward(self, hidden: Tensor, step: StepLayout, pages: PagedKv, layer: int) -> Tensor:
        """Return the layer's output for `hidden` [m, hidden_size], which is not modified.

        `layer` is the index into `pages`, from the stage's first. `m` is at least the step's number of
        tokens: further rows are computed without attention.
        """
        normed = self._operations.rms_norm(hidden, self._input_norm, self._eps)
        hidden = self._o.added_to(hidden, self._attention(normed, step, pages, layer))
        normed = self._operations.rms_norm(hidden, self._mlp_norm, self._eps)
        # SwiGLU. Source: Shazeer 2020, arXiv:2002.05202.
        return self._down.added_to(hidden, self._gate(self._gate_up(normed)))

    def _attention(self, normed: Tensor, step: StepLayout, pages: PagedKv, layer: int) -> Tensor:
        """Attention output [m, heads * head_dim], with zeros after the step's tokens."""
        num_rows, num_tokens, num_heads = normed.shape[0], step.num_tokens, self._num_heads
        heads = self._qkv(normed).view(num_rows, -1, self._head_dim)[:num_tokens]
        query, fresh = heads[:, :num_heads], heads[:, num_heads:]
        if self._q_norm is not None and self._k_norm is not None:
            key = heads[:, num_heads : self._num_rotated]
            query.copy_(rms_norm(query, self._q_norm, self._eps))
            key.copy_(rms_norm(key, self._k_norm, self._eps))
        # All slices are written before any attends, since slices may share pages.
        self._operations.rotate_and_write(heads, num_heads, layer, step, pages)
        new = normed.new_empty if num_rows == num_tokens else normed.new_zeros
        mixed = new(num_rows, num_heads, self._head_dim)
        attend(
            query,
            fresh,
            mixed[:num_tokens],
            operations=self._operations,
            layer=layer,
            window=self._window,
            step=step,
            pages=pages,
        )
        return mixed.view(num_rows, -1)
