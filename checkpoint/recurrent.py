"""Mixers that keep a state per sequence, or nothing, instead of keys and values: pure descriptions, equal by
value.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

UNIT_EPS = 1e-6
"""Added to the squared length of queries and keys of delta rules, which are scaled to unit length."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """A tensor of `shape` per sequence and layer, in the run dtype, or in float32 if `is_wide`."""

    shape: tuple[int, ...]
    is_wide: bool = False


class _Pageless:
    """What mixers without keys and values lack of attention."""

    __slots__ = ()

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
class GatedDelta(_Pageless):
    """Gated delta rule: linear attention over a state per sequence instead of keys and values.

    Queries and keys of `num_key_heads`, each for several of the `num_heads` value heads, and values pass a
    causal convolution of `kernel_size` tokens per channel and SiLU. Queries and keys are scaled to unit
    length. For each head, the state S [key_dim, value_dim] is multiplied by exp(g), with
    g = -exp(A_log) * softplus(a + dt_bias), and then S += k (beta (v - S^T k))^T with beta = sigmoid(b). The
    output is S^T q / sqrt(key_dim), after an RMS norm per head with `norm_eps`, times SiLU of a gate, or
    times its sigmoid with `has_sigmoid_gate`.

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
    has_sigmoid_gate: bool = False
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


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDelta(_Pageless):
    """Kimi Delta Attention: the gated delta rule with a decay for each channel of a key.

    Queries, keys and values of `num_heads` heads of `head_dim` pass a causal convolution each, of
    `kernel_size` tokens per channel, and SiLU. Queries and keys are scaled to unit length. For each head, row
    c of the state S [head_dim, head_dim] is multiplied by exp(g_c), with
    g = -exp(A_log) * softplus(a + dt_bias), and then S += k (beta (v - S^T k))^T with beta = sigmoid(b). The
    output is S^T q / sqrt(head_dim), after an RMS norm per head with `norm_eps`, times the sigmoid of a gate.
    a and the gate, as wide as the keys, are projections of latents of `rank` elements each. `has_rates`:
    files have -exp(A_log) instead of A_log.

    The state has the last `kernel_size` - 1 inputs of the convolutions, and S in float32, as in `GatedDelta`.

    Source: Kimi Team 2025, arXiv:2510.26692, section 3; transformers' KimiLinearDeltaAttention.
    """

    num_heads: int
    head_dim: int
    rank: int
    kernel_size: int
    norm_eps: float
    has_rates: bool = False

    @property
    def num_key_heads(self) -> int:
        """Each head has a key of its own."""
        return self.num_heads

    @property
    def key_dim(self) -> int:
        """Rows of the state of a head."""
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """Columns of the state of a head."""
        return self.head_dim

    @property
    def q_size(self) -> int:
        """Width of the queries, of the keys, and of the values."""
        return self.num_heads * self.head_dim

    @property
    def o_size(self) -> int:
        """Width of the values, of their gates, and of the output."""
        return self.q_size

    @property
    def conv_size(self) -> int:
        """Channels of the convolutions: queries, keys and values."""
        return 3 * self.q_size

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """What a layer keeps of a sequence."""
        return (
            StatePart((self.conv_size, self.kernel_size - 1)),
            StatePart((self.num_heads, self.head_dim, self.head_dim), is_wide=True),
        )


class GateNorm(Enum):
    """Where the output of `Mamba2` is normed."""

    AFTER = "after its gates"
    BEFORE = "before its gates"
    NONE = "not at all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2(_Pageless):
    """State space model with a scalar decay per head, over a state per sequence instead of keys and values.

    A projection of the layer's input has gates, inputs x, matrices B and C, and time steps dt. x, B and C
    pass a causal convolution of `kernel_size` tokens per channel and SiLU. The `num_heads` heads have inputs
    of `head_dim`; the heads of each of `num_head_groups` groups share B and C of `state_size`. For each head,
    with dt = softplus(dt + dt_bias), the state S [state_size, head_dim] is multiplied by exp(-exp(A_log) dt),
    and then S += B (dt x)^T. The output is S^T C + D x, times SiLU of the gates, after which each group has
    an RMS norm with `norm_eps`: see `gate_norm`. `has_bias` and `has_out_bias`: the projections of the input
    and of the output have biases. `has_rates`: files have -exp(A_log) instead of A_log.

    The state has the last `kernel_size` - 1 inputs of the convolution, and S in float32, the heads of a group
    side by side: S sums over all tokens, which would lose small terms in fewer bits.

    Source: Dao and Gu 2024, arXiv:2405.21060; transformers' BambaMixer.
    """

    num_heads: int
    head_dim: int
    num_head_groups: int
    state_size: int
    kernel_size: int
    norm_eps: float
    gate_norm: GateNorm = GateNorm.AFTER
    has_conv_bias: bool = True
    has_bias: bool = False
    has_out_bias: bool = False
    has_rates: bool = False

    @property
    def q_size(self) -> int:
        """Width of C, and of B."""
        return self.num_head_groups * self.state_size

    @property
    def o_size(self) -> int:
        """Width of the inputs, of their gates, and of the output."""
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: inputs, B and C."""
        return self.o_size + 2 * self.q_size

    @property
    def in_size(self) -> int:
        """Rows of the input projection: gates, channels of the convolution, and time steps."""
        return self.o_size + self.conv_size + self.num_heads

    @property
    def group_width(self) -> int:
        """Elements of the inputs, and of the output, of a group's heads."""
        return self.o_size // self.num_head_groups

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """What a layer keeps of a sequence."""
        return (
            StatePart((self.conv_size, self.kernel_size - 1)),
            StatePart((self.num_head_groups, self.state_size, self.group_width), is_wide=True),
        )


@dataclass(frozen=True, slots=True)
class NoMixer(_Pageless):
    """A layer that has a feed-forward alone."""

    @property
    def num_heads(self) -> int:
        """There are no heads."""
        return 0

    @property
    def q_size(self) -> int:
        """There are no queries."""
        return 0


Recurrent = GatedDelta | KimiDelta | Mamba2
"""Mixers with a state per sequence, and without pages."""
Pageless = Recurrent | NoMixer
"""Mixers without pages."""
