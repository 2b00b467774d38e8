"""Feed-forward of a layer: activations, and the MLP."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from checkpoint import Dense
from checkpoint.blueprint import Activation, ClampedSwiGlu
from stage_worker.model.kernels import Kernels
from stage_worker.model.layer_weights import DenseWeights
from stage_worker.model.operations import Function, Operations
from stage_worker.model.projections import CompiledProjection, Projection, project


class FeedForward(Protocol):
    """Computes rows [m, hidden_size] independently; rows from `num_tokens` on are undefined."""

    def __call__(self, x: Tensor, num_tokens: int) -> Tensor:
        """[m, hidden_size] for `x` [m, hidden_size]."""

    def added_to(self, residual: Tensor, x: Tensor, num_tokens: int) -> Tensor:
        """Return `residual` [m, hidden_size], which may be modified, plus the result for `x`."""


_ACTIVATIONS: dict[Activation, Function] = {
    Activation.SILU: silu,
    Activation.GELU: gelu,
    Activation.GELU_TANH: lambda x: gelu(x, approximate="tanh"),
    Activation.RELU2: lambda x: relu(x).square_(),
}


def gated(activation: Activation | ClampedSwiGlu, operations: Operations) -> Function:
    """The product of the activated gate and up, [n, width], of both concatenated [n, 2 * width]."""
    if activation is Activation.SILU:  # SwiGLU. Source: Shazeer 2020, arXiv:2002.05202.
        return operations.gate
    if (fused := operations.other_gate(activation)) is not None:
        return fused
    if isinstance(activation, ClampedSwiGlu):
        return _clamped(activation)
    function = _ACTIVATIONS[activation]

    def gate(gate_up: Tensor) -> Tensor:
        first, second = gate_up.chunk(2, dim=-1)
        return function(first).mul_(second)

    return gate


def between(activation: Activation | ClampedSwiGlu, operations: Operations, *, is_gated: bool) -> Function:
    """The function between the matrices, see `gated`."""
    if is_gated or isinstance(activation, ClampedSwiGlu):
        return gated(activation, operations)
    return _ACTIVATIONS[activation]


def _clamped(plan: ClampedSwiGlu) -> Function:
    def gate(gate_up: Tensor) -> Tensor:
        first, second = gate_up.chunk(2, dim=-1)
        first, second = first.clamp(max=plan.limit), second.clamp(-plan.limit, plan.limit)
        if (plan.alpha, plan.offset) == (1.0, 0.0):
            return silu(first).mul_(second)
        return (first * plan.alpha).sigmoid_().mul_(first).mul_(second.add_(plan.offset))

    return gate


class Mlp:
    """See `Dense`."""

    def __init__(self, plan: Dense, weights: DenseWeights, operations: Operations, kernels: Kernels) -> None:
        """Packed weights replace the given ones."""
        self._up = _up(plan, weights, kernels)
        self._inner = _inner(plan, operations, kernels)
        self._down = project(weights.down, weights.down_bias, kernels.layer_products)

    def __call__(self, x: Tensor, num_tokens: int) -> Tensor:
        return self._down(self._inner(self._up(x)))

    def added_to(self, residual: Tensor, x: Tensor, num_tokens: int) -> Tensor:
        return self._down.added_to(residual, self._inner(self._up(x)))


def _inner(plan: Dense, operations: Operations, kernels: Kernels) -> Function:
    """The function between the matrices."""
    if _gates_in_product(plan, kernels):
        return _unchanged
    return between(plan.activation, operations, is_gated=plan.is_gated)


def _unchanged(x: Tensor) -> Tensor:
    return x


def _up(plan: Dense, weights: DenseWeights, kernels: Kernels) -> Projection:
    products = kernels.layer_products
    if _gates_in_product(plan, kernels):
        assert isinstance(weights.up, Tensor), "a held matrix on a CPU"
        return CompiledProjection(weights.up, weights.up_bias, is_gated=True, products=products)
    return project(weights.up, weights.up_bias, products)


def _gates_in_product(plan: Dense, kernels: Kernels) -> bool:
    return plan.is_gated and plan.activation is Activation.SILU and kernels.layer_products.can_gate
