"""Mixers that keep a state per sequence instead of keys and values: pure descriptions, equal by value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StatePart:
    """A tensor of `shape` per sequence and layer, in the run dtype, or in float32 if `is_wide`."""

    shape: tuple[int, ...]
    is_wide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaLayout:
    """How files hold the weights of `GatedDelta`.

    `is_grouped`: rows of queries, keys, values and gates are grouped by key head, and with
    `has_grouped_heads` the rows of strengths and decays. `is_tiled`: value heads of one key head are
    `num_key_heads` apart, so that value head h has key head h mod `num_key_heads`; else they are
    consecutive. `has_rates`: there is -exp(A_log) instead of A_log.
    """

    is_grouped: bool = False
    has_grouped_heads: bool = False
    is_tiled: bool = False
    has_rates: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta:
    """Gated delta rule: linear attention over a state per sequence instead of keys and values.

    Queries and keys of `num_key_heads`, each for several of the `num_heads` value heads, and values pass a
    causal convolution of `kernel_size` tokens per channel and SiLU. Queries and keys are scaled to unit
    length. For each head, the state S [key_dim, value_dim] is multiplied by exp(g), with
    g = -exp(A_log) * softplus(a + dt_bias), and then S += k (beta (v - S^T k))^T with beta = sigmoid(b). The
    output is S^T q / sqrt(key_dim), after an RMS norm per head with `norm_eps`, times SiLU of a gate.

    The state has the last `kernel_size` - 1 inputs of the convolution, and S in float32: it sums over all
    tokens, which would lose small terms in fewer bits.

    Source: Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464; transformers' Qwen3NextGatedDeltaNet.
    """

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    norm_eps: float
    layout: DeltaLayout = DeltaLayout()

    @property
    def q_size(self) -> int:
        """Width of the queries, and of the keys."""
        return self.num_key_heads * self.key_dim

    @property
    def o_size(self) -> int:
        """Width of the values, of their gates, and of the output."""
        return self.num_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.q_size + self.o_size

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """What a layer keeps of a sequence."""
        return (
            StatePart((self.conv_size, self.kernel_size - 1)),
            StatePart((self.num_heads, self.key_dim, self.value_dim), is_wide=True),
        )

    @property
    def index_width(self) -> int:
        """There is no index."""
        return 0

    @property
    def rope(self) -> None:
        """Positions enter by their order alone."""
        return None

    @property
    def window(self) -> None:
        """There is no sliding window: it counts with the layers that have full attention."""
        return None


Recurrent = GatedDelta
"""Mixers with a state per sequence, and without pages."""
