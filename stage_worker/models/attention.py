"""Attention over paged keys and values, with torch's scaled dot product attention (SDPA).

Grouped queries never copy their keys: the queries of one KV head stand side by side as its query rows
(decode) or see a stride-0 view of it (prefill). Measured on a 2-core CPU in bf16, 16 sequences of 512 keys:
0.7 ms, against 7.6 ms for `enable_gqa=True`, which with a mask also keeps CUDA from its fused kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from stage_worker.models.attention_views import DecodeView, PrefillView
from stage_worker.models.paged_kv import PagedKv
from stage_worker.models.step_layout import KvWrites, StepLayout


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layer: int,
    window: int | None,
    step: StepLayout,
    pages: PagedKv,
) -> Tensor:
    """Write the step's keys and values, then attend: [n, heads, head_dim].

    `query` [n, heads, head_dim], `key` and `value` [n, kv_heads, head_dim], rotated already; `layer` counts
    from the stage's first. All slices are written before any attends, since slices may share pages.
    """
    _write(key, value, layer, step.writes, pages)
    views = step.views[window]
    output = torch.empty_like(query)
    for view in views.decodes:
        if view.rows is None:
            return _decode(query, layer, view, pages)
        found = _decode(query.index_select(0, view.rows), layer, view, pages)
        output.index_copy_(0, view.rows, found)
    for (begin, end), prefill in zip(step.prefill_rows, views.prefills, strict=True):
        rows = slice(begin, end)
        output[rows] = _prefill(query[rows], key[rows], value[rows], layer, prefill, pages)
    return output


def _write(key: Tensor, value: Tensor, layer: int, writes: KvWrites, pages: PagedKv) -> None:
    if writes.cleared.numel():
        zeros = key.new_zeros((writes.cleared.numel(), *key.shape[1:]))
        pages.write(layer, zeros, zeros, writes.cleared)
    if writes.rows is None:
        pages.write(layer, key, value, writes.slots)
    elif writes.rows.numel():
        rows = writes.rows
        pages.write(layer, key.index_select(0, rows), value.index_select(0, rows), writes.slots)


def _decode(query: Tensor, layer: int, view: DecodeView, pages: PagedKv) -> Tensor:
    """[b, heads, head_dim] for one query per sequence of the view, all in one call."""
    keys, values = pages.gather(layer, view.pages)
    num_sequences, num_heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.reshape(num_sequences, kv_heads, num_heads // kv_heads, head_dim)
    output = scaled_dot_product_attention(grouped, keys, values, attn_mask=view.mask)
    return output.reshape(num_sequences, num_heads, head_dim)


def _prefill(
    query: Tensor, key: Tensor, value: Tensor, layer: int, view: PrefillView, pages: PagedKv
) -> Tensor:
    """[n, heads, head_dim] for n queries of one sequence."""
    if view.pages is None:
        keys, values = key.transpose(0, 1), value.transpose(0, 1)
    else:
        keys, values = (x[:, : view.num_keys] for x in pages.gather(layer, view.pages))
    num_tokens, num_heads, head_dim = query.shape
    kv_heads = keys.shape[0]
    grouped = query.view(num_tokens, kv_heads, num_heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    shared = (-1, num_heads // kv_heads, -1, -1)
    output = scaled_dot_product_attention(
        grouped,
        keys[:, None].expand(shared),
        values[:, None].expand(shared),
        attn_mask=view.mask,
        is_causal=view.mask is None,
    )
    return output.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)
