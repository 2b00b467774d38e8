"""An MLP and a mixture of experts beside each other, see `Experts.branch_norm`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from checkpoint import Experts, Norm
from checkpoint.blueprint import NormKind
from checkpoint.names import TensorRole
from stage_worker.model.experts import ExpertMixture
from stage_worker.model.feed_forward import Mlp
from stage_worker.model.kernels import Kernels
from stage_worker.model.layer_weights import ExpertsWeights
from stage_worker.model.norms import NormWeights, RowNorm, row_norm
from stage_worker.model.operations import Operations
from stage_worker.model.projections import with_rows


class Branches:
    """Computes both branches of the residual and adds them."""

    def __init__(
        self,
        plan: Experts,
        weights: ExpertsWeights,
        norms: Mapping[TensorRole, NormWeights],
        mlp_norm: RowNorm,
        operations: Operations,
        kernels: Kernels,
    ) -> None:
        """`norms` has the weights of `Experts.branch_norm`; `mlp_norm` normalises the MLP's input.

        Packed weights of the MLP replace the given ones.
        """
        norm = plan.branch_norm
        assert norm is not None and weights.router_norm is not None, "experts without branches"
        assert plan.shared is not None and weights.shared is not None, "no MLP beside the experts"
        self._mlp = Mlp(plan.shared, weights.shared, operations, kernels)
        self._mixture = ExpertMixture(replace(plan, shared=None), weights, operations, kernels)
        self._mlp_norm = mlp_norm
        self._mlp_out_norm = row_norm(norm, norms[TensorRole.SHARED_OUT_NORM])
        self._experts_norm = row_norm(norm, norms[TensorRole.EXPERTS_NORM])
        self._experts_out_norm = row_norm(norm, norms[TensorRole.EXPERTS_OUT_NORM])
        router_norm = Norm(kind=NormKind.RMS, eps=norm.eps)
        self._router_norm = row_norm(router_norm, NormWeights(weights.router_norm, None))
        self._router_scale = len(weights.router_norm) ** -0.5

    def __call__(self, x: Tensor, num_tokens: int) -> Tensor:
        """[m, hidden_size] for the residual `x` [m, hidden_size], which is not normed."""
        given = x[:num_tokens]
        routed = self._router_norm(given).mul_(self._router_scale)
        mixed = self._experts_out_norm(self._mixture.mixed(self._experts_norm(given), routed))
        dense = self._mlp_out_norm(self._mlp(self._mlp_norm(given), num_tokens))
        return with_rows(dense.add_(mixed), len(x))

    def added_to(self, residual: Tensor, x: Tensor, num_tokens: int) -> Tensor:
        return self(x, num_tokens).add_(residual)
