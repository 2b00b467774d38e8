"""Attention of one query per sequence over gathered keys, in two ways.

In both the heads that share a key stand side by side as query rows: with SDPA `enable_gqa=True` is ten times
slower on a CPU, and with a mask keeps CUDA from its fused kernels. Batched products are for bfloat16 on a
CPU, where SDPA calls one small product per sequence and head. Scores and softmax are float32 as in SDPA:
scores that are rounded to bfloat16, as a plain product gives them, cost up to five times the error.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_FEW_ELEMENTS = 1 << 19
"""Keys up to here are cheaper to convert to float32 than to multiply twice."""


def decode_sdpa(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """[kv_heads, b, group, head_dim] for `query` of that shape, over `keys` and `values` [kv_heads, b, s,
    head_dim]; `mask` [1, b, 1, s] is added to the scores."""
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask)


def decode_products(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """As `decode_sdpa`, with a float32 mask.

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
    scores = torch.zeros(shape, dtype=torch.float32) if mask is None else mask
    for part in parts:
        scores = torch.add(scores, part.view(shape), alpha=query.shape[3] ** -0.5)
    weights = torch.softmax(scores, dim=-1).to(values.dtype)
    return torch.bmm(weights.flatten(0, 1), values.flatten(0, 1)).view_as(query)
