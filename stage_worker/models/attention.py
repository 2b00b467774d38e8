"""Attention of a step over paged keys and values.

Two methods, see `kernels`. Queries of one KV head always stand side by side, so no key is ever copied for the
heads that share it.

* SDPA, torch's scaled dot product attention. In decode grouped heads are its query rows; `enable_gqa=True` is
  ten times slower on a CPU, and with a mask keeps CUDA from its fused kernels.
* Batched products for bfloat16 on a CPU, where SDPA calls one small product per sequence and head. Scores and
  softmax are float32 as in SDPA, weights are rounded to bfloat16 for the product with the values, as there:
  scores that are rounded to bfloat16, as a plain product gives them, cost five times the error.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from stage_worker.models.attention_views import DecodeView, PrefillView
from stage_worker.models.kernels import AttentionMethod
from stage_worker.models.paged_kv import PagedKv
from stage_worker.models.step_layout import StepLayout

_FEW_ELEMENTS = 1 << 19
"""Keys up to here are cheaper to convert to float32 than to multiply twice."""


def attend(
    query: Tensor, fresh: Tensor, *, layer: int, window: int | None, step: StepLayout, pages: PagedKv
) -> Tensor:
    """[n, heads, head_dim] for `query` [n, heads, head_dim], rotated, over what the pages hold.

    `fresh` [n, 2 * kv_heads, head_dim] are the step's own keys and values, which the pages hold already;
    `layer` counts from the stage's first.
    """
    views = step.views[window]
    if views.decodes and views.decodes[0].rows is None:
        return _decode(query, layer, views.decodes[0], step, pages)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for view in views.decodes:
        assert view.rows is not None
        found = _decode(query.index_select(0, view.rows), layer, view, step, pages)
        output.index_copy_(0, view.rows, found)
    for (begin, end), prefill in zip(step.prefill_rows, views.prefills, strict=True):
        rows = slice(begin, end)
        _prefill(query[rows], fresh[rows], layer, prefill, step, pages, output[rows])
    return output


def _decode(query: Tensor, layer: int, view: DecodeView, step: StepLayout, pages: PagedKv) -> Tensor:
    """[b, heads, head_dim] for one query per sequence of the view, all at once."""
    keys, values = pages.gather(layer, view.pages)
    batch, num_heads, head_dim = query.shape
    kv_heads = keys.shape[0]
    grouped = query.reshape(batch, kv_heads, num_heads // kv_heads, head_dim).transpose(0, 1)
    if step.kernels.decode is AttentionMethod.SDPA:
        output = scaled_dot_product_attention(grouped, keys, values, attn_mask=view.mask)
    else:
        output = _decode_products(grouped, keys, values, view.mask)
    return output.transpose(0, 1).reshape(batch, num_heads, head_dim)


def _decode_products(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """[kv_heads, b, group, head_dim] for `query` of that shape, `keys` and `values` [kv_heads, b, s, head_dim].

    torch has no product of bfloat16 that returns float32 on a CPU. Many keys are multiplied twice: the second
    product gives what the first lost to rounding (beta=-1 is added to the unrounded sum).
    """
    shape = (*query.shape[:3], keys.shape[2])
    queries, keys = query.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2)
    if keys.numel() <= _FEW_ELEMENTS:
        parts = [torch.bmm(queries.to(torch.float32), keys.to(torch.float32))]
    else:
        rounded = torch.bmm(queries, keys)
        parts = [rounded, torch.baddbmm(rounded, queries, keys, beta=-1)]
    scores = torch.zeros((), dtype=torch.float32) if mask is None else mask
    for part in parts:
        scores = torch.add(scores, part.view(shape), alpha=query.shape[3] ** -0.5)
    weights = torch.softmax(scores, dim=-1).to(values.dtype)
    return torch.bmm(weights.flatten(0, 1), values.flatten(0, 1)).view_as(query)


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
