"""Root mean square normalisation."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` [..., width] scaled to unit mean square over the last dimension, times `weight` [width].

    The mean square and the scaling are computed in float32, the result is rounded to x's dtype, and only
    then multiplied by the weight in that dtype: the order of transformers' LlamaRMSNorm, on which
    bit-equality in bf16 depends.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)
