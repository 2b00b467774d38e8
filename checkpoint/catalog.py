"""The families and weight formats that are served, described for people, and how each is verified."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from checkpoint.architectures import ARCHITECTURES
from checkpoint.blueprint import NormKind, Placement
from checkpoint.dtypes import BlockDType, DType
from checkpoint.family_rules import Architecture, EmbeddingScale, RecurrentLayers, Rotation
from checkpoint.gguf.families import FAMILIES as GGUF_FAMILIES
from checkpoint.rope_config import RopeRule
from checkpoint.wrappers import WRAPPERS

TRANSFORMERS = "5.23"
"""Version of transformers that families are compared with."""
NUM_CUTS = 6
"""Ways to split a model into stages that greedy tokens are compared at."""
BF16_SPREAD = 0.06
"""Root mean square by which bfloat16 logits may differ from transformers', in units of their spread.

Of transformers' in bfloat16 or in float32, whichever are nearer: where rounding decides the choice of an
expert, transformers' own two differ by more on some CPUs (DeepSeek V4: 0.062; ours from float32: 0.020).
"""

FAMILY_CHECK = (
    f"transformers {TRANSFORMERS}: float32 greedy tokens equal at {NUM_CUTS} cuts, bf16 logits within"
    f" {BF16_SPREAD:g} of their spread (root mean square), each field of a plan changes the logits"
)
"""How every family is verified; tests/unit/stage_worker/model/test_families.py does it."""
OTHER_FAMILIES = (
    f"Any other causal decoder of transformers {TRANSFORMERS} that uses its attention interface is served by"
    " transformers' own layers and Stageline's paged cache: slower and less tested."
)
FORMAT_CHECK = (
    f"bit-exact weights against an independent unpacker; tokens equal transformers {TRANSFORMERS} with the"
    " unpacked weights"
)
"""How every weight format is verified; tests/quantized.py has the independent unpackers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyEntry:
    """A family in words; `wrappers` are the model types with images whose text model it is."""

    title: str
    model_type: str
    class_name: str
    differences: tuple[str, ...]
    windows: str
    wrappers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatEntry:
    """A `quant_method` of quantization_config, and which of its variants are read."""

    method: str
    variants: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufEntry:
    """A `general.architecture` of GGUF files, and the model types that it stands for."""

    architecture: str
    model_types: tuple[str, ...]


GGUF_ARCHITECTURES = tuple(
    GgufEntry(architecture=family.architecture, model_types=family.model_types) for family in GGUF_FAMILIES
)
GGUF_TYPES = tuple(dtype.name for dtype in (*DType, *BlockDType))
"""Types of tensors in GGUF files."""

WEIGHT_FORMATS = (
    FormatEntry(
        method="fp8",
        variants="E4M3 with a scale per block (`weight_block_size`) or per tensor; scales F32, BF16 or E8M0;"
        " experts of DeepSeek V4 in MXFP4 (`expert_dtype` fp4)",
    ),
    FormatEntry(
        method="compressed-tensors",
        variants="`float-quantized`, `int-quantized` and `naive-quantized` with 8 bits, per tensor, channel,"
        " group or block; `pack-quantized` with 4 or 8 bits, symmetric or not, with `actorder`;"
        " `nvfp4-pack-quantized`; `mxfp4-pack-quantized`; several groups (`mixed-precision`)",
    ),
    FormatEntry(method="modelopt", variants="`FP8` and `NVFP4`, also from hf_quant_config.json"),
    FormatEntry(method="mxfp4", variants="blocks and scales as in gpt-oss"),
    FormatEntry(method="gptq", variants="4 or 8 bits, both `checkpoint_format`s, any order of groups"),
    FormatEntry(method="awq", variants="`gemm` with 4 bits"),
    FormatEntry(method="bitsandbytes", variants="`nf4`, with and without nested scales"),
)


def families() -> tuple[FamilyEntry, ...]:
    """Every family, in the order of their rows."""
    return tuple(_family(row) for row in ARCHITECTURES)


def _family(row: Architecture) -> FamilyEntry:
    return FamilyEntry(
        title=row.title or row.class_name.removesuffix("ForCausalLM"),
        model_type=row.model_type,
        class_name=row.class_name,
        differences=differences(row),
        windows=row.windows.value if not row.windows.has_pattern else _pattern(row),
        wrappers=tuple(one.model_type for one in WRAPPERS if row.model_type in one.text_types),
    )


def _pattern(row: Architecture) -> str:
    """The rule, with the family's default for n."""
    return f"{row.windows.value} (n = {row.window_pattern})"


def differences(row: Architecture) -> tuple[str, ...]:
    """Differences of a family from Llama, read from its row; a field without words is shown by its name."""
    found: list[str] = []
    for field in fields(row):
        if field.name in _UNSHOWN or getattr(row, field.name) == getattr(_LLAMA, field.name):
            continue
        describe = _WORDS.get(field.name)
        found += [field.name.replace("_", " ")] if describe is None else describe(row)
    return tuple(found)


def _norms(row: Architecture) -> list[str]:
    rule = row.norms
    words = [] if rule.kind is NormKind.RMS else [f"norms: {rule.kind.value}"]
    words += ["norms with bias"] if rule.has_bias else []
    words += [] if rule.placement is Placement.BEFORE else [f"norms: {rule.placement.value}"]
    if rule.qk_span is not None:
        place = "after rotation" if rule.is_qk_after_rotation else "before rotation"
        words.append(f"norms of queries and keys per {rule.qk_span.value}, {place}")
    return [*words, "norm of values without weight"] if rule.has_value_norm else words


def _rope(row: Architecture) -> list[str]:
    rule = row.rope
    words = {
        f"rotary base {rule.theta:g} by default": rule.theta != RopeRule().theta,
        "another rotary base of windowed layers": rule.local_theta is not None,
        "rotary embeddings per type of layer": rule.is_per_type,
        "partial rotary embeddings": rule.partial is not None,
        "proportional rotary embeddings": rule.has_proportional,
        "interleaved rotary pairs": rule.is_interleaved,
        "longrope": rule.has_length_factors,
        "dynamic rotary base with alpha": rule.has_fixed_alpha,
        "queries that grow with their position": rule.has_query_growth,
    }
    return [text for text, is_true in words.items() if is_true]


def _scales(row: Architecture) -> list[str]:
    rule = row.scales
    words = {
        f"embeddings times {rule.embedding.value}": rule.embedding is not EmbeddingScale.NONE,
        f"attention scale {rule.attention}": rule.attention is not None,
        "attention scale from query_pre_attn_scalar": rule.query_scalar is not None,
        "residual, attention and logit multipliers": rule.has_multipliers,
        "multipliers of inputs and outputs of products": rule.has_row_scales,
        "logits times logit_scale": rule.logit_scale is not None,
        "soft caps of scores and logits": rule.has_caps,
    }
    return [text for text, is_true in words.items() if is_true]


def _biases(row: Architecture) -> list[str]:
    rule, llama = row.biases, _LLAMA.biases
    if rule.qkv_default and rule.default:
        return ["biases of all projections"]
    if rule.qkv_default:
        return ["biases of queries, keys and values"]
    if rule.qkv is None:
        return ["no biases of attention"]
    if rule.feed_forward is None and (rule.qkv, rule.o) == (llama.qkv, llama.o):
        return ["no biases of the MLP"]
    keys = dict.fromkeys(key for key in (rule.qkv, rule.o, rule.feed_forward) if key)
    return [f"biases if {' or '.join(keys)}"]


def _experts(row: Architecture) -> list[str]:
    rule = row.experts
    if rule is None:
        return []
    words = [f"experts in layers: {rule.layers.value}", f"router scores: {rule.score.value}"]
    words += [f"groups ranked by {rule.group_score.value}"] if rule.has_groups else []
    is_shared = rule.shared_width_key is not None or rule.shared_count_key is not None
    words += ["clamped SwiGLU"] if rule.clamp is not None else []
    words += ["experts of the first layers by a table of tokens"] if rule.has_hashes else []
    words += [] if rule.is_gated else ["experts without gate"]
    words += [f"experts on latents if {rule.latent_key}"] if rule.latent_key else []
    words += ["biases of experts and router"] if rule.has_bias else []
    if rule.has_branches:
        return [*words, "experts beside the MLP, each with norms"]
    return [*words, "shared expert"] if is_shared else words


def _latent(row: Architecture) -> list[str]:
    rule = row.latent.indexer if row.latent is not None else None
    if rule is None:
        is_rotated = row.latent is None or row.latent.is_rotated
        return ["latent attention" if is_rotated else "latent attention without rotary embeddings"]
    words = ["latent attention to tokens that an indexer chooses"]
    words += ["layers may share a choice"] if rule.can_share else []
    words += ["attention sinks"] if row.latent is not None and row.latent.has_sinks else []
    return words + (["gates of attention's output"] if row.latent and row.latent.has_output_gate else [])


def _mamba(row: Architecture) -> list[str]:
    if row.mamba is not None and row.mamba.layers is RecurrentLayers.BLOCKS:
        return ["layers have Mamba2, attention, an MLP or experts alone"]
    if row.mamba is not None and row.mamba.layers is RecurrentLayers.BESIDE:
        return ["Mamba2 beside attention in each layer"]
    return ["Mamba2 in most layers"]


def _names(row: Architecture) -> list[str]:
    fused = [pack.module for pack in row.names.packs if len(pack.roles) > 1]
    return [f"fused {' and '.join(fused)}"] if fused else ["other tensor names"]


_LLAMA = next(row for row in ARCHITECTURES if row.model_type == "llama")
_UNSHOWN = {
    *(
        "model_type",
        "class_name",
        "class_aliases",
        "title",
        "keys",
        "defaults",
        "head_dim",
        "has_kv_heads_default",
    ),
    *("windows", "window_pattern", "activation_key", "fixed", "reasons", "same", "other_keys"),
}
"""Names, defaults, and what other columns show."""
_WORDS: Mapping[str, Callable[[Architecture], list[str]]] = {
    "names": _names,
    "rotation": lambda row: [] if row.rotation is Rotation.ALL else [f"rotated layers: {row.rotation.value}"],
    "rope": _rope,
    "biases": _biases,
    "norms": _norms,
    "activation": lambda row: [f"activation {row.activation}"],
    "is_gated": lambda row: ["MLP without gate"],
    "has_sinks": lambda row: ["attention sinks"],
    "scales": _scales,
    "experts": _experts,
    "latent": _latent,
    "delta": lambda row: ["Gated DeltaNet in most layers"],
    "has_kimi_delta": lambda row: ["Kimi Delta Attention in most layers"],
    "is_compressed": lambda row: [
        "attention to a window of shared keys, and to entries of earlier tokens",
        "output projected by groups of heads",
    ],
    "mamba": _mamba,
    "width_key": lambda row: [f"width of the MLP: {row.width_key}"],
    "has_output_gate": lambda row: ["gates of attention's output"],
    "streams": lambda row: [] if row.streams is None else [row.streams.value],
    "has_block_indexer": lambda row: ["attention to blocks of tokens that an indexer chooses"],
    "has_ngrams": lambda row: ["embeddings of hashed n-grams in some layers"],
    "aliases": lambda row: [f"also named {name}" for name in sorted(row.aliases)],
    "global_head_dim": lambda row: [
        "other KV heads and head width with full attention",
        "values projected like keys if attention_k_eq_v",
    ],
    "has_layer_scale": lambda row: ["output of each layer scaled"],
    "is_tied": lambda row: ["tied head by default"],
}
