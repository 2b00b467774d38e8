"""Families of GGUF files: each reads its metadata as a config.json and names its tensors as llama.cpp does.

Values follow llama.cpp's loader, defaults included. A key that no rule reads is an error, as it may change
tokens.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from checkpoint.architectures import architecture_of
from checkpoint.blueprint import NormKind
from checkpoint.dtypes import DType
from checkpoint.errors import BadConfig, BadHeader, UnsupportedModel
from checkpoint.family_rules import Architecture
from checkpoint.gguf.files import GgufFile, Value, read_bytes
from checkpoint.headers import TensorEntry
from checkpoint.names import NameTable, Pack, TensorRole

_MODULES = {
    TensorRole.Q: "attn_q",
    TensorRole.K: "attn_k",
    TensorRole.Q_DOWN: "attn_q_a",
    TensorRole.Q_LATENT_NORM: "attn_q_a_norm",
    TensorRole.Q_UP: "attn_q_b",
    TensorRole.KV_DOWN: "attn_kv_a_mqa",
    TensorRole.KV_LATENT_NORM: "attn_kv_a_norm",
    TensorRole.KV_UP: "attn_kv_b",
    TensorRole.HEAD_KEYS: "attn_k_b.{expert}",
    TensorRole.HEAD_VALUES: "attn_v_b.{expert}",
    TensorRole.V: "attn_v",
    TensorRole.O: "attn_output",
    TensorRole.Q_NORM: "attn_q_norm",
    TensorRole.K_NORM: "attn_k_norm",
    TensorRole.MIXER_NORM: "attn_norm",
    TensorRole.MIXER_OUT_NORM: "post_attention_norm",
    TensorRole.FFN_NORM: "ffn_norm",
    TensorRole.FFN_OUT_NORM: "post_ffw_norm",
    TensorRole.GATE: "ffn_gate",
    TensorRole.UP: "ffn_up",
    TensorRole.DOWN: "ffn_down",
    TensorRole.ROUTER: "ffn_gate_inp",
    TensorRole.EXPERT_GATE: "ffn_gate_exps.{expert}",
    TensorRole.EXPERT_UP: "ffn_up_exps.{expert}",
    TensorRole.EXPERT_DOWN: "ffn_down_exps.{expert}",
    TensorRole.SHARED_GATE: "ffn_gate_shexp",
    TensorRole.SHARED_UP: "ffn_up_shexp",
    TensorRole.SHARED_DOWN: "ffn_down_shexp",
    TensorRole.SHARED_WEIGHT: "ffn_gate_inp_shexp",
}
_SINKS = Pack(module="attn_sinks", roles=(TensorRole.SINKS,), kind="weight")
_CHOICE_BIAS = Pack(module="exp_probs_b", roles=(TensorRole.CHOICE_BIAS,), kind="bias")
_STACK = re.compile(r"(?P<module>blk\.\d+\.(?:ffn_(?:gate|up|down)_exps|attn_[kv]_b))\.(?P<kind>weight|bias)")
_MOST_TENSORS = 1 << 18
"""Of experts and heads of all layers; Kimi K2 has 69,120 matrices of experts."""
_SQUEEZED = "ffn_gate_inp_shexp.weight"
"""Stored without its dimension of 1."""
_ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the frequencies of Llama 3.1 and later; the metadata does not tell its scaling."""


def _names(others: Mapping[TensorRole, str], *packs: Pack) -> NameTable:
    singles = (Pack(module=module, roles=(role,)) for role, module in (_MODULES | dict(others)).items())
    return NameTable(
        prefix="",
        head="output.weight",
        embeddings_module="token_embd",
        final_norm_module="output_norm",
        layers_module="blk",
        packs=(*packs, *singles),
    )


class Fields:
    """The metadata of a model: `{architecture}.{key}` by key, and its tensors."""

    def __init__(self, file: GgufFile, architecture: str, tensors: Mapping[str, TensorEntry]) -> None:
        self.file, self.tensors = file, tensors
        self.prefix = f"{architecture}."
        self._read: set[str] = set()

    def find(self, key: str, default: Any = None) -> Any:
        """The value of a key, or `default`; arrays are lists of numbers."""
        name = self.prefix + key
        self._read.add(name)
        value = self.file.metadata.get(name)
        if value is None:
            return default
        return value if isinstance(value, bool | int | float | str) else list(self.file.numbers(name))

    def get(self, key: str) -> Any:
        """Raises BadConfig for a missing key."""
        if (value := self.find(key)) is None:
            raise BadConfig(f"{self.file.path}: metadata key {self.prefix + key!r} is missing")
        return value

    def natural(self, key: str) -> int:
        """A key's positive integer. Raises BadConfig."""
        value = self.get(key)
        if not _is_natural(value):
            raise BadConfig(
                f"{self.file.path}: metadata key {self.prefix + key!r} must be a positive integer,"
                f" is {value!r:.80}"
            )
        return int(value)

    def expect(self, key: str, *values: object) -> None:
        """Raise UnsupportedModel unless the key is missing or has one of these values."""
        if (value := self.find(key)) is not None and value not in values:
            raise self._unsupported(self.prefix + key, value, f", expected {' or '.join(map(repr, values))}")

    def refuse_unread(self) -> None:
        """Raise UnsupportedModel for the first key of the architecture that nothing has read."""
        for name, value in self.file.metadata.items():
            if name.startswith(self.prefix) and name not in self._read:
                raise self._unsupported(name, value, "")

    def _unsupported(self, name: str, value: Value, expected: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self.file.path}: metadata key {name!r} = {value!r:.120} is not supported{expected}"
        )


RawFields = dict[str, Any]


def _is_natural(value: object) -> bool:
    return type(value) is int and value > 0


def _common(fields: Fields) -> RawFields:
    embeddings = fields.tensors.get("token_embd.weight")
    num_tokens = embeddings.shape[0] if embeddings is not None else fields.get("vocab_size")
    fields.expect("vocab_size", num_tokens)
    fields.find("rope.scaling.finetuned")  # tells of the training
    raw = {
        "hidden_size": fields.natural("embedding_length"),
        "num_hidden_layers": fields.natural("block_count"),
        "intermediate_size": fields.find("feed_forward_length"),
        "num_attention_heads": fields.natural("attention.head_count"),
        "max_position_embeddings": fields.get("context_length"),
        "rms_norm_eps": fields.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.find("rope.freq_base", 10_000.0),
        "vocab_size": num_tokens,
        "tie_word_embeddings": "output.weight" not in fields.tensors,
    }
    return {key: value for key, value in raw.items() if value is not None}


def _attention(fields: Fields) -> RawFields:
    """Heads of one width in all layers, rotated whole."""
    raw = _common(fields)
    heads = raw["num_attention_heads"]
    head_dim = fields.find("attention.key_length", raw["hidden_size"] // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        fields.expect(key, head_dim)
    kv_heads = fields.find("attention.head_count_kv", heads)
    if isinstance(kv_heads, list) and len(set(kv_heads)) == 1:
        kv_heads = kv_heads[0]
    return {**raw, "num_key_value_heads": kv_heads, "head_dim": head_dim, **_rope_scaling(fields)}


def _rope_scaling(fields: Fields) -> RawFields:
    kind = fields.find("rope.scaling.type", "none")
    factor, original = fields.find("rope.scaling.factor"), fields.find("rope.scaling.original_context_length")
    if kind == "none" and (linear := fields.find("rope.scale_linear")) not in (None, 1.0):
        kind, factor = "linear", linear
    fields.expect("rope.scaling.attn_factor", 1.0)
    if kind == "none":
        return {}
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling |= {
            "original_max_position_embeddings": original,
            "beta_fast": fields.find("rope.scaling.yarn_beta_fast"),
            "beta_slow": fields.find("rope.scaling.yarn_beta_slow"),
        }
    return {"rope_scaling": {key: value for key, value in scaling.items() if value is not None}}


def _llama(fields: Fields) -> RawFields:
    raw = _attention(fields)
    if not fields.find("expert_count", 0):
        has_bias = "blk.0.attn_q.bias" in fields.tensors
        fields.expect("expert_used_count", 0)
        return {**raw, "model_type": "llama", "attention_bias": has_bias}
    return {
        **raw,
        "model_type": "mixtral",
        "num_local_experts": fields.get("expert_count"),
        "num_experts_per_tok": fields.get("expert_used_count"),
        "sliding_window": None,
    }


def _qwen2(fields: Fields) -> RawFields:
    return {**_attention(fields), "model_type": "qwen2"}


def _qwen3(fields: Fields) -> RawFields:
    return {**_attention(fields), "model_type": "qwen3"}


def _qwen_experts(fields: Fields) -> RawFields:
    return {
        **_attention(fields),
        "num_experts": fields.get("expert_count"),
        "num_experts_per_tok": fields.get("expert_used_count"),
        "moe_intermediate_size": fields.get("expert_feed_forward_length"),
    }


def _qwen2_moe(fields: Fields) -> RawFields:
    """llama.cpp does not normalise the weights of experts here, and does for Qwen3."""
    raw = _qwen_experts(fields)
    width = fields.find("expert_shared_feed_forward_length", raw.get("intermediate_size"))
    return {
        **raw,
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": width,
        "norm_topk_prob": False,
    }


def _qwen3_moe(fields: Fields) -> RawFields:
    return {**_qwen_experts(fields), "model_type": "qwen3_moe", "norm_topk_prob": True}


_GEMMA_3_27B_LAYERS = 62
"""Its scores are scaled by hidden_size / heads instead of a head's width; the metadata does not tell."""


def _gemma3(fields: Fields) -> RawFields:
    raw = _attention(fields)
    is_27b = raw["num_hidden_layers"] == _GEMMA_3_27B_LAYERS
    pattern = fields.find("attention.sliding_window_pattern", 6)
    windows: RawFields = {"sliding_window_pattern": pattern}
    if isinstance(pattern, list):
        names = {True: "sliding_attention", False: "full_attention"}
        windows = {"layer_types": [names.get(is_windowed, is_windowed) for is_windowed in pattern]}
    return {
        **raw,
        **windows,
        "model_type": "gemma3_text",
        "sliding_window": fields.get("attention.sliding_window"),
        "rope_theta": fields.find("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": fields.find("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": raw["hidden_size"] // raw["num_attention_heads"]
        if is_27b
        else raw["head_dim"],
        "final_logit_softcapping": fields.find("final_logit_softcapping"),
        "attn_logit_softcapping": fields.find("attn_logit_softcapping"),
    }


def _gpt_oss(fields: Fields) -> RawFields:
    raw = _attention(fields)
    scaling = raw.get("rope_scaling", {"rope_type": "default"})
    if scaling["rope_type"] == "yarn":
        scaling = {**scaling, "truncate": False}
    return {
        **raw,
        "model_type": "gpt_oss",
        "intermediate_size": fields.get("expert_feed_forward_length"),
        "num_local_experts": fields.get("expert_count"),
        "num_experts_per_tok": fields.get("expert_used_count"),
        "sliding_window": fields.get("attention.sliding_window"),
        "rope_scaling": scaling,
    }


_GATES = {0: "softmax", 1: "softmax", 2: "sigmoid"}
"""Of expert_gating_func; files of DeepSeek V2 lack it."""
_GATED_TYPES = {"softmax": "deepseek_v2", "sigmoid": "deepseek_v3"}


def _deepseek2(fields: Fields) -> RawFields:
    """DeepSeek V2 and V3, and others that llama.cpp computes like them: Kimi K2, GLM-4.7-Flash.

    Older files have the keys and values of all heads in one matrix, newer ones a matrix of each head, and
    other widths: there, key_length is the width of a row of the cache.
    """
    fields.expect("expert_gating_func", *_GATES)
    gate = _GATES[fields.find("expert_gating_func", 0)]
    raw = _common(fields)
    return {
        **raw,
        **_latent_widths(fields, raw["num_attention_heads"]),
        **_latent_rope(fields),
        "model_type": _GATED_TYPES[gate],
        "q_lora_rank": fields.find("attention.q_lora_rank"),
        "n_routed_experts": fields.natural("expert_count"),
        "num_experts_per_tok": fields.natural("expert_used_count"),
        "n_shared_experts": fields.find("expert_shared_count", 0),
        "moe_intermediate_size": fields.natural("expert_feed_forward_length"),
        "first_k_dense_replace": fields.find("leading_dense_block_count", 0),
        "routed_scaling_factor": fields.find("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": fields.find("expert_weights_norm", False),
        **_expert_groups(fields, gate),
        "num_nextn_predict_layers": 0,
    }


def _latent_widths(fields: Fields, num_heads: int) -> RawFields:
    rank, rope_dim = fields.natural("attention.kv_lora_rank"), fields.natural("rope.dimension_count")
    key, value = fields.find("attention.key_length_mla"), fields.find("attention.value_length_mla")
    if key is None or value is None:
        key, value = fields.natural("attention.key_length"), fields.natural("attention.value_length")
    fields.expect("attention.key_length", key, rank + rope_dim)
    fields.expect("attention.value_length", value, rank)
    fields.expect("attention.head_count_kv", 1, num_heads)
    return {
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key - rope_dim,
        "v_head_dim": value,
        "num_key_value_heads": num_heads,
    }


def _latent_rope(fields: Fields) -> RawFields:
    """yarn, with the temperature of scores: the file has a tenth of mscale_all_dim, and cos and sin have no
    temperature, which is mscale = mscale_all_dim.
    """
    scaling: RawFields = _rope_scaling(fields)
    if not scaling or scaling["rope_scaling"]["rope_type"] != "yarn":
        return scaling
    mscale = round(10 * fields.get("rope.scaling.yarn_log_multiplier"), 6)
    return {"rope_scaling": {**scaling["rope_scaling"], "mscale": mscale, "mscale_all_dim": mscale}}


def _expert_groups(fields: Fields, gate: str) -> RawFields:
    """llama.cpp ranks groups by their two best experts, as DeepSeek V3 does and V2 does not."""
    if gate == "softmax":
        fields.expect("expert_group_count", 0, 1)
        fields.expect("expert_group_used_count", 0, 1)
        return {}
    count = fields.find("expert_group_count", 0) or 1
    return {"n_group": count, "topk_group": fields.find("expert_group_used_count", 0) or count}


def _rope_factors(fields: Fields, raw: RawFields, entry: TensorEntry) -> RawFields:
    """Scaling that divides each frequency by a number of the file, for texts of any length."""
    if entry.dtype is not DType.F32 or "rope_scaling" in raw:
        raise UnsupportedModel(
            f"{fields.file.path}: tensor {_ROPE_FACTORS} of {entry.dtype.name} beside the rope.scaling of the"
            " metadata is not supported, only of F32 and alone"
        )
    content = read_bytes(fields.file.path.with_name(entry.file), entry.begin, entry.end)
    factors = [factor for (factor,) in struct.iter_unpack("<f", content)]
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "factor": 1.0,
        "original_max_position_embeddings": raw["max_position_embeddings"],
    }


Tensors = Mapping[str, TensorEntry]


def _usual(row: Architecture, tensors: Tensors) -> Architecture:
    return row


def _interleaved(row: Architecture, tensors: Tensors) -> Architecture:
    """llama.cpp permutes rows of queries and keys so that neighbours are rotated together."""
    return replace(row, rope=replace(row.rope, is_interleaved=True))


def _with_whole_norms(row: Architecture, tensors: Tensors) -> Architecture:
    """Weights of norms have their 1 in the file."""
    return replace(row, norms=replace(row.norms, kind=NormKind.RMS_WIDE))


def _with_latents(row: Architecture, tensors: Tensors) -> Architecture:
    """A file without the rank of latents of queries has none; keys and values may be split by head."""
    assert row.latent is not None, "a family without latents"
    defaults = {key: value for key, value in row.defaults.items() if key != "q_lora_rank"}
    is_split = "blk.0.attn_k_b.weight" in tensors
    return replace(row, defaults=defaults, latent=replace(row.latent, is_split=is_split))


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFamily:
    """A `general.architecture`, which may be one of several families of config.json.

    `read` returns a config.json, `adapt` what the file changes in the family's row.
    """

    architecture: str
    model_types: tuple[str, ...]
    read: Callable[[Fields], RawFields]
    adapt: Callable[[Architecture, Tensors], Architecture] = _usual
    names: NameTable = field(default_factory=lambda: _names({}))


FAMILIES: tuple[GgufFamily, ...] = (
    GgufFamily(architecture="llama", model_types=("llama", "mixtral"), read=_llama, adapt=_interleaved),
    GgufFamily(architecture="qwen2", model_types=("qwen2",), read=_qwen2),
    GgufFamily(architecture="qwen3", model_types=("qwen3",), read=_qwen3),
    GgufFamily(architecture="qwen2moe", model_types=("qwen2_moe",), read=_qwen2_moe),
    GgufFamily(architecture="qwen3moe", model_types=("qwen3_moe",), read=_qwen3_moe),
    GgufFamily(architecture="gemma3", model_types=("gemma3_text",), read=_gemma3, adapt=_with_whole_norms),
    GgufFamily(
        architecture="gpt-oss",
        model_types=("gpt_oss",),
        read=_gpt_oss,
        names=_names({TensorRole.FFN_NORM: "post_attention_norm"}, _SINKS),
    ),
    GgufFamily(
        architecture="deepseek2",
        model_types=("deepseek_v2", "deepseek_v3"),
        read=_deepseek2,
        adapt=_with_latents,
        names=_names({}, _CHOICE_BIAS),
    ),
)
_BY_NAME = {family.architecture: family for family in FAMILIES}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadConfig:
    """Metadata as a config.json, the row of its family, and the tensors that it describes."""

    raw: RawFields
    row: Architecture
    tensors: Mapping[str, TensorEntry]


def read_config(file: GgufFile, tensors: Mapping[str, TensorEntry]) -> ReadConfig:
    """Read the metadata of a model's first file. Raises UnsupportedModel and BadConfig, with the key."""
    architecture = file.metadata.get("general.architecture")
    family = _BY_NAME.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        legal = ", ".join(_BY_NAME)
        raise UnsupportedModel(
            f"{file.path}: architecture {architecture!r:.120} is not supported in GGUF files"
            f" (supported: {legal})"
        )
    fields = Fields(file, family.architecture, tensors)
    raw = {key: value for key, value in family.read(fields).items() if value is not None}
    fields.refuse_unread()
    row = replace(family.adapt(architecture_of(raw), tensors), names=family.names)
    kept = _as_named(fields.file.path, tensors)
    if (factors := kept.pop(_ROPE_FACTORS, None)) is None:
        return ReadConfig(raw=raw, row=row, tensors=kept)
    scaling = _rope_factors(fields, raw, factors)
    row = replace(row, rope=replace(row.rope, has_length_factors=True))
    return ReadConfig(raw={**raw, "rope_scaling": scaling}, row=row, tensors=kept)


def _as_named(path: Path, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors under the names of `_names`: each expert's or head's part of a stack on its own."""
    found: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        if name.endswith(_SQUEEZED) and len(entry.shape) == 1:
            found[name] = replace(entry, shape=(1, *entry.shape))
        elif (stack := _STACK.fullmatch(name)) is not None and len(entry.shape) > 1:
            if len(found) + entry.shape[0] > _MOST_TENSORS:
                raise BadHeader(
                    f"{path}: tensor {name} has {entry.shape[0]} matrices, too many for all layers"
                )
            found |= {f"{stack['module']}.{number}.{stack['kind']}": one for number, one in _parts(entry)}
        else:
            found[name] = entry
    return found


def _parts(stack: TensorEntry) -> Iterator[tuple[int, TensorEntry]]:
    """The matrix or vector of each expert by its number."""
    count, *shape = stack.shape
    size = stack.num_bytes // count if count else 0
    for number in range(count):
        begin = stack.begin + number * size
        yield number, replace(stack, shape=tuple(shape), begin=begin, end=begin + size)
