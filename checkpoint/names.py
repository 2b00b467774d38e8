"""Names of a model's tensors on disk: which module holds which role's rows."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from enum import Enum


class TensorRole(Enum):
    """What a module of a layer is for."""

    Q = "queries"
    K = "keys"
    V = "values"
    O = "attention output"  # noqa: E741  # the field's name
    Q_NORM = "norm of queries"
    K_NORM = "norm of keys"
    Q_DOWN = "latents of queries"
    Q_LATENT_NORM = "norm of latents of queries"
    Q_UP = "queries of latents"
    KV_DOWN = "latents and shared keys"
    KV_LATENT_NORM = "norm of latents"
    KV_UP = "keys and values of latents"
    HEAD_KEYS = "keys of latents, by head"
    HEAD_VALUES = "values of latents, by head"
    INDEX_Q = "queries of the indexer"
    INDEX_K = "keys of the indexer"
    INDEX_K_NORM = "norm of keys of the indexer"
    INDEX_WEIGHT = "weights of heads of the indexer"
    INDEX_VALUE = "values that keys of the indexer are pooled of"
    INDEX_GATE = "gates of the pooling of keys of the indexer"
    INDEX_BIAS = "biases of gates, of keys of the indexer"
    INDEX_NORM = "norm of pooled keys of the indexer"
    ENTRY_VALUE = "values that entries are pooled of"
    ENTRY_GATE = "gates of the pooling of entries"
    ENTRY_BIAS = "biases of gates, of entries"
    ENTRY_NORM = "norm of entries"
    O_GROUPS = "output of groups of heads"
    INDEX_QK = "queries and keys of the indexer"
    INDEX_Q_NORM = "norm of queries of the indexer"
    SINKS = "attention sinks"
    OUTPUT_GATE = "gates of latent attention's output"
    DELTA_QKV = "queries, keys and values of the delta rule"
    DELTA_Z = "gates of the delta rule's output"
    DELTA_B = "strengths of the delta rule's updates"
    DELTA_A = "decays of the delta rule's state"
    KDA_B = "strengths of updates of Kimi Delta Attention"
    KDA_DECAY_DOWN = "latents of decays per channel"
    KDA_DECAY_UP = "decays per channel of latents"
    KDA_GATE_DOWN = "latents of output gates"
    KDA_GATE_UP = "output gates of latents"
    CONV_Q = "convolution of queries"
    CONV_K = "convolution of keys"
    CONV_V = "convolution of values"
    MAMBA_IN = "gates, inputs, B, C and time steps of a state space model"
    MAMBA_SKIP = "weights of inputs in the output of a state space model"
    STATE_CONV = "convolution before a state"
    STATE_DECAY = "logarithms of a state's decays"
    STATE_DT = "biases of a state's time steps"
    STATE_NORM = "norm of a recurrent layer's output"
    STATE_OUT = "output of a recurrent layer"
    MIXER_NORM = "norm of the mixer's input"
    MIXER_OUT_NORM = "norm of the mixer's output"
    FFN_NORM = "norm of the feed-forward's input"
    FFN_OUT_NORM = "norm of the feed-forward's output"
    LAYER_SCALE = "scale of the layer's output"
    MIXER_STREAMS = "connection of the mixer to residual streams"
    FFN_STREAMS = "connection of the feed-forward to residual streams"
    NGRAM_HASH = "hashes of n-grams"
    NGRAM_TABLE = "embeddings of n-grams"
    NGRAM_KEY = "keys of n-grams"
    NGRAM_VALUE = "values of n-grams"
    NGRAM_KEY_NORM = "norm of keys of n-grams"
    NGRAM_STREAM_NORM = "norm of residual streams before n-grams"
    NGRAM_CONV_NORM = "norm of the input of n-grams' convolution"
    NGRAM_CONV = "convolution of n-grams"
    GATE = "gate"
    UP = "up"
    DOWN = "down"
    ROUTER = "router"
    CHOICE_BIAS = "bias of the choice of experts"
    HASH_TABLE = "experts of each token of the vocabulary"
    EXPERTS_IN = "latents of experts' input"
    EXPERTS_OUT = "experts' output of latents"
    EXPERT_GATE = "gates of experts"
    EXPERT_UP = "ups of experts"
    EXPERT_DOWN = "downs of experts"
    SHARED_GATE = "gate of the shared expert"
    SHARED_UP = "up of the shared expert"
    SHARED_DOWN = "down of the shared expert"
    SHARED_WEIGHT = "weight of the shared expert"
    ROUTER_NORM = "norm of the router's input"
    EXPERT_SCALE = "scales of experts"
    EXPERTS_NORM = "norm of the experts' input"
    EXPERTS_OUT_NORM = "norm of the experts' output"
    SHARED_OUT_NORM = "norm of the shared expert's output"


_USUAL_MODULES = {
    TensorRole.Q: "self_attn.q_proj",
    TensorRole.K: "self_attn.k_proj",
    TensorRole.V: "self_attn.v_proj",
    TensorRole.O: "self_attn.o_proj",
    TensorRole.Q_NORM: "self_attn.q_norm",
    TensorRole.K_NORM: "self_attn.k_norm",
    TensorRole.Q_DOWN: "self_attn.q_a_proj",
    TensorRole.Q_LATENT_NORM: "self_attn.q_a_layernorm",
    TensorRole.Q_UP: "self_attn.q_b_proj",
    TensorRole.KV_DOWN: "self_attn.kv_a_proj_with_mqa",
    TensorRole.KV_LATENT_NORM: "self_attn.kv_a_layernorm",
    TensorRole.KV_UP: "self_attn.kv_b_proj",
    TensorRole.HEAD_KEYS: "self_attn.k_b_proj.{expert}",
    TensorRole.HEAD_VALUES: "self_attn.v_b_proj.{expert}",
    TensorRole.INDEX_Q: "self_attn.indexer.wq_b",
    TensorRole.INDEX_K: "self_attn.indexer.wk",
    TensorRole.INDEX_K_NORM: "self_attn.indexer.k_norm",
    TensorRole.INDEX_WEIGHT: "self_attn.indexer.weights_proj",
    TensorRole.INDEX_VALUE: "self_attn.indexer.compressor.wkv",
    TensorRole.INDEX_GATE: "self_attn.indexer.compressor.wgate",
    TensorRole.INDEX_BIAS: "self_attn.indexer.compressor",
    TensorRole.INDEX_NORM: "self_attn.indexer.compressor.norm",
    TensorRole.ENTRY_VALUE: "self_attn.compressor.wkv",
    TensorRole.ENTRY_GATE: "self_attn.compressor.wgate",
    TensorRole.ENTRY_BIAS: "self_attn.compressor",
    TensorRole.ENTRY_NORM: "self_attn.compressor.norm",
    TensorRole.O_GROUPS: "self_attn.o_a_proj",
    TensorRole.INDEX_QK: "self_attn.indexer.index_qk_proj",
    TensorRole.INDEX_Q_NORM: "self_attn.indexer.q_layernorm",
    TensorRole.SINKS: "self_attn",
    TensorRole.OUTPUT_GATE: "self_attn.gate_proj",
    TensorRole.DELTA_QKV: "linear_attn.in_proj_qkv",
    TensorRole.DELTA_Z: "linear_attn.in_proj_z",
    TensorRole.DELTA_B: "linear_attn.in_proj_b",
    TensorRole.DELTA_A: "linear_attn.in_proj_a",
    TensorRole.KDA_B: "self_attn.b_proj",
    TensorRole.KDA_DECAY_DOWN: "self_attn.f_a_proj",
    TensorRole.KDA_DECAY_UP: "self_attn.f_b_proj",
    TensorRole.KDA_GATE_DOWN: "self_attn.g_a_proj",
    TensorRole.KDA_GATE_UP: "self_attn.g_b_proj",
    TensorRole.CONV_Q: "self_attn.q_conv1d",
    TensorRole.CONV_K: "self_attn.k_conv1d",
    TensorRole.CONV_V: "self_attn.v_conv1d",
    TensorRole.MAMBA_IN: "mamba.in_proj",
    TensorRole.MAMBA_SKIP: "mamba",
    TensorRole.STATE_CONV: "linear_attn.conv1d",
    TensorRole.STATE_DECAY: "linear_attn",
    TensorRole.STATE_DT: "linear_attn",
    TensorRole.STATE_NORM: "linear_attn.norm",
    TensorRole.STATE_OUT: "linear_attn.out_proj",
    TensorRole.MIXER_NORM: "input_layernorm",
    TensorRole.MIXER_OUT_NORM: "post_attention_layernorm",
    TensorRole.FFN_NORM: "post_attention_layernorm",
    TensorRole.FFN_OUT_NORM: "post_feedforward_layernorm",
    TensorRole.LAYER_SCALE: "",  # of the layer itself
    TensorRole.MIXER_STREAMS: "attn_hc",
    TensorRole.FFN_STREAMS: "ffn_hc",
    TensorRole.NGRAM_HASH: "ple.ple_embedding",
    TensorRole.NGRAM_TABLE: "ple.ple_embedding.ngram_embedding.shard_{shard}",
    TensorRole.NGRAM_KEY: "ple.key_proj",
    TensorRole.NGRAM_VALUE: "ple.value_proj",
    TensorRole.NGRAM_KEY_NORM: "ple.norm_key",
    TensorRole.NGRAM_STREAM_NORM: "ple.norm_query",
    TensorRole.NGRAM_CONV_NORM: "ple.norm_conv",
    TensorRole.NGRAM_CONV: "ple.conv1d",
    TensorRole.GATE: "mlp.gate_proj",
    TensorRole.UP: "mlp.up_proj",
    TensorRole.DOWN: "mlp.down_proj",
    TensorRole.ROUTER: "mlp.gate",
    TensorRole.CHOICE_BIAS: "mlp.gate",
    TensorRole.HASH_TABLE: "mlp.gate",
    TensorRole.EXPERTS_IN: "mlp.fc1_latent_proj",
    TensorRole.EXPERTS_OUT: "mlp.fc2_latent_proj",
    TensorRole.EXPERT_GATE: "mlp.experts.{expert}.gate_proj",
    TensorRole.EXPERT_UP: "mlp.experts.{expert}.up_proj",
    TensorRole.EXPERT_DOWN: "mlp.experts.{expert}.down_proj",
    TensorRole.SHARED_GATE: "mlp.shared_experts.gate_proj",
    TensorRole.SHARED_UP: "mlp.shared_experts.up_proj",
    TensorRole.SHARED_DOWN: "mlp.shared_experts.down_proj",
    TensorRole.SHARED_WEIGHT: "mlp.shared_expert_gate",
    TensorRole.ROUTER_NORM: "router",
    TensorRole.EXPERT_SCALE: "router",
    TensorRole.EXPERTS_NORM: "pre_feedforward_layernorm_2",
    TensorRole.EXPERTS_OUT_NORM: "post_feedforward_layernorm_2",
    TensorRole.SHARED_OUT_NORM: "post_feedforward_layernorm_1",
}
"""Names within a layer, of Llama and of most families. No family has both norms of one name."""

EXPERT_ROLES = frozenset({TensorRole.EXPERT_GATE, TensorRole.EXPERT_UP, TensorRole.EXPERT_DOWN})
"""Roles whose tensors are [experts, out, in]."""
STACK_ROLES = EXPERT_ROLES | {TensorRole.HEAD_KEYS, TensorRole.HEAD_VALUES}
"""Roles with a matrix of each expert, or of each head, which counts as one in names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """One module on disk, with the rows of all `roles` in order.

    A `module` of experts has `{expert}` for their numbers, or holds one matrix after the other; one of a
    table in parts has `{shard}`. With `has_unit_axis`, the shape begins with a dimension of 1. Without
    `has_kind`, the weight has the module's name, and the bias that name with "_bias". With `is_alternating`,
    rows of the roles take turns. With `is_transposed`, matrices are [in, out], unless they are quantised.
    `kind` replaces the usual kind of tensor in the name.
    """

    module: str
    roles: tuple[TensorRole, ...]
    has_unit_axis: bool = False
    has_kind: bool = True
    is_alternating: bool = False
    is_transposed: bool = False
    kind: str | None = None

    @property
    def is_per_expert(self) -> bool:
        """Whether each expert has a module of its own."""
        return "{expert}" in self.module

    def tensor(self, kind: str, expert: int | None) -> str:
        """Name within a layer of tensor `kind` ("weight" or "bias") of the module, or of an expert's."""
        module = self.module if expert is None else self.module.replace("{expert}", str(expert))
        kind = self.kind or kind
        if not self.has_kind:
            return module if kind == "weight" else f"{module}_{kind}"
        return f"{module}.{kind}" if module else kind


STACKED_EXPERTS = (
    Pack(
        module="mlp.experts.gate_up_proj",
        roles=(TensorRole.EXPERT_GATE, TensorRole.EXPERT_UP),
        has_kind=False,
    ),
    Pack(module="mlp.experts.down_proj", roles=(TensorRole.EXPERT_DOWN,), has_kind=False),
)
"""Matrices of all experts in one tensor each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameTable:
    """Disk names of one family. `packs` are the modules that are not named as usual.

    All names but the head's begin with `prefix`, which a wrapper of several modalities makes longer. Tensors
    that begin with one of `ignored` belong to other modalities. Draft layers are in `drafts_module`, by
    default after the last layer. `collapse` is the name of tensor `{kind}` of the collapse of residual
    streams. `others` are tables that some files of the family have instead, see `as_in`.
    """

    prefix: str = "model."
    head: str = "lm_head.weight"
    embeddings_module: str = "embed_tokens"
    final_norm_module: str = "norm"
    layers_module: str = "layers"
    drafts_module: str | None = None
    collapse: str = "hc_head.hc_{kind}"
    packs: tuple[Pack, ...] = ()
    ignored: tuple[str, ...] = ()
    others: tuple[NameTable, ...] = ()

    def as_in(self, tensors: Container[str], num_layers: int) -> NameTable:
        """This table, or the first of `others` that names one of `tensors` as this one does not."""
        return next((other for other in self.others if other._is_seen(self, tensors, num_layers)), self)

    def at(self, prefix: str, head: str, ignored: tuple[str, ...]) -> NameTable:
        """This table and `others` with another place of the text model, see `named_as_in`."""
        others = tuple(other.at(prefix, head, ignored) for other in self.others)
        return replace(self, prefix=prefix, head=head, ignored=ignored, others=others)

    def _is_seen(self, usual: NameTable, tensors: Container[str], num_layers: int) -> bool:
        if self.embeddings != usual.embeddings and self.embeddings in tensors:
            return True
        own = [pack.tensor("weight", None) for pack in self.packs if pack not in usual.packs]
        return any(self.in_layer(layer, name) in tensors for name in own for layer in range(num_layers))

    @property
    def embeddings(self) -> str:
        """Tensor of the input embeddings."""
        return f"{self.prefix}{self.embeddings_module}.weight"

    def final_norm(self, kind: str) -> str:
        """Tensor `kind` ("weight" or "bias") of the norm after the last layer."""
        return f"{self.prefix}{self.final_norm_module}.{kind}"

    def of_collapse(self, kind: str) -> str:
        """Tensor `kind` of what makes one row of all residual streams."""
        return self.prefix + self.collapse.format(kind=kind)

    def in_layer(self, layer: int, tensor: str) -> str:
        """A tensor of layer number `layer` by its name within the layer."""
        return f"{self.prefix}{self.layers_module}.{layer}.{tensor}"

    def pack_of(self, role: TensorRole) -> Pack:
        """The module that holds `role`, maybe among others."""
        found = next((pack for pack in self.packs if role in pack.roles), None)
        return found or Pack(module=_USUAL_MODULES[role], roles=(role,))


LLAMA_NAMES = NameTable()


def or_with(names: NameTable, *packs: Pack, collapse: str | None = None) -> NameTable:
    """`names`, of a family some of whose files have `packs`, and `collapse`, instead of theirs."""
    other = replace(names, packs=(*packs, *names.packs), collapse=collapse or names.collapse)
    return replace(names, others=(*names.others, other))


def renamed(modules: dict[TensorRole, str], *packs: Pack) -> NameTable:
    """A table with single roles in other modules, and `packs` of several roles."""
    singles = (Pack(module=module, roles=(role,)) for role, module in modules.items())
    return NameTable(packs=(*singles, *packs))
