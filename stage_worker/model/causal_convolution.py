"""The causal convolution before a recurrent state, with the last inputs of each sequence in its slot."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu


class CausalConvolution:
    """One filter per channel over the last `kernel_size` tokens, then SiLU, in the run dtype.

    With `dilation`, it is over every so many tokens: it reads (kernel_size - 1) * dilation ones before each.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, dilation: int = 1) -> None:
        """`weight` is [channels, 1, kernel_size], `bias` [channels]."""
        self._weight, self._bias, self._dilation = weight, bias, dilation

    def of_singles(self, fresh: Tensor, kept: Tensor, slots: Tensor) -> Tensor:
        """[b, channels] of `fresh` [b, channels], one token of each sequence, whose slots advance.

        `kept` is [num_states, channels, k], the k inputs that are read before a token; `slots` int64 [b].
        """
        seen = torch.cat((kept.index_select(0, slots), fresh[:, :, None]), dim=2)
        kept.index_copy_(0, slots, seen[:, :, 1:])
        return self._convolved(seen)[:, :, 0]

    def of_chunk(self, fresh: Tensor, kept: Tensor) -> Tensor:
        """[n, channels] of `fresh` [n, channels] after `kept` [channels, k], which advances."""
        seen = torch.cat((kept, fresh.t()), dim=1)
        kept.copy_(seen[:, len(fresh) :])
        return self._convolved(seen[None])[0].t()

    def _convolved(self, seen: Tensor) -> Tensor:
        """[b, channels, n] of `seen` [b, channels, k + n]."""
        found = conv1d(seen, self._weight, self._bias, dilation=self._dilation, groups=len(self._weight))
        return silu(found)
