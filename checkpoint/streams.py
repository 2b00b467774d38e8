"""Several residual streams: pure descriptions of how sub-layers read and write them, and of their end.

A token has `num_streams` rows of hidden_size elements instead of one. All begin as its embedding. A
sub-layer, which is a mixer or a feed-forward, reads one row mixed of all streams, and a connection adds its
result to each stream. A collapse makes one row of them after the last layer. Between layers, and between
stages, the streams of a token lie beside each other in one row of num_streams * hidden_size elements.

Source: Zhu et al. 2024, arXiv:2409.19606 (hyper-connections).
"""

from __future__ import annotations

from dataclasses import dataclass

StreamShapes = dict[str, tuple[int, ...]]
"""Shape of each tensor of a connection or of a collapse, by its kind."""

FN, BASE, SCALE = "fn", "base", "scale"
"""Kinds of tensor: the projection of all streams to weights, what is added to these, and their factors."""
NORM, DOWN, UP, WRITE = (
    *("hc_norm.weight", "input_mix_weight_down.weight", "input_mix_weight_up.weight"),
    "block_inject_weight.weight",
)
"""Kinds of tensor of gated streams: norms, the two matrices of the gates, and the weights of results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnection:
    """Weights of one sub-layer's streams, computed of all of them in float32.

    The product of a token's row of all streams with `fn`, divided by the root of the row's mean square plus
    `norm_eps`, has a logit for each weight; it is multiplied by the `scale` of its group, and `base` is
    added. The groups are, in this order:

    * read, one per stream: sigmoid + `gate_eps`. The sub-layer's input is the sum of the streams times these.
    * write, one per stream: `magnitude` * sigmoid + `write_eps`. A stream gets the result times its weight.
    * mix, num_streams * num_streams, only with `mixing_rounds`: softmax of each row + `gate_eps`, then so
      many times each column and each row divided by its sum + `gate_eps`, but for the rows in the last
      round. The new stream k is the sum of the old streams j times the weight [j, k]. Without, streams stay.

    Source: transformers' DeepseekV4HyperConnection; Xie et al. 2026 (manifold-constrained
    hyper-connections, by the rounds of Sinkhorn and Knopp); without rounds HYV4HyperConnection.
    """

    num_streams: int
    norm_eps: float
    gate_eps: float
    magnitude: float = 2.0
    write_eps: float = 0.0
    mixing_rounds: int | None = None

    @property
    def is_wide(self) -> bool:
        """Its tensors are float32 in memory."""
        return True

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Number of weights of each group."""
        ends = (self.num_streams, self.num_streams)
        return ends if self.mixing_rounds is None else (*ends, self.num_streams**2)

    def shapes(self, hidden_size: int) -> StreamShapes:
        """Of the connection of one sub-layer."""
        num_weights = sum(self.group_sizes)
        return {
            FN: (num_weights, self.num_streams * hidden_size),
            BASE: (num_weights,),
            SCALE: (len(self.group_sizes),),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedCollapse:
    """The sum of all streams times weights like those that `HyperConnection` reads with.

    Source: transformers' DeepseekV4HyperHead and HYV4HyperHead.
    """

    num_streams: int
    norm_eps: float
    gate_eps: float

    @property
    def is_wide(self) -> bool:
        """Its tensors are float32 in memory."""
        return True

    def shapes(self, hidden_size: int) -> StreamShapes:
        """Of its tensors outside the layers."""
        return {
            FN: (self.num_streams, self.num_streams * hidden_size),
            BASE: (self.num_streams,),
            SCALE: (1,),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedCollapse:
    """The mean of all streams, each element times a gate.

    Streams are normed to unit mean square plus `norm_eps`, times 1 + a weight, each by itself. Gates of all
    elements are computed of all normed streams: a projection to `rank` elements, divided by `num_streams`,
    SiLU, another projection, and a sigmoid. The mean is of the normed streams times their gates.

    Source: transformers' Qwen4ExpTextGatedResidual.
    """

    num_streams: int
    rank: int
    norm_eps: float

    @property
    def is_wide(self) -> bool:
        """Its tensors are in the run dtype in memory, as transformers computes them."""
        return False

    def shapes(self, hidden_size: int) -> StreamShapes:
        """Of its tensors outside the layers."""
        width = self.num_streams * hidden_size
        return {NORM: (width,), DOWN: (self.rank, width), UP: (width, self.rank)}


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedConnection(GatedCollapse):
    """A connection that reads streams as `GatedCollapse` does.

    The result of the sub-layer is added to each stream, times twice the sigmoid of a projection of all normed
    streams, divided by `num_streams`.
    """

    def shapes(self, hidden_size: int) -> StreamShapes:
        """Of the connection of one sub-layer."""
        width = self.num_streams * hidden_size
        return GatedCollapse.shapes(self, hidden_size) | {WRITE: (self.num_streams, width)}
