"""Families of GGUF files: each reads its metadata as a config.json and names its tensors as llama.cpp does.

A key that no rule reads is an error, as it may change tokens.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import xxhash

from checkpoint.architectures import architecture_of
from checkpoint.blueprint import NormKind
from checkpoint.dtypes import DType
from checkpoint.errors import BadHeader, UnsupportedModel
from checkpoint.family_rules import Architecture
from checkpoint.gguf.files import GgufFile, read_bytes
from checkpoint.gguf.metadata import (
    Fields,
    RawFields,
    read_deepseek2,
    read_deepseek32,
    read_falcon_h1,
    read_gemma3,
    read_glm_dsa,
    read_gpt_oss,
    read_granite_hybrid,
    read_kimi_linear,
    read_llama,
    read_nemotron_h,
    read_qwen2,
    read_qwen2_moe,
    read_qwen3,
    read_qwen3_moe,
    read_qwen3_next,
    read_qwen35,
    read_qwen35_moe,
)
from checkpoint.headers import TensorEntry
from checkpoint.names import NameTable, Pack, TensorRole
from checkpoint.recurrent import DeltaLayout

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
    TensorRole.INDEX_Q: "indexer.attn_q_b",
    TensorRole.INDEX_K: "indexer.attn_k",
    TensorRole.INDEX_K_NORM: "indexer.k_norm",
    TensorRole.INDEX_WEIGHT: "indexer.proj",
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
    TensorRole.DELTA_QKV: "attn_qkv",
    TensorRole.DELTA_Z: "attn_gate",
    TensorRole.DELTA_B: "ssm_beta",
    TensorRole.DELTA_A: "ssm_alpha",
    TensorRole.KDA_B: "ssm_beta",
    TensorRole.KDA_DECAY_DOWN: "ssm_f_a",
    TensorRole.KDA_DECAY_UP: "ssm_f_b",
    TensorRole.KDA_GATE_DOWN: "ssm_g_a",
    TensorRole.KDA_GATE_UP: "ssm_g_b",
    TensorRole.CONV_Q: "ssm_conv1d_q",
    TensorRole.CONV_K: "ssm_conv1d_k",
    TensorRole.CONV_V: "ssm_conv1d_v",
    TensorRole.MAMBA_IN: "ssm_in",
    TensorRole.EXPERTS_IN: "ffn_latent_down",
    TensorRole.EXPERTS_OUT: "ffn_latent_up",
    TensorRole.STATE_CONV: "ssm_conv1d",
    TensorRole.STATE_NORM: "ssm_norm",
    TensorRole.STATE_OUT: "ssm_out",
}
_SINKS = Pack(module="attn_sinks", roles=(TensorRole.SINKS,), kind="weight")
_CHOICE_BIAS = Pack(module="exp_probs_b", roles=(TensorRole.CHOICE_BIAS,), kind="bias")
_DELTA_PACKS = (
    Pack(module="ssm_a", roles=(TensorRole.STATE_DECAY,), has_kind=False, kind="weight"),
    Pack(module="ssm_dt", roles=(TensorRole.STATE_DT,), kind="bias"),
)
_MAMBA_PACKS = (
    *_DELTA_PACKS,
    Pack(module="ssm_d", roles=(TensorRole.MAMBA_SKIP,), has_kind=False, kind="weight"),
)
_GROUPED_HEADS = Pack(module="ssm_ba", roles=(TensorRole.DELTA_B, TensorRole.DELTA_A))
_GROUPED_ROWS = Pack(module="ssm_in", roles=(TensorRole.DELTA_QKV, TensorRole.DELTA_Z))
"""Of Qwen3-Next in older files."""
_FUSED_EXPERTS = Pack(
    module="ffn_gate_up_exps.{expert}", roles=(TensorRole.EXPERT_GATE, TensorRole.EXPERT_UP)
)
"""In files of any mixture of experts."""
_STACK = re.compile(
    r"(?P<module>blk\.\d+\.(?:ffn_(?:gate|up|gate_up|down)_exps|attn_[kv]_b))\.(?P<kind>weight|bias)"
)
MOST_TENSORS = 1 << 18
"""Of experts and heads of all layers; Kimi K2 has 69,120 matrices of experts."""
_SQUEEZED = {"ffn_gate_inp_shexp.weight": (1, 0), "ssm_conv1d.weight": (2, 1)}
"""Stored without its dimension of 1: number of the others, and where it is."""
_FLATTENED = ("ssm_a", "ssm_d", "ssm_norm.weight")
"""Vectors that Mamba2 has with a second dimension: of 1, or the elements of a group."""
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the frequencies of Llama 3.1 and later; the metadata does not tell its scaling."""


_SHORT_CONVOLUTIONS = tuple(f"ssm_conv1d_{part}.weight" for part in "qkv")
"""Of Kimi Linear, with dimensions of 1 at any place; its ssm_a has the shape of the published A_log."""


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


def factors_beside(path: Path) -> Path:
    """Where ROPE_FACTORS is kept of a GGUF file at `path` that has holes in the place of tensors.

    Its bytes, and then their XXH3-128.
    """
    return path.with_name(f"{path.name}.rope_freqs")


def _kept_factors(path: Path, entry: TensorEntry) -> bytes:
    """Raises BadHeader for damaged bytes, and like `read_bytes`."""
    beside = factors_beside(path)
    kept = read_bytes(beside, 0, entry.num_bytes + 16)
    content, digest = kept[: entry.num_bytes], kept[entry.num_bytes :]
    if xxhash.xxh3_128_digest(content) != digest:
        raise BadHeader(f"{beside} differs from its hash: remove the model from the cache")
    return content


def _rope_factors(fields: Fields, raw: RawFields, entry: TensorEntry, *, is_sparse: bool) -> RawFields:
    """Scaling that divides each frequency by a number of the file, for texts of any length."""
    if entry.dtype is not DType.F32 or "rope_scaling" in raw:
        raise UnsupportedModel(
            f"{fields.file.path}: tensor {ROPE_FACTORS} of {entry.dtype.name} beside the rope.scaling of the"
            " metadata is not supported, only of F32 and alone"
        )
    path = fields.file.path.with_name(entry.file)
    content = _kept_factors(path, entry) if is_sparse else read_bytes(path, entry.begin, entry.end)
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


def _with_tiled_delta(row: Architecture, tensors: Tensors) -> Architecture:
    """llama.cpp reorders value heads, so that it can repeat key heads as a whole."""
    return _with_delta(row, DeltaLayout(is_tiled=True, has_rates=True))


def _with_grouped_delta(row: Architecture, tensors: Tensors) -> Architecture:
    """Older files have queries, keys, values and gates in one matrix, grouped by key head."""
    names = replace(row.names, packs=(_GROUPED_HEADS, *row.names.packs))
    is_grouped = any(name.endswith(f".{_GROUPED_ROWS.module}.weight") for name in tensors)
    if is_grouped:
        names = replace(names, packs=(_GROUPED_ROWS, *names.packs))
    layout = DeltaLayout(is_grouped=is_grouped, has_grouped_heads=True, has_rates=True)
    return _with_delta(replace(row, names=names), layout)


def _with_delta(row: Architecture, layout: DeltaLayout) -> Architecture:
    norms = replace(row.norms, kind=NormKind.RMS_WIDE)
    return replace(row, delta=layout, norms=norms, keys=row.keys | {"num_nextn_predict_layers"})


def _with_latents(row: Architecture, tensors: Tensors) -> Architecture:
    """A file without the rank of latents of queries has none; keys and values may be split by head."""
    assert row.latent is not None, "a family without latents"
    defaults = {key: value for key, value in row.defaults.items() if key != "q_lora_rank"}
    is_split = any(name.endswith(".attn_k_b.weight") for name in tensors)
    return replace(row, defaults=defaults, latent=replace(row.latent, is_split=is_split))


def _with_kimi_delta(row: Architecture, tensors: Tensors) -> Architecture:
    """Rates instead of their logarithms."""
    return replace(_with_latents(row, tensors), has_rates=True)


def _with_mamba(row: Architecture, tensors: Tensors) -> Architecture:
    """Rates instead of their logarithms; draft layers may be at the end."""
    assert row.mamba is not None, "a family without Mamba2"
    mamba = replace(row.mamba, has_rates=True)
    return replace(row, mamba=mamba, keys=row.keys | {"num_nextn_predict_layers"})


def _with_interleaved_mamba(row: Architecture, tensors: Tensors) -> Architecture:
    return _interleaved(_with_mamba(row, tensors), tensors)


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


_BARE_NORM = Pack(module="ffn_norm", roles=(TensorRole.FFN_NORM,), has_kind=False)
"""Falcon H1's has no "weight" in its name."""
_DELTA_NAMES = _names({TensorRole.FFN_NORM: "post_attention_norm"}, *_DELTA_PACKS)

FAMILIES: tuple[GgufFamily, ...] = (
    GgufFamily(architecture="llama", model_types=("llama", "mixtral"), read=read_llama, adapt=_interleaved),
    GgufFamily(architecture="qwen2", model_types=("qwen2",), read=read_qwen2),
    GgufFamily(architecture="qwen3", model_types=("qwen3",), read=read_qwen3),
    GgufFamily(architecture="qwen2moe", model_types=("qwen2_moe",), read=read_qwen2_moe),
    GgufFamily(architecture="qwen3moe", model_types=("qwen3_moe",), read=read_qwen3_moe),
    GgufFamily(
        architecture="gemma3", model_types=("gemma3_text",), read=read_gemma3, adapt=_with_whole_norms
    ),
    GgufFamily(
        architecture="gpt-oss",
        model_types=("gpt_oss",),
        read=read_gpt_oss,
        names=_names({TensorRole.FFN_NORM: "post_attention_norm"}, _SINKS),
    ),
    GgufFamily(
        architecture="deepseek2",
        model_types=("deepseek_v2", "deepseek_v3"),
        read=read_deepseek2,
        adapt=_with_latents,
        names=_names({}, _CHOICE_BIAS),
    ),
    GgufFamily(
        architecture="deepseek32",
        model_types=("deepseek_v32",),
        read=read_deepseek32,
        adapt=_with_latents,
        names=_names({}, _CHOICE_BIAS),
    ),
    GgufFamily(
        architecture="glm-dsa",
        model_types=("glm_moe_dsa",),
        read=read_glm_dsa,
        adapt=_with_latents,
        names=_names({}, _CHOICE_BIAS),
    ),
    GgufFamily(
        architecture="qwen3next",
        model_types=("qwen3_next",),
        read=read_qwen3_next,
        adapt=_with_grouped_delta,
        names=_DELTA_NAMES,
    ),
    GgufFamily(
        architecture="qwen35",
        model_types=("qwen3_5_text",),
        read=read_qwen35,
        adapt=_with_tiled_delta,
        names=_DELTA_NAMES,
    ),
    GgufFamily(
        architecture="qwen35moe",
        model_types=("qwen3_5_moe_text",),
        read=read_qwen35_moe,
        adapt=_with_tiled_delta,
        names=_DELTA_NAMES,
    ),
    GgufFamily(
        architecture="kimi-linear",
        model_types=("kimi_linear",),
        read=read_kimi_linear,
        adapt=_with_kimi_delta,
        names=_names({TensorRole.STATE_OUT: "attn_output"}, *_DELTA_PACKS, _CHOICE_BIAS),
    ),
    GgufFamily(
        architecture="granitehybrid",
        model_types=("granitemoehybrid",),
        read=read_granite_hybrid,
        adapt=_with_interleaved_mamba,
        names=_names({}, *_MAMBA_PACKS),
    ),
    *(
        GgufFamily(
            architecture=architecture,
            model_types=("nemotron_h",),
            read=read_nemotron_h,
            adapt=_with_mamba,
            names=_names({TensorRole.FFN_NORM: "attn_norm"}, *_MAMBA_PACKS, _CHOICE_BIAS),
        )
        for architecture in ("nemotron_h", "nemotron_h_moe")
    ),
    GgufFamily(
        architecture="falcon-h1",
        model_types=("falcon_h1",),
        read=read_falcon_h1,
        adapt=_with_mamba,
        names=_names({}, *_MAMBA_PACKS, _BARE_NORM),
    ),
)
_BY_NAME = {family.architecture: family for family in FAMILIES}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadConfig:
    """Metadata as a config.json, and the row of its family."""

    raw: RawFields
    row: Architecture


def read_config(file: GgufFile, tensors: Mapping[str, TensorEntry], *, is_sparse: bool) -> ReadConfig:
    """Read the metadata of a model's first file. Raises UnsupportedModel and BadConfig, with the key.

    With `is_sparse`, tensors are holes, see `factors_beside`.
    """
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
    row = family.adapt(replace(architecture_of(raw), names=_names_in(family, tensors)), tensors)
    if (factors := tensors.get(ROPE_FACTORS)) is None:
        return ReadConfig(raw=raw, row=row)
    scaling = _rope_factors(fields, raw, factors, is_sparse=is_sparse)
    row = replace(row, rope=replace(row.rope, has_length_factors=True))
    return ReadConfig(raw={**raw, "rope_scaling": scaling}, row=row)


def _names_in(family: GgufFamily, tensors: Tensors) -> NameTable:
    """The family's names, for files with gates and ups of experts in one tensor or in two."""
    if not any(".ffn_gate_up_exps." in name for name in tensors):
        return family.names
    return replace(family.names, packs=(_FUSED_EXPERTS, *family.names.packs))


def as_named(path: Path, tensors: Tensors, *, limit: int = MOST_TENSORS) -> dict[str, TensorEntry]:
    """The tensors under the names of a family: each expert's or head's part of a stack on its own.

    Without ROPE_FACTORS, which belong to the config. Raises BadHeader for parts of stacks beyond `limit`.
    """
    found: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        if name == ROPE_FACTORS:
            continue
        inner = name.split(".", 2)[-1]
        if inner in _SQUEEZED and len(entry.shape) == _SQUEEZED[inner][0]:
            at = _SQUEEZED[inner][1]
            found[name] = replace(entry, shape=(*entry.shape[:at], 1, *entry.shape[at:]))
        elif inner == "ssm_a" and name.replace(inner, "ssm_f_a.weight") in tensors:
            found[name] = replace(entry, shape=(1, 1, prod(entry.shape), 1))
        elif inner in _FLATTENED:
            found[name] = replace(entry, shape=(prod(entry.shape),))
        elif inner in _SHORT_CONVOLUTIONS and entry.shape:
            found[name] = replace(entry, shape=(prod(entry.shape[:-1]), 1, entry.shape[-1]))
        elif (stack := _STACK.fullmatch(name)) is not None and len(entry.shape) > 1:
            if len(found) + entry.shape[0] > limit:
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
