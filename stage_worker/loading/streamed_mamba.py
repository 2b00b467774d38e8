"""The state space model of the self-check's reference: token by token, and shared with no stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad, silu, softplus

from checkpoint import Mamba2
from checkpoint.names import TensorRole
from checkpoint.tensors import DECAY_KIND, DT_KIND, SKIP_KIND

EXACT_VECTORS = (
    (TensorRole.STATE_DECAY, DECAY_KIND),
    (TensorRole.STATE_DT, DT_KIND),
    (TensorRole.MAMBA_SKIP, SKIP_KIND),
)
"""Vectors that stages keep in float32, in the order of `MambaVectors.exact`."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MambaVectors:
    """Small tensors of a layer: the convolution, and the `EXACT_VECTORS`."""

    kernel: Tensor
    kernel_bias: Tensor | None
    exact: Sequence[Tensor]

    def mixed(
        self,
        joined: Tensor,
        mixer: Mamba2,
        lengths: Sequence[int],
        rounded: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Output and its gates, [copies, n, heads * head_dim] each, of texts of `lengths`.

        `joined` [copies, n, in_size] are projections of the tokens.
        """
        sizes = (mixer.o_size, mixer.conv_size, mixer.num_heads)
        gate, fresh, dt = joined.split_with_sizes(sizes, dim=-1)
        steps = softplus(dt + self.exact[1])
        of_texts = (x.split_with_sizes(list(lengths), dim=1) for x in (fresh, steps))
        found = []
        for rows, step in zip(*of_texts, strict=True):
            padded = pad(rows.transpose(1, 2), (mixer.kernel_size - 1, 0))
            convolved = rounded(conv1d(padded, self.kernel, self.kernel_bias, groups=mixer.conv_size))
            found.append(self._scanned(rounded(silu(convolved)).transpose(1, 2), step, mixer))
        return torch.cat(found, dim=1), silu(gate)

    def _scanned(self, mixed: Tensor, steps: Tensor, mixer: Mamba2) -> Tensor:
        """Output [copies, n, heads * head_dim] for inputs, B and C `mixed` [copies, n, channels]."""
        x, b, c = mixed.split_with_sizes((mixer.o_size, mixer.q_size, mixer.q_size), dim=-1)
        x = torch.unflatten(x, -1, (mixer.num_heads, mixer.head_dim))
        shared = mixer.num_heads // mixer.num_head_groups
        b, c = (
            torch.unflatten(part, -1, (mixer.num_head_groups, -1)).repeat_interleave(shared, dim=2)
            for part in (b, c)
        )
        decay, _, skip = self.exact
        kept = ((decay if mixer.has_rates else -decay.exp()) * steps).exp()
        state = mixed.new_zeros(len(mixed), mixer.num_heads, mixer.head_dim, mixer.state_size)
        outputs = []
        for token in range(mixed.shape[1]):
            added = torch.einsum("chp,chs->chps", x[:, token] * steps[:, token, :, None], b[:, token])
            state = state * kept[:, token, :, None, None] + added
            output = torch.einsum("chps,chs->chp", state, c[:, token]) + skip[:, None] * x[:, token]
            outputs.append(output.flatten(1))
        return torch.stack(outputs, dim=1)
