"""The feed-forward of a layer in the self-check's reference, expert by expert."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu, softplus

from checkpoint import Dense, Experts, Norm
from checkpoint.blueprint import Activation, ClampedSwiGlu, GroupScore, NormKind, RouterScore
from checkpoint.names import TensorRole
from checkpoint.tensors import CHOICE_BIAS_KIND, EXPERT_SCALE_KIND, HASH_KIND, ROUTER_NORM_KIND
from stage_worker.loading.reference_copies import routed

if TYPE_CHECKING:
    from stage_worker.loading.reference import StreamedLayer

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: silu,
    Activation.GELU: gelu,
    Activation.GELU_TANH: lambda x: gelu(x, approximate="tanh"),
    Activation.RELU2: lambda x: relu(x) ** 2,
}


class StreamedFeedForward:
    """Of a layer that has one."""

    def __init__(self, layer: StreamedLayer, plan: Dense | Experts) -> None:
        self._plan = plan
        self._layer, self._model, self._places = layer, layer.model, layer.places

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """[copies, n, width] for the normed `x` of `residual`, both [copies, n, width]."""
        plan = self._plan
        if isinstance(plan, Dense):
            return self._mlp(x, plan, (TensorRole.GATE, TensorRole.UP, TensorRole.DOWN))
        if plan.branch_norm is None:
            mixed = self._chosen(x, x, plan)
        else:
            mixed = self._branch(residual, plan, plan.branch_norm)
        if plan.shared is None:
            return mixed
        roles = (TensorRole.SHARED_GATE, TensorRole.SHARED_UP, TensorRole.SHARED_DOWN)
        shared = self._layer.normed(
            self._mlp(x, plan.shared, roles), TensorRole.SHARED_OUT_NORM, plan.branch_norm
        )
        if plan.has_shared_gate:
            weight = self._model.rounded(self._layer.projected(x, TensorRole.SHARED_WEIGHT).sigmoid())
            shared = self._model.rounded(shared * weight)
        return self._model.rounded(mixed + shared)

    def _mlp(
        self,
        x: Tensor,
        plan: Dense | Experts,
        roles: tuple[TensorRole, TensorRole, TensorRole],
        expert: int | None = None,
    ) -> Tensor:
        """`roles` are gate, up and down, of one expert or of all tokens."""
        gate, up, down = roles
        activation, inner = plan.activation, self._layer.projected(x, up, expert)
        if isinstance(activation, ClampedSwiGlu):
            inner = self._clamped(activation, self._layer.projected(x, gate, expert), inner)
        elif plan.is_gated:
            gates = _ACTIVATIONS[activation](self._layer.projected(x, gate, expert))
            inner = self._model.rounded(gates) * inner
        else:
            inner = _ACTIVATIONS[activation](inner)
        return self._layer.projected(self._model.rounded(inner), down, expert)

    def _clamped(self, plan: ClampedSwiGlu, gate: Tensor, up: Tensor) -> Tensor:
        rounded = self._model.rounded
        gate, up = gate.clamp(max=plan.limit), up.clamp(-plan.limit, plan.limit)
        sigmoid = rounded(rounded(plan.alpha * gate).sigmoid())
        return rounded(up + plan.offset) * rounded(gate * sigmoid)

    def _branch(self, residual: Tensor, plan: Experts, norm: Norm) -> Tensor:
        """The experts beside an MLP."""
        rows = self._model.vector(self._places[TensorRole.ROUTER_NORM, ROUTER_NORM_KIND, None])
        routed = self._model.normed(residual, Norm(kind=NormKind.RMS, eps=norm.eps), rows)
        routed = self._model.rounded(routed * residual.shape[-1] ** -0.5)
        mixed = self._chosen(self._layer.normed(residual, TensorRole.EXPERTS_NORM, norm), routed, plan)
        return self._layer.normed(mixed, TensorRole.EXPERTS_OUT_NORM, norm)

    def _chosen(self, x: Tensor, routed: Tensor, plan: Experts) -> Tensor:
        """The experts' results, of tokens that a copy of `x` gives to them."""
        shares = self._shares(routed, plan)
        if plan.latent_width is not None:
            x = self._layer.projected(x, TensorRole.EXPERTS_IN)
        mixed = torch.zeros_like(x)
        roles = (TensorRole.EXPERT_GATE, TensorRole.EXPERT_UP, TensorRole.EXPERT_DOWN)
        for expert in range(plan.count):
            tokens = shares[..., expert].any(dim=0).nonzero()[:, 0]
            if len(tokens):
                found = self._mlp(x[:, tokens], plan, roles, expert)
                mixed[:, tokens] += found * shares[:, tokens, expert, None]
        mixed = self._model.rounded(mixed)
        return mixed if plan.latent_width is None else self._layer.projected(mixed, TensorRole.EXPERTS_OUT)

    def _is_hashed(self, plan: Experts) -> Tensor:
        """Whether the table has each expert for each token, [n, experts]."""
        rows = self._places[TensorRole.HASH_TABLE, HASH_KIND, None]
        chosen = self._model.table(rows, torch.int64)[self._model.tokens]
        found = torch.zeros(len(chosen), plan.count, dtype=torch.bool)
        return found.scatter_(1, chosen, True)

    def _shares(self, x: Tensor, plan: Experts) -> Tensor:
        """Weight of each expert for each token [copies, n, experts], 0 if it is not chosen."""
        router = plan.router
        if router.is_wide:
            logits = self._model.exact_products(x, self._places[TensorRole.ROUTER, "weight", None])
        else:
            logits = self._layer.projected(x, TensorRole.ROUTER)
        scores = _SCORES[router.score](logits)
        ranks = scores
        if router.has_choice_bias:
            ranks = scores + self._model.exact(self._places[TensorRole.CHOICE_BIAS, CHOICE_BIAS_KIND, None])
        if router.num_groups > 1:
            groups = ranks.view(*ranks.shape[:2], router.num_groups, -1)
            num_best = 2 if router.group_score is GroupScore.BEST_TWO else 1
            best = groups.sort(dim=-1).values[..., -num_best:].sum(dim=-1)
            is_kept = routed(best, router.num_kept_groups)
            ranks = groups.masked_fill(~is_kept[..., None], -math.inf).flatten(-2)
        is_chosen = routed(ranks, plan.per_token)
        if router.num_hashed_tokens is not None:
            is_chosen = self._is_hashed(plan)
        chosen = scores.masked_fill(~is_chosen, 0.0)
        if router.is_normalised:
            chosen = chosen / chosen.sum(dim=-1, keepdim=True)
        if router.has_expert_scale:
            chosen = chosen * self._model.vector(
                self._places[TensorRole.EXPERT_SCALE, EXPERT_SCALE_KIND, None]
            )
        return chosen * router.scaling


_SCORES: dict[RouterScore, Callable[[Tensor], Tensor]] = {
    RouterScore.SOFTMAX: lambda logits: logits.softmax(dim=-1),
    RouterScore.SIGMOID: torch.sigmoid,
    RouterScore.SQRT_SOFTPLUS: lambda logits: softplus(logits) ** 0.5,
}
