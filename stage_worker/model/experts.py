"""Mixture of experts: tokens sorted by expert, and one product per expert that is chosen.

Each token's results are added in float32 in the order of its choices, and rounded once, whatever other
tokens the step has. Equal scores are chosen in the order of the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, linear, softplus

from checkpoint import Experts
from checkpoint.blueprint import GroupScore, Router, RouterScore
from stage_worker.model.feed_forward import Mlp, between
from stage_worker.model.kernels import Kernels
from stage_worker.model.layer_weights import ExpertsWeights
from stage_worker.model.operations import Operations, Products
from stage_worker.model.projections import Weight, project, with_rows


@dataclass(frozen=True, slots=True, eq=False)
class ExpertChoice:
    """Experts int64 [n, per_token] of each token, and their weights float32 [n, per_token]."""

    experts: Tensor
    weights: Tensor


def choose(
    logits: Tensor,
    router: Router,
    per_token: int,
    choice_bias: Tensor | None,
    given: Tensor | None = None,
) -> ExpertChoice:
    """Choose by `logits` [n, experts], or take those `given` int64 [n, per_token]; `choice_bias` [experts] is
    float32.
    """
    scores = _SCORES[router.score](logits.float())
    if given is not None:
        return _weighted(scores, given, router)
    ranks = scores if choice_bias is None else scores + choice_bias
    if router.num_groups > 1:
        ranks = _of_kept_groups(ranks, router)
    return _weighted(scores, _highest(ranks, per_token), router)


def _weighted(scores: Tensor, experts: Tensor, router: Router) -> ExpertChoice:
    """The choice of `experts` int64 [n, per_token], by `scores` [n, all experts]."""
    weights = scores.gather(1, experts)
    if router.is_normalised:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(_LEAST_SUM)
    return ExpertChoice(experts, weights * router.scaling)


_SCORES: Mapping[RouterScore, Callable[[Tensor], Tensor]] = {
    RouterScore.SOFTMAX: lambda logits: logits.softmax(dim=-1),
    RouterScore.SIGMOID: torch.sigmoid,
    RouterScore.SQRT_SOFTPLUS: lambda logits: softplus(logits).sqrt(),
}
_LEAST_SUM = 1e-20
"""Smaller than any sum of scores that is not 0 in float32. Source: DeepSeek-V3's router."""


def _of_kept_groups(ranks: Tensor, router: Router) -> Tensor:
    """`ranks` [n, experts] with -inf outside of the best groups."""
    by_group = ranks.view(len(ranks), router.num_groups, -1)
    num_best = 2 if router.group_score is GroupScore.BEST_TWO else 1
    of_groups = by_group.topk(num_best, dim=-1).values.sum(dim=-1)
    is_dropped = torch.ones_like(of_groups, dtype=torch.bool)
    is_dropped.scatter_(1, _highest(of_groups, router.num_kept_groups), False)
    return by_group.masked_fill(is_dropped[..., None], -torch.inf).flatten(1)


def _highest(ranks: Tensor, count: int) -> Tensor:
    """Places [n, count] of the highest of `ranks` [n, m]; of equal ranks the first wins, unlike `topk`."""
    return ranks.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def separate_products(x: Tensor, counts: Tensor, matrices: Tensor, biases: Tensor | None = None) -> Tensor:
    """One product per expert with rows; matrices of other experts are not read."""
    product = x.new_empty(len(x), matrices.shape[1])
    begin = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            rows = slice(begin, begin + count)
            product[rows] = linear(x[rows], matrices[expert], None if biases is None else biases[expert])
            begin += count
    return product


def grouped_products(x: Tensor, counts: Tensor, matrices: Tensor, biases: Tensor | None = None) -> Tensor:
    """One call for all experts; the host does not wait for the GPU's numbers of rows."""
    ends = counts.cumsum(0).to(torch.int32)
    product = grouped_mm(x, matrices.transpose(1, 2), offs=ends)
    return (
        product if biases is None else product.add_(biases.repeat_interleave(counts, 0, output_size=len(x)))
    )


def rows_of_each(chosen: Tensor, num_experts: int) -> Tensor:
    """How often each expert occurs in `chosen` int64 [m], int64 [experts]; nothing waits for a GPU.

    `torch.bincount` would: the length of its result depends on the values.
    """
    return chosen.new_zeros(num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))


class ExpertMixture:
    """See `Experts`."""

    def __init__(
        self, plan: Experts, weights: ExpertsWeights, operations: Operations, kernels: Kernels
    ) -> None:
        """Packed weights of the shared expert replace its plain ones.

        Raises ValueError for a table with experts that do not exist.
        """
        if (table := weights.hash_table) is not None:
            low, high = (int(x) for x in table.aminmax())
            if low < 0 or high >= plan.count:
                raise ValueError(f"the table of hashed tokens has experts {low}..{high} of {plan.count}")
        self._plan, self._weights = plan, weights
        self._between = between(plan.activation, operations, is_gated=plan.is_gated)
        self._up = _products(weights.up, weights.up_bias, operations)
        self._down = _products(weights.down, weights.down_bias, operations)
        latents = (weights.latent_in, weights.latent_out)
        self._latent_in, self._latent_out = (
            None if weight is None else project(weight, None, kernels.layer_products) for weight in latents
        )
        self._shared: Mlp | None = None
        if plan.shared is not None and weights.shared is not None:
            self._shared = Mlp(plan.shared, weights.shared, operations, kernels)

    def of_tokens(self, token_ids: Tensor | None) -> HashedMixture:
        """The mixture for the tokens `token_ids` int64 [n] of a step, which choose the experts."""
        assert token_ids is not None and self._weights.hash_table is not None, "experts of no tokens"
        return HashedMixture(self, self._weights.hash_table[token_ids].to(torch.int64))

    def __call__(self, x: Tensor, num_tokens: int, experts: Tensor | None = None) -> Tensor:
        """With `experts` int64 [num_tokens, per_token], those are chosen."""
        given = x[:num_tokens]
        mixed = self.mixed(given, given, experts)
        if self._shared is not None:
            mixed.add_(self._weighted_shared(self._shared(given, num_tokens), given))
        return with_rows(mixed, len(x))

    def added_to(self, residual: Tensor, x: Tensor, num_tokens: int) -> Tensor:
        return self(x, num_tokens).add_(residual)

    def mixed(self, x: Tensor, routed: Tensor, experts: Tensor | None = None) -> Tensor:
        """Weighted sum of the chosen experts' results for `x` [n, hidden_size].

        `routed` [n, hidden_size] is the router's input.
        """
        plan, weights = self._plan, self._weights
        logits = linear(routed.to(weights.router.dtype), weights.router, weights.router_bias)
        choice = choose(logits, plan.router, plan.per_token, weights.choice_bias, experts)
        shares = choice.weights
        if weights.expert_scale is not None:
            shares = shares * weights.expert_scale[choice.experts]
        if self._latent_in is not None:
            x = self._latent_in(x)
        chosen = choice.experts.flatten()
        order = chosen.argsort(stable=True)
        counts = rows_of_each(chosen, plan.count)
        by_expert = self._down(self._between(self._up(x[order // plan.per_token], counts)), counts)
        found = torch.empty_like(by_expert).index_copy_(0, order, by_expert)
        by_token = found.view(len(x), plan.per_token, -1).float()
        total = (by_token * shares[..., None]).sum(dim=1).to(x.dtype)
        return total if self._latent_out is None else self._latent_out(total)

    def _weighted_shared(self, shared: Tensor, x: Tensor) -> Tensor:
        if self._weights.shared_weight is None:
            return shared
        return linear(x, self._weights.shared_weight).sigmoid().mul(shared)


@dataclass(frozen=True, slots=True, eq=False)
class HashedMixture:
    """A mixture with `experts` int64 [n, per_token] for the n tokens of one step."""

    mixture: ExpertMixture
    experts: Tensor

    def __call__(self, x: Tensor, num_tokens: int) -> Tensor:
        return self.mixture(x, num_tokens, self.experts)

    def added_to(self, residual: Tensor, x: Tensor, num_tokens: int) -> Tensor:
        return self(x, num_tokens).add_(residual)


def _products(matrices: Weight, biases: Tensor | None, operations: Operations) -> Products:
    """Without a kernel: torch has a grouped bfloat16 one on GPUs only; elsewhere it loops over all experts or
    raises.
    """
    if (found := operations.expert_products(matrices, biases)) is not None:
        return found
    assert isinstance(matrices, Tensor), "held matrices without kernels"
    is_grouped = matrices.device.type == "cuda" and matrices.dtype is torch.bfloat16
    return partial(grouped_products if is_grouped else separate_products, matrices=matrices, biases=biases)
