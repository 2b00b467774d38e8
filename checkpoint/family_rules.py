"""Vocabulary of a family's row: differences from Llama, and the fields of config.json that give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from checkpoint.blueprint import GroupScore, NormKind, NormSpan, Placement, RouterScore
from checkpoint.names import LLAMA_NAMES, NameTable
from checkpoint.recurrent import DeltaLayout
from checkpoint.rope_config import RopeRule


class Windows(Enum):
    """Which layers have a sliding window, if config.json gives one."""

    NONE = "none"
    ALL = "all"
    SWITCHED = "all, if use_sliding_window"
    SELECTED = "by layer_types or max_window_layers, if use_sliding_window"
    LISTED = "by layer_types, if use_sliding_window"
    PATTERN = "by layer_types, or all but every n-th"
    PATTERN_THEN_FULL = "by layer_types, or all but every n-th, but not the last layer"

    @property
    def has_pattern(self) -> bool:
        """Whether every n-th layer has full attention."""
        return self in (Windows.PATTERN, Windows.PATTERN_THEN_FULL)


class Rotation(Enum):
    """Which layers rotate queries and keys."""

    ALL = "all"
    WINDOWED = "layers with a window"
    WINDOWED_OR_ALL = "layers with a window, or all if config.json has no window"
    LISTED = "by no_rope_layers, or all but every n-th"
    NAMED = "all if position_embedding_type is rope"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasKeys:
    """Fields of config.json that give projections biases, and their default; None: no bias."""

    qkv: str | None = "attention_bias"
    o: str | None = "attention_bias"
    feed_forward: str | None = None
    qkv_default: bool = False
    default: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NormRule:
    """Norms of layers; `eps_key` is the field of their epsilon. `eps` is its default.

    With `qk_key`, this field says whether queries and keys are normed, by default not. With
    `has_value_norm`, values are scaled to unit mean square per head, with the same epsilon.
    """

    kind: NormKind = NormKind.RMS
    placement: Placement = Placement.BEFORE
    has_bias: bool = False
    eps_key: str = "rms_norm_eps"
    qk_span: NormSpan | None = None
    qk_key: str | None = None
    is_qk_after_rotation: bool = False
    has_value_norm: bool = False


class EmbeddingScale(Enum):
    """Factor of the embeddings."""

    NONE = "1"
    MULTIPLIER = "embedding_multiplier"
    ROOT = "the square root of hidden_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRule:
    """Factors and limits between the operations of a family.

    `attention` is the scale of scores. `query_scalar` is the default of query_pre_attn_scalar, whose inverse
    root scales them instead; None for both: the inverse root of a head's width.
    `has_multipliers`: Granite's four. `has_row_scales`: those of `multipliers.parse_row_scales`, and
    `lm_head_multiplier`. `logit_scale` is the default of the field of this name, `logit_cap` and
    `score_cap` are the defaults of final_logit_softcapping and attn_logit_softcapping; None: no such field.
    """

    embedding: EmbeddingScale = EmbeddingScale.NONE
    attention: float | None = None
    query_scalar: float | None = None
    has_multipliers: bool = False
    has_row_scales: bool = False
    logit_scale: float | None = None
    has_caps: bool = False
    score_cap: float | None = None
    logit_cap: float | None = None


class SparseLayers(Enum):
    """Which layers have experts."""

    ALL = "all"
    SWITCHED = "all, if enable_moe_block"
    COUNTED = "all, if num_local_experts is not 0"
    BLOCKS = "by layers_block_type or hybrid_override_pattern"
    STEP = "every decoder_sparse_step-th, except mlp_only_layers"
    AFTER_FIRST = "from first_k_dense_replace on"
    LISTED = "by mlp_layer_types, or all but the first"
    LISTED_OR_AFTER_FIRST = "by mlp_layer_types, or from first_k_dense_replace on"
    INTERVAL = "every moe_layer_interval-th from moe_layer_start_index to moe_layer_end_index"


class Clamp(Enum):
    """Form of `ClampedSwiGlu`."""

    SCALED = "with swiglu_alpha, and ups plus 1"
    PLAIN = "silu(gate) * up"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRule:
    """How a family reads its mixture of experts.

    `count_keys` are the fields for the number of experts; at least one is given. The weights of the chosen
    experts are divided by their sum if field `norm_key` is true (`is_normalised` is its default). The width
    of the shared expert is field `shared_width_key`, or the width of `shared_count_key` experts
    (`shared_count` is its default); None: no shared expert. `has_groups`: n_group and topk_group are read,
    with `has_group_method` only if topk_method is "group_limited_greedy"; `group_score` ranks groups.
    `has_scaling`: routed_scaling_factor is read. `has_branches`: see `Experts.branch_norm`;
    experts have scales, too. `has_bias`: experts and router have biases. `clamp` is the form of
    `ClampedSwiGlu` whose limit field swiglu_limit is, with `clamps_shared` also of the shared expert.
    `is_gated`: see `Dense`, also of the shared expert. Field `latent_key` is `Experts.latent_width`.
    `has_hashes`: layers are hashed by mlp_layer_types, or the first num_hash_layers, see `Router`.
    """

    layers: SparseLayers = SparseLayers.ALL
    count_keys: tuple[str, ...] = ("num_local_experts", "num_experts")
    per_token_key: str = "num_experts_per_tok"
    width_key: str = "moe_intermediate_size"
    score: RouterScore = RouterScore.SOFTMAX
    norm_key: str | None = None
    is_normalised: bool = True
    has_choice_bias: bool = False
    has_groups: bool = False
    has_group_method: bool = False
    group_score: GroupScore = GroupScore.BEST_TWO
    has_scaling: bool = False
    is_wide: bool = False
    shared_width_key: str | None = None
    shared_count_key: str | None = None
    shared_count: int = 0
    has_shared_gate: bool = False
    has_branches: bool = False
    has_bias: bool = False
    clamp: Clamp | None = None
    clamps_shared: bool = False
    has_hashes: bool = False
    is_gated: bool = True
    latent_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRule:
    """How a family reads its indexers. `is_interleaved`, `rotates_end`: see `Indexer`. `can_share`: some
    layers may use the tokens that an earlier one has chosen, see `latent_config.parse_latent_layers`. With
    `has_eps`, the norm of keys has the epsilon of the model's norms.
    """

    is_interleaved: bool = False
    rotates_end: bool = False
    can_share: bool = False
    has_eps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentRule:
    """How a family reads its latent attention. `is_head_whole`: head_dim is the width of a whole query, of
    which partial_rotary_factor is rotated, and not the width of the rotated part. Without `is_rotated`,
    nothing is, and head_dim is not read. `indexer`: layers choose the tokens of a query. `is_split`,
    `has_sinks`, `has_output_gate`: see `Latent`. Without `reads_kv_heads`, num_key_value_heads means nothing:
    published configs have other numbers.
    """

    is_rotated: bool = True
    is_head_whole: bool = False
    is_split: bool = False
    has_sinks: bool = False
    has_output_gate: bool = False
    reads_kv_heads: bool = True
    indexer: IndexRule | None = None


class Streams(Enum):
    """How a family mixes several residual streams.

    INDEPENDENT reads hc_mult and hc_eps. GATED reads hc_count and hc_lowrank, see `GatedConnection`: norms
    around mixers and feed-forwards belong to the streams, and so does the one after the last layer.
    """

    INDEPENDENT = "hc_mult residual streams, written with hc_magnitude"
    BALANCED = "hc_mult residual streams, mixed in hc_sinkhorn_iters rounds"
    GATED = "hc_count residual streams with gates"


class RecurrentLayers(Enum):
    """Which layers are recurrent."""

    INTERVAL = "by layer_types, or all but every full_attention_interval-th"
    LISTED = "by layer_types"
    INDICES = "all but attn_layer_indices"
    NUMBERED = "by layer_types, or by kda_layers and full_attn_layers, which count from 1"
    BLOCKS = "by layers_block_type or hybrid_override_pattern, which list mixers and feed-forwards"
    BESIDE = "all, beside attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaRule:
    """How a family reads its Mamba2 layers: the fields of `Mamba2`.

    Without `expand_key`, the width of a head must be given; with `width_key`, this field may replace
    `expand_key`. Without `out_bias_key`, the projection of the output has a bias if the one of the input has.
    `has_norm_keys`: mamba_rms_norm and mamba_norm_before_gate are read. `has_rates`: see `Mamba2`.
    """

    layers: RecurrentLayers
    activation_key: str = "hidden_act"
    heads_key: str = "mamba_n_heads"
    head_dim_key: str = "mamba_d_head"
    groups_key: str = "mamba_n_groups"
    state_key: str = "mamba_d_state"
    kernel_key: str = "mamba_d_conv"
    expand_key: str | None = "mamba_expand"
    width_key: str | None = None
    conv_bias_key: str = "mamba_conv_bias"
    bias_key: str = "mamba_proj_bias"
    out_bias_key: str | None = None
    has_norm_keys: bool = False
    has_rates: bool = False


_USUAL_ROPE = RopeRule()


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A family by its `model_type` and its class in transformers, and what differs from Llama.

    `keys` are the fields of config.json that are computed beside the common fields. `head_dim` is the
    default of the width of a head (None: hidden_size / num_attention_heads), as in transformers' config
    class; without `has_kv_heads_default`, num_key_value_heads must be given. With `global_head_dim`, the
    default of that field, layers with full attention have other keys, see `checkpoint/layer_heads.py`.
    Fields of `fixed` have this value only, also where transformers does not read them; `reasons` end the
    error for another value. `has_layer_scale`: see `LayerPlan.has_scale`; `has_sinks`: see `Attention`.
    Fields of `same` repeat fields at other paths, where these are given. `defaults` are the values of
    fields that published checkpoints may lack. `latent`: the mixer is latent attention. Most layers are
    Gated DeltaNet with `delta`, Mamba2 with `mamba`, and Kimi Delta Attention with `has_kimi_delta`, for
    `has_rates` see `KimiDelta`. With `is_compressed`, the mixer is `Compressed`. `other_keys`: see
    `config_fields.with_usual_keys`. `has_output_gate`: see `Attention`. `has_block_indexer`: attention is
    to blocks that an indexer chooses. `has_ngrams`: some layers add embeddings of n-grams. `aliases` are
    further model types of the same computation, `class_aliases` names of its class in published
    checkpoints. `width_key` is the field of the width of MLPs. `window_pattern`: every n-th layer has
    full attention if `Windows.PATTERN` is not given layer by layer. `title` names the models for people;
    None: the name of the class. `streams`: there are several residual streams.
    """

    model_type: str
    class_name: str
    keys: frozenset[str]
    title: str | None = None
    aliases: frozenset[str] = frozenset()
    class_aliases: frozenset[str] = frozenset()
    names: NameTable = LLAMA_NAMES
    windows: Windows = Windows.NONE
    window_pattern: int = 0
    rotation: Rotation = Rotation.ALL
    rope: RopeRule = _USUAL_ROPE
    head_dim: int | None = None
    global_head_dim: int | None = None
    has_layer_scale: bool = False
    has_sinks: bool = False
    has_kv_heads_default: bool = True
    biases: BiasKeys = BiasKeys()
    norms: NormRule = NormRule()
    activation_key: str = "hidden_act"
    activation: str = "silu"
    width_key: str = "intermediate_size"
    is_gated: bool = True
    scales: ScaleRule = ScaleRule()
    is_tied: bool = False
    defaults: Mapping[str, object] = field(default_factory=dict, hash=False)
    experts: ExpertRule | None = None
    latent: LatentRule | None = None
    delta: DeltaLayout | None = None
    mamba: MambaRule | None = None
    has_kimi_delta: bool = False
    has_rates: bool = False
    is_compressed: bool = False
    has_output_gate: bool = False
    streams: Streams | None = None
    has_block_indexer: bool = False
    has_ngrams: bool = False
    fixed: Mapping[str, object] = field(default_factory=dict, hash=False)
    reasons: Mapping[str, str] = field(default_factory=dict, hash=False)
    same: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    other_keys: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def known_keys(self) -> frozenset[str]:
        """The fields of config.json that are computed or compared beside the common fields."""
        return self.keys.union(self.fixed, self.same)

    @property
    def recurrent_layers(self) -> RecurrentLayers:
        """Which layers are recurrent, of a family that has such layers."""
        if self.has_kimi_delta:
            return RecurrentLayers.NUMBERED
        return RecurrentLayers.INTERVAL if self.mamba is None else self.mamba.layers
