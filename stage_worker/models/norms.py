"""Root mean square normalisation."""

from torch import Tensor
from torch.nn.functional import rms_norm as scaled_to_unit


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` [..., width] scaled to unit mean square over the last dimension, times `weight` [width].

    The mean square and the scaling are computed in float32, the result is rounded to x's dtype, and only
    then multiplied by the weight in that dtype: the order of transformers' LlamaRMSNorm, on which
    bit-equality in bf16 depends. (torch multiplies before it rounds when it is given the weight.)
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    return scaled_to_unit(x, weight.shape, None, eps).mul_(weight)
