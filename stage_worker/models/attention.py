"""Attention of a step over paged keys and values.

One-token slices attend all at once (`Operations.decode`). Longer ones attend one after the other, by SDPA or,
for bfloat16 on a CPU without AMX, where SDPA reaches a quarter of the speed of a product, by batched products
for blocks of queries: scores and softmax in float32, weights rounded to bfloat16 for the product with the
values, as in SDPA. The heads that share a key see it by a stride of 0, or stand side by side as rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from stage_worker.models.attention_views import PrefillView
from stage_worker.models.kernels import AttentionMethod
from stage_worker.models.operations import Operations
from stage_worker.models.paged_kv import PagedKv
from stage_worker.models.step_layout import StepLayout


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
    """Fills `output` [n, heads, head_dim] for `query` of that shape, rotated.

    `fresh` [n, 2 * kv_heads, head_dim] are the step's own keys and values, which are in the pages already;
    `layer` counts from the stage's first.
    """
    views = step.views[window]
    for view in views.decodes:
        operations.decode(query, output, layer, view, step, pages)
    for (begin, end), prefill in zip(step.prefill_rows, views.prefills, strict=True):
        rows = slice(begin, end)
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
    """Fills `output` [n, heads, head_dim] for the n queries of one sequence."""
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
