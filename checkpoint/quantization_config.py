"""Reads `quantization_config` of config.json, and hf_quant_config.json.

Activations and the KV cache are never quantised as a checkpoint asks: fields about them, and about how the
weights were made, have no effect. Any other unknown field or value is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from checkpoint.config_fields import RawConfig, flag, text
from checkpoint.dtypes import PackedDType
from checkpoint.errors import BadConfig, UnsupportedModel
from checkpoint.quantization import (
    NF4_BLOCK,
    Awq,
    Fp4,
    Fp4Layout,
    Gptq,
    Nf4,
    PackedInts,
    PackedModules,
    Quantization,
    Scaled,
    Scheme,
)

FIELD = "quantization_config"
_FORMER_FIELD = "compression_config"
"""Name in checkpoints of the first versions of compressed-tensors."""


def parse_quantization(raw: RawConfig) -> Quantization | None:
    """Read `quantization_config` of config.json, or the older `compression_config`; None without one.

    Raises UnsupportedModel for an unknown method, field or value, and BadConfig for a malformed one.
    """
    given = [raw[key] for key in (FIELD, _FORMER_FIELD) if raw.get(key)]
    if not given:
        return None
    found = given[0]
    if len(given) == 2 and given[1] != found:
        raise BadConfig(f"config fields {FIELD!r} and {_FORMER_FIELD!r} contradict each other: leave one out")
    if isinstance(found, Mapping) and raw.get("expert_dtype") is not None:
        found = {"expert_dtype": raw["expert_dtype"], **found}
    if not isinstance(found, Mapping):
        raise BadConfig(f"config field {FIELD!r} must be an object, is {found!r:.120}")
    # Configs of TensorRT Model Optimizer may lack the method.
    method = text(found, "quant_method") or ("modelopt" if "quant_algo" in found else None)
    if (parse := _METHODS.get(method or "")) is None:
        legal = ", ".join(_METHODS)
        raise UnsupportedModel(f"{FIELD} has quant_method {method!r}, which is not supported ({legal})")
    return parse(found)


_HISTORY = (
    "quant_method version producer run_compressed kv_cache_scheme kv_cache_quant_algo kv_cache_quant_method"
)
"""Of every method: the tool that made the weights, and the cache."""


def _refuse_unknown(found: RawConfig, known: str, where: str = FIELD) -> None:
    """Raise UnsupportedModel for a field that is neither in `known` nor null, empty, or history."""
    names = {*known.split(), *_HISTORY.split()}
    for key, value in found.items():
        if value is not None and value != {} and value != [] and key not in names:
            raise UnsupportedModel(f"config field '{where}.{key}' = {value!r:.120} is not supported")


def _require(found: RawConfig, key: str, *allowed: object, where: str = FIELD) -> None:
    """Raise UnsupportedModel unless the field has one of these values; None also stands for a missing one."""
    value = found.get(key)
    if not any(type(value) is type(one) and value == one for one in allowed):
        legal = ", ".join(repr(one) for one in allowed if one is not None)
        raise UnsupportedModel(
            f"config field '{where}.{key}' = {value!r:.120} is not supported (supported: {legal})"
        )


def _patterns(found: RawConfig, *keys: str, where: str = FIELD) -> tuple[str, ...]:
    """The patterns in list fields, checked."""
    patterns: list[str] = []
    for key in keys:
        value = found.get(key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise BadConfig(f"config field '{where}.{key}' must be a list of names, is {value!r:.120}")
        patterns += value
    for pattern in patterns:
        if pattern.startswith("re:"):
            _compile(pattern)
    return tuple(patterns)


def _compile(pattern: str) -> None:
    try:
        re.compile(pattern[3:])
    except (re.error, OverflowError, RecursionError) as error:
        raise BadConfig(f"{FIELD} has {pattern!r:.120}, not a regular expression: {error}") from error


def _group_size(found: RawConfig, key: str, *, default: int | None = None, where: str = FIELD) -> int:
    """Columns of a group; 0 for all columns, which configs write as -1."""
    value = found.get(key, default)
    if value == -1:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 2**20:
        raise BadConfig(f"config field '{where}.{key}' must be a number of elements or -1, is {value!r:.120}")
    return value


def _block(found: RawConfig, key: str, where: str = FIELD) -> tuple[int, int]:
    value = found.get(key)
    if isinstance(value, list) and all(type(size) is int and 0 < size <= 2**20 for size in value):
        sizes: list[int] = value
        if len(sizes) == 2:
            return sizes[0], sizes[1]
    raise BadConfig(f"config field '{where}.{key}' must be two numbers of elements, is {value!r:.120}")


_EVERYTHING = "*"
_EXPERTS = r"re:(.*\.)?experts\.\d+\."


def _parse_fp8(found: RawConfig) -> Quantization:
    """fp8 of DeepSeek, transformers and AutoFP8. `activation_scheme` is about activations only.

    DeepSeek's configs do not say that routers are plain. `expert_dtype` is a field of DeepSeek V4.
    """
    _refuse_unknown(
        found,
        "weight_block_size modules_to_not_convert ignored_layers fmt scale_fmt"
        " activation_scheme dequantize expert_dtype is_checkpoint_fp8_serialized",
    )
    _require(found, "is_checkpoint_fp8_serialized", True, None)
    _require(found, "expert_dtype", "fp4", "fp8", None)
    _require(found, "fmt", "e4m3", "float8_e4m3fn", None)
    _require(found, "scale_fmt", "float", "ue8m0", None)
    has_blocks = found.get("weight_block_size") is not None
    block = _block(found, "weight_block_size") if has_blocks else (0, 0)
    scheme = Scaled(dtype=PackedDType.F8_E4M3, block=block, scale="weight_scale_inv")
    experts = PackedModules(_EXPERTS, Fp4(layout=Fp4Layout.DEEPSEEK, is_nv=False))
    has_fp4 = found.get("expert_dtype") == "fp4"
    return Quantization(
        targets=(*((experts,) if has_fp4 else ()), PackedModules(_EVERYTHING, scheme)),
        ignore=_patterns(found, "modules_to_not_convert", "ignored_layers"),
    )


def _parse_gptq(found: RawConfig) -> Quantization:
    """The order of columns (`desc_act`) is in the group indexes of the tensors; the rest is history."""
    _refuse_unknown(
        found,
        "bits group_size checkpoint_format format method desc_act sym pack_dtype lm_head damp_percent"
        " damp_auto_increment static_groups true_sequential model_name_or_path model_file_base_name meta"
        " dataset tokenizer batch_size block_name_to_quantize module_name_preceding_first_block pad_token_id"
        " modules_in_block_to_quantize use_cuda_fp16 model_seqlen cache_block_outputs use_exllama"
        " max_input_length exllama_config disable_exllama backend is_marlin_format act_group_aware mse"
        " hyb_act v2 v2_alpha quantizer uri offload_to_disk offload_to_disk_path pack_impl parallel_packing"
        " use_marlin mock_quantization dynamic",
    )
    _refuse_dynamic(found)
    _require(found, "bits", 4, 8)
    for key in ("checkpoint_format", "format"):
        _require(found, key, "gptq", "gptq_v2", None)
    _require(found, "method", "gptq", None)
    _require(found, "pack_dtype", "int32", None)
    for key in ("is_marlin_format", "use_marlin", "mock_quantization"):
        _require(found, key, False, None)
    is_v2 = (found.get("checkpoint_format") or found.get("format")) == "gptq_v2"
    scheme = Gptq(
        bits=4 if found["bits"] == 4 else 8,
        group=_group_size(found, "group_size"),
        zero_offset=0 if is_v2 else 1,
        is_sorted=flag(found, "desc_act", default=False),
    )
    return Quantization(targets=(PackedModules(_EVERYTHING, scheme),))


def _refuse_dynamic(found: RawConfig) -> None:
    """Raise UnsupportedModel for rules that change a module's bits or groups.

    Those that begin with "-:" leave modules plain, as their stored tensors say.
    """
    rules = found.get("dynamic") or {}
    if not isinstance(rules, Mapping):
        raise BadConfig(f"config field '{FIELD}.dynamic' must be an object, is {rules!r:.120}")
    for pattern, changes in rules.items():
        if not pattern.startswith("-:"):
            raise UnsupportedModel(
                f"config field '{FIELD}.dynamic' = {{{pattern!r:.120}: {changes!r:.120}}} is not supported,"
                " only rules that begin with '-:' are"
            )


def _parse_awq(found: RawConfig) -> Quantization:
    _refuse_unknown(
        found,
        "bits group_size zero_point modules_to_not_convert backend do_fuse"
        " fuse_max_seq_len modules_to_fuse exllama_config",
    )
    _require(found, "bits", 4)
    _require(found, "version", "gemm", "GEMM")
    _require(found, "zero_point", True)
    scheme = Awq(group=_group_size(found, "group_size"))
    # AutoAWQ searches these as substrings of a module's name.
    ignore = tuple(f"*{pattern}*" for pattern in _patterns(found, "modules_to_not_convert"))
    return Quantization(targets=(PackedModules(_EVERYTHING, scheme),), ignore=ignore)


def _parse_bitsandbytes(found: RawConfig) -> Quantization:
    """The compute dtype is the run dtype here."""
    _refuse_unknown(
        found,
        "_load_in_4bit _load_in_8bit load_in_4bit load_in_8bit bnb_4bit_compute_dtype bnb_4bit_blocksize"
        " bnb_4bit_quant_storage bnb_4bit_quant_type bnb_4bit_use_double_quant llm_int8_skip_modules"
        " llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight llm_int8_threshold",
    )
    for key in ("load_in_8bit", "_load_in_8bit"):
        _require(found, key, False, None)
    _require(found, "load_in_4bit", True)
    _require(found, "bnb_4bit_quant_type", "nf4")
    _require(found, "bnb_4bit_quant_storage", "uint8", None)
    _require(found, "bnb_4bit_blocksize", NF4_BLOCK, None)
    scheme = Nf4(is_nested=flag(found, "bnb_4bit_use_double_quant", default=False))
    return Quantization(
        targets=(PackedModules(_EVERYTHING, scheme),), ignore=_patterns(found, "llm_int8_skip_modules")
    )


def _parse_mxfp4(found: RawConfig) -> Quantization:
    _refuse_unknown(found, "modules_to_not_convert dequantize")
    scheme = Fp4(layout=Fp4Layout.GPT_OSS, is_nv=False)
    return Quantization(
        targets=(PackedModules(_EVERYTHING, scheme),), ignore=_patterns(found, "modules_to_not_convert")
    )


def _parse_modelopt(found: RawConfig) -> Quantization:
    """`config_groups` repeat the algorithm."""
    _refuse_unknown(found, "quant_algo group_size ignore exclude_modules config_groups")
    _require(found, "quant_algo", "FP8", "NVFP4")
    scheme: Scheme = Scaled(dtype=PackedDType.F8_E4M3, block=(0, 0))
    if found["quant_algo"] == "NVFP4":
        _require(found, "group_size", 16, None)
        scheme = Fp4(layout=Fp4Layout.MODELOPT, is_nv=True)
    return Quantization(
        targets=(PackedModules(_EVERYTHING, scheme),),
        ignore=_patterns(found, "ignore", "exclude_modules"),
    )


def _parse_compressed_tensors(found: RawConfig) -> Quantization:
    """Activations, observers and history have no effect on stored weights."""
    _refuse_unknown(
        found,
        "config_groups format ignore sparsity_config transform_config quantization_status"
        " global_compression_ratio",
    )
    _refuse_sparse(found)
    _require(found, "transform_config", {}, {"config_groups": {}}, None)
    _require(found, "quantization_status", "initialized", "compressed", "frozen", None)
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise BadConfig(f"config field '{FIELD}.config_groups' must be an object, is {groups!r:.120}")
    targets = [target for name, group in groups.items() for target in _parse_group(found, name, group)]
    # Names take precedence over expressions, and these over all modules.
    targets.sort(key=lambda one: (one.pattern == _EVERYTHING, one.pattern.startswith("re:")))
    return Quantization(
        targets=tuple(targets),
        ignore=_patterns(found, "ignore"),
    )


def _refuse_sparse(found: RawConfig) -> None:
    """Raise UnsupportedModel for weights that are stored without their zeros."""
    sparsity = found.get("sparsity_config") or {"format": "dense"}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise UnsupportedModel(
            f"config field '{FIELD}.sparsity_config' = {sparsity!r:.120} is not supported, only format"
            " 'dense' is"
        )


def _parse_group(found: RawConfig, name: object, group: object) -> list[PackedModules]:
    where = f"{FIELD}.config_groups.{name}"
    if not isinstance(group, Mapping):
        raise BadConfig(f"config field '{where}' must be an object, is {group!r:.120}")
    _refuse_unknown(group, "targets weights input_activations output_activations format", where)
    weights = group.get("weights")
    if weights is None:
        return []  # activations alone
    if not isinstance(weights, Mapping):
        raise BadConfig(f"config field '{where}.weights' must be an object, is {weights!r:.120}")
    where = f"{where}.weights"
    _refuse_unknown(
        weights,
        "num_bits type strategy symmetric group_size block_structure actorder dynamic observer"
        " observer_kwargs scale_dtype zp_dtype",
        where,
    )
    _require(weights, "dynamic", False, None, where=where)
    form = text(group, "format") or text(found, "format")
    if (parse := _FORMATS.get(form or "")) is None:
        legal = ", ".join(_FORMATS)
        raise UnsupportedModel(f"{FIELD} has format {form!r}, which is not supported ({legal})")
    scheme = parse(weights, where)
    patterns = _patterns(group, "targets", where=where.removesuffix(".weights"))
    return [PackedModules(_EVERYTHING if one == "Linear" else one, scheme) for one in patterns]


def _scaled_weights(weights: RawConfig, where: str) -> Scheme:
    """float-quantized and int-quantized."""
    _require(weights, "num_bits", 8, where=where)
    _require(weights, "type", "float", "int", where=where)
    _require(weights, "strategy", "tensor", "channel", "group", "block", where=where)
    _require(weights, "actorder", "weight", "static", False, None, where=where)
    is_float = weights["type"] == "float"
    match weights["strategy"]:
        case "tensor":
            block = (0, 0)
        case "channel":
            block = (1, 0)
        case "group":
            block = (1, _group_size(weights, "group_size", where=where))
        case _:
            block = _block(weights, "block_structure", where)
    return Scaled(
        dtype=PackedDType.F8_E4M3 if is_float else PackedDType.I8,
        block=block,
        is_symmetric=flag(weights, "symmetric", default=True),
    )


def _packed_weights(weights: RawConfig, where: str) -> Scheme:
    """pack-quantized."""
    _require(weights, "num_bits", 4, 8, where=where)
    _require(weights, "type", "int", where=where)
    _require(weights, "strategy", "channel", "group", where=where)
    _require(weights, "actorder", "group", "dynamic", "weight", "static", True, False, None, where=where)
    has_groups = weights["strategy"] == "group"
    return PackedInts(
        bits=4 if weights["num_bits"] == 4 else 8,
        group=_group_size(weights, "group_size", where=where) if has_groups else 0,
        is_symmetric=flag(weights, "symmetric", default=True),
        has_group_index=weights.get("actorder") in ("group", "dynamic", True),
    )


def _fp4_weights(weights: RawConfig, where: str, *, is_nv: bool) -> Scheme:
    _require(weights, "num_bits", 4, where=where)
    _require(weights, "type", "float", where=where)
    _require(weights, "symmetric", True, None, where=where)
    scheme = Fp4(layout=Fp4Layout.COMPRESSED_TENSORS, is_nv=is_nv)
    _require(weights, "group_size", scheme.group, where=where)
    return scheme


def _nvfp4_weights(weights: RawConfig, where: str) -> Scheme:
    return _fp4_weights(weights, where, is_nv=True)


def _mxfp4_weights(weights: RawConfig, where: str) -> Scheme:
    return _fp4_weights(weights, where, is_nv=False)


_FORMATS: Mapping[str, Callable[[RawConfig, str], Scheme]] = {
    "float-quantized": _scaled_weights,
    "int-quantized": _scaled_weights,
    "naive-quantized": _scaled_weights,
    "pack-quantized": _packed_weights,
    "nvfp4-pack-quantized": _nvfp4_weights,
    "mxfp4-pack-quantized": _mxfp4_weights,
}

_METHODS: Mapping[str, Callable[[RawConfig], Quantization]] = {
    "fp8": _parse_fp8,
    "compressed-tensors": _parse_compressed_tensors,
    "modelopt": _parse_modelopt,
    "mxfp4": _parse_mxfp4,
    "gptq": _parse_gptq,
    "awq": _parse_awq,
    "bitsandbytes": _parse_bitsandbytes,
}


def modelopt_config(separate: RawConfig) -> dict[str, object]:
    """`quantization_config` as in the file hf_quant_config.json. Raises BadConfig."""
    found = separate.get("quantization")
    if not isinstance(found, Mapping):
        raise BadConfig(f"hf_quant_config.json must have an object 'quantization', has {found!r:.120}")
    return {"quant_method": "modelopt", **found}
