"""Mixtures of experts in config.json: which layers have one, and its Experts."""

from __future__ import annotations

from dataclasses import replace

from checkpoint.block_types import MOE, block_types
from checkpoint.blueprint import Activation, ClampedSwiGlu, Dense, Experts, GroupScore, Norm, Router
from checkpoint.config_fields import RawConfig, flag, natural_int, positive_float, positive_int, text
from checkpoint.errors import BadConfig, UnsupportedModel
from checkpoint.family_rules import Clamp, ExpertRule, SparseLayers

_MOST_EXPERTS = 1 << 17
"""Maximum number of experts of all layers together, far above any existing model."""


def parse_sparse_layers(raw: RawConfig, rule: SparseLayers, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts. Raises BadConfig."""
    layers = range(num_layers)
    match rule:
        case SparseLayers.ALL:
            return (True,) * num_layers
        case SparseLayers.SWITCHED:
            return (flag(raw, "enable_moe_block", default=False),) * num_layers
        case SparseLayers.BLOCKS:
            return tuple(name == MOE for name in block_types(raw))
        case SparseLayers.COUNTED:
            return (natural_int(raw, "num_local_experts", 8) > 0,) * num_layers
        case SparseLayers.STEP:
            step, dense = positive_int(raw, "decoder_sparse_step", 1), _dense_layers(raw, num_layers)
            return tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers)
        case SparseLayers.AFTER_FIRST:
            first = natural_int(raw, "first_k_dense_replace", 1)
            return tuple(layer >= first for layer in layers)
        case SparseLayers.LISTED:
            return _listed_layers(raw, num_layers, num_dense=1)
        case SparseLayers.LISTED_OR_AFTER_FIRST:
            return _listed_layers(raw, num_layers, num_dense=natural_int(raw, "first_k_dense_replace", 1))
        case SparseLayers.INTERVAL:
            step, first = (
                positive_int(raw, "moe_layer_interval", 1),
                natural_int(raw, "moe_layer_start_index", 1),
            )
            is_open = raw.get("moe_layer_end_index", -1) == -1
            last = num_layers - 1 if is_open else natural_int(raw, "moe_layer_end_index", 0)
            return tuple(first <= layer <= last and (layer + 1) % step == 0 for layer in layers)


def _listed_layers(raw: RawConfig, num_layers: int, *, num_dense: int) -> tuple[bool, ...]:
    """Without a list, the first `num_dense` layers are dense."""
    listed = raw.get("mlp_layer_types")
    if listed is None:
        return tuple(layer >= num_dense for layer in range(num_layers))
    words = {"dense": False, "sparse": True}
    if not isinstance(listed, list) or len(listed) != num_layers or any(x not in words for x in listed):
        raise BadConfig(
            f"config field 'mlp_layer_types' must list 'dense' or 'sparse' for {num_layers} layers, is"
            f" {listed!r}"
        )
    return tuple(words[name] for name in listed)


def _dense_layers(raw: RawConfig, num_layers: int) -> frozenset[int]:
    listed = raw.get("mlp_only_layers") or []
    numbers = frozenset(range(num_layers))
    is_list = isinstance(listed, list) and all(type(layer) is int and layer in numbers for layer in listed)
    if not isinstance(listed, list) or not is_list:
        raise BadConfig(
            f"config field 'mlp_only_layers' must list layers from 0 to {num_layers - 1}, is {listed!r}"
        )
    return frozenset(listed)


def parse_experts(raw: RawConfig, rule: ExpertRule, activation: Activation, norm: Norm) -> Experts:
    """Return the experts of a layer that has them, and norms like `norm`. Raises BadConfig."""
    count, per_token = _count(raw, rule), positive_int(raw, rule.per_token_key)
    router = _parse_router(raw, rule)
    if count % router.num_groups or router.num_kept_groups > router.num_groups:
        raise BadConfig(
            f"{count} experts in {router.num_groups} groups (n_group), of which {router.num_kept_groups} are"
            " kept (topk_group): groups must have equal sizes, and topk_group at most n_group"
        )
    group_size = count // router.num_groups
    if per_token > (choice := group_size * router.num_kept_groups):
        raise BadConfig(f"config field {rule.per_token_key!r} is {per_token}, the limit is {choice} experts")
    if router.num_groups > 1 and group_size < 2 and router.group_score is GroupScore.BEST_TWO:
        raise BadConfig(
            f"config field 'n_group' is {router.num_groups}: groups have {group_size} of {count} experts, the"
            " minimum is 2"
        )
    width = positive_int(raw, rule.width_key)
    shared = _shared_width(raw, rule, width)
    inner = activation if rule.clamp is None else _clamped(raw, rule.clamp)
    of_shared = inner if rule.clamps_shared else activation
    return Experts(
        count=count,
        per_token=per_token,
        width=width,
        router=router,
        activation=inner,
        is_gated=rule.is_gated,
        has_bias=rule.has_bias,
        shared=None if shared == 0 else Dense(width=shared, activation=of_shared, is_gated=rule.is_gated),
        has_shared_gate=shared > 0 and rule.has_shared_gate,
        branch_norm=norm if rule.has_branches else None,
        latent_width=_latent_width(raw, rule),
    )


def _latent_width(raw: RawConfig, rule: ExpertRule) -> int | None:
    if rule.latent_key is None or raw.get(rule.latent_key) is None:
        return None
    return positive_int(raw, rule.latent_key)


def _clamped(raw: RawConfig, clamp: Clamp) -> ClampedSwiGlu:
    if clamp is Clamp.PLAIN:
        return ClampedSwiGlu(alpha=1.0, limit=positive_float(raw, "swiglu_limit"), offset=0.0)
    return ClampedSwiGlu(
        alpha=positive_float(raw, "swiglu_alpha", 1.702), limit=positive_float(raw, "swiglu_limit", 7.0)
    )


_DEFAULT_HASH_LAYERS = 3
"""Default in transformers' DeepseekV4Config."""


def parse_hashed_layers(raw: RawConfig, experts: Experts, num_layers: int) -> list[Experts]:
    """The experts of each layer, some of which the tokens themselves choose. Raises BadConfig."""
    router, words = experts.router, {"hash_moe": True, "moe": False}
    hashed = replace(router, has_choice_bias=False, num_hashed_tokens=positive_int(raw, "vocab_size"))
    listed = raw.get("mlp_layer_types")
    if listed is None:
        count = natural_int(raw, "num_hash_layers", _DEFAULT_HASH_LAYERS)
        listed = ["hash_moe" if layer < count else "moe" for layer in range(num_layers)]
    if not isinstance(listed, list) or len(listed) != num_layers or any(name not in words for name in listed):
        raise BadConfig(
            f"config field 'mlp_layer_types' must list 'hash_moe' or 'moe' for {num_layers} layers, is"
            f" {listed!r:.120}"
        )
    return [replace(experts, router=hashed if words[name] else router) for name in listed]


def _count(raw: RawConfig, rule: ExpertRule) -> int:
    found = {key: positive_int(raw, key) for key in rule.count_keys if raw.get(key) is not None}
    counts = set(found.values())
    if len(counts) != 1:
        keys = " and ".join(map(repr, rule.count_keys))
        raise BadConfig(f"config fields {keys} must give one number of experts, got {found or None}")
    (count,) = counts
    layers = positive_int(raw, "num_hidden_layers")
    if count * layers > _MOST_EXPERTS:
        raise BadConfig(f"{layers} layers of {count} experts are more than {_MOST_EXPERTS} experts")
    return count


def _parse_router(raw: RawConfig, rule: ExpertRule) -> Router:
    is_normalised = rule.is_normalised
    if rule.norm_key is not None:
        is_normalised = flag(raw, rule.norm_key, default=is_normalised)
    has_groups = rule.has_groups and _limits_groups(raw, rule)
    return Router(
        score=rule.score,
        is_normalised=is_normalised,
        scaling=positive_float(raw, "routed_scaling_factor", 1.0) if rule.has_scaling else 1.0,
        num_groups=positive_int(raw, "n_group", 1) if has_groups else 1,
        num_kept_groups=positive_int(raw, "topk_group", 1) if has_groups else 1,
        group_score=rule.group_score if has_groups else GroupScore.BEST_TWO,
        has_choice_bias=rule.has_choice_bias,
        has_expert_scale=rule.has_branches,
        is_wide=rule.is_wide,
        has_bias=rule.has_bias,
    )


def _limits_groups(raw: RawConfig, rule: ExpertRule) -> bool:
    """Whether experts are chosen within the best groups only."""
    if not rule.has_group_method:
        return True
    method = text(raw, "topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(f"config field 'topk_method' = {method!r} is not supported")
    return method == "group_limited_greedy"


def _shared_width(raw: RawConfig, rule: ExpertRule, width: int) -> int:
    """0 for no shared expert."""
    if rule.shared_count_key is not None:
        return width * natural_int(raw, rule.shared_count_key, rule.shared_count)
    if (key := rule.shared_width_key) is not None:
        if raw.get(key) is None:
            raise BadConfig(f"config field {key!r} is missing")
        return natural_int(raw, key, 0)
    return 0
