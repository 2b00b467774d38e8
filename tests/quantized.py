"""Writes small quantised checkpoints of random codes, with an oracle of their weights in numpy.

Written from the formats' specifications, without torch and without the code under test: stored tensors are
bytes, and the oracle decodes every bit itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
_DTYPES = {"I8": np.int8, "U8": np.uint8, "I32": np.int32, "I64": np.int64, "F16": np.float16}


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: safetensors' dtype, shape, bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def stored(dtype: str, array: NDArray[Any]) -> Stored:
    """F32, F16 and integers as they are; BF16, F8_E4M3 and F8_E8M0 are given by their bits."""
    kinds: Mapping[str, Any] = {
        "F32": np.float32,
        "BF16": np.uint16,
        "F8_E4M3": np.uint8,
        "F8_E8M0": np.uint8,
    }
    data = np.ascontiguousarray(array.astype(kinds.get(dtype) or _DTYPES[dtype], casting="same_kind"))
    return Stored(dtype, array.shape, data.tobytes())


def write_safetensors(path: Path, tensors: Mapping[str, Stored]) -> None:
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        offsets = [offset, offset + len(tensor.data)]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        offset = offsets[1]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(t.data for t in tensors.values()))


def e4m3_values() -> Floats:
    """The 256 values of F8_E4M3: bias 7, no infinity, NaN with all bits set."""
    values = []
    for code in range(256):
        sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
        if exponent == 0:
            value = mantissa / 8 * 2.0**-6
        elif exponent == 15 and mantissa == 7:
            value = np.nan
        else:
            value = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values.append(sign * value)
    return np.array(values, dtype=np.float32)


def e2m1_values() -> Floats:
    """The 16 values of 4-bit floats: bias 1."""
    values = []
    for code in range(16):
        exponent, mantissa = code >> 1 & 3, code & 1
        value = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        values.append(-value if code & 8 else value)
    return np.array(values, dtype=np.float32)


def bf16_bits(values: Floats) -> NDArray[np.uint16]:
    """Truncates."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def from_bf16_bits(bits: NDArray[np.uint16]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


E4M3, E2M1 = e4m3_values(), e2m1_values()
Rng = np.random.Generator
Written = tuple[dict[str, Stored], Floats]
"""Stored tensors of a matrix, and its weights."""
Writer = Callable[[Rng, str, int, int], Written]
"""Writes matrix "X.weight" [out, in] of random codes."""


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _f8(rng: Rng, *shape: int) -> NDArray[np.uint8]:
    """Random codes with values up to 28 and without NaN."""
    codes = rng.integers(0, 0x60, shape, dtype=np.uint8)
    return codes | (rng.integers(0, 2, shape, dtype=np.uint8) << 7)


def _positive(rng: Rng, least: float, most: float, *shape: int) -> Floats:
    return rng.uniform(least, most, shape).astype(np.float32)


def _expanded(grid: Floats, block: tuple[int, int], rows: int, columns: int) -> Floats:
    """A grid's number for each element, one by one."""
    height, width = (size or most for size, most in zip(block, (rows, columns), strict=True))
    return np.array(
        [[grid[i // height, j // width] for j in range(columns)] for i in range(rows)], np.float32
    )


def _grid_shape(block: tuple[int, int], rows: int, columns: int) -> tuple[int, int]:
    height, width = (size or most for size, most in zip(block, (rows, columns), strict=True))
    return -(-rows // height), -(-columns // width)


def fp8(
    block: tuple[int, int],
    *,
    scale: str = "weight_scale",
    dtype: str = "F32",
    shape: tuple[int, ...] | None = None,
) -> Writer:
    def write(rng: Rng, name: str, rows: int, columns: int) -> Written:
        codes = _f8(rng, rows, columns)
        grid_shape = _grid_shape(block, rows, columns)
        if dtype == "F8_E8M0":
            exponents = rng.integers(119, 123, grid_shape, dtype=np.uint8)
            grid, saved = np.float32(2.0) ** (exponents.astype(np.float32) - 127), exponents
        elif dtype == "BF16":
            bits = bf16_bits(_positive(rng, 0.01, 0.04, *grid_shape))
            grid, saved = from_bf16_bits(bits), bits
        else:
            grid = saved = _positive(rng, 0.01, 0.04, *grid_shape)
        weights = E4M3[codes] * _expanded(grid, block, rows, columns)
        scales = stored(dtype, saved if shape is None else saved.reshape(shape))
        return {name: stored("F8_E4M3", codes), f"{_module(name)}.{scale}": scales}, weights

    return write


def int8(block: tuple[int, int], *, is_symmetric: bool = True) -> Writer:
    def write(rng: Rng, name: str, rows: int, columns: int) -> Written:
        codes = rng.integers(-128, 128, (rows, columns), dtype=np.int8)
        grid_shape = _grid_shape(block, rows, columns)
        grid = _positive(rng, 0.001, 0.004, *grid_shape).astype(np.float16)
        tensors = {name: stored("I8", codes), f"{_module(name)}.weight_scale": stored("F16", grid)}
        zeros = np.zeros(grid_shape, dtype=np.int8)
        if not is_symmetric:
            zeros = rng.integers(-128, 128, grid_shape, dtype=np.int8)
            tensors[f"{_module(name)}.weight_zero_point"] = stored("I8", zeros)
        zero = _expanded(zeros.astype(np.float32), block, rows, columns)
        scale = _expanded(grid.astype(np.float32), block, rows, columns)
        return tensors, (codes.astype(np.float32) - zero) * scale

    return write


def packed(numbers: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Numbers [n, m] in integers along the last axis, element j at bit j * bits."""
    per_word = 32 // bits
    rows, columns = numbers.shape
    words = np.zeros((rows, -(-columns // per_word)), dtype=np.uint32)
    for column in range(columns):
        words[:, column // per_word] |= numbers[:, column].astype(np.uint32) << (column % per_word * bits)
    return words.view(np.int32)


def _ordered(rng: Rng, index: NDArray[Any], *, is_shared: bool) -> NDArray[Any]:
    """Groups of columns in some order: the same for all matrices of one input, as calibration finds it."""
    return (np.random.default_rng(len(index)) if is_shared else rng).permutation(index)


def pack_quantized(
    bits: int, group: int, *, is_symmetric: bool = True, has_group_index: bool = False
) -> Writer:
    def write(rng: Rng, name: str, rows: int, columns: int) -> Written:
        module, size = _module(name), group or columns
        groups = columns // size
        codes = rng.integers(0, 1 << bits, (rows, columns), dtype=np.uint8)
        zeros = np.full((rows, groups), 1 << (bits - 1), dtype=np.uint8)
        scales = bf16_bits(_positive(rng, 0.5, 2.0, rows, groups) / np.float32(8 << bits))
        tensors = {
            f"{module}.weight_packed": stored("I32", packed(codes, bits)),
            f"{module}.weight_scale": stored("BF16", scales),
            f"{module}.weight_shape": stored("I64", np.array([rows, columns])),
        }
        index = np.arange(columns) // size
        if has_group_index:
            index = _ordered(rng, index, is_shared=True)
            tensors[f"{module}.weight_g_idx"] = stored("I32", index)
        if not is_symmetric:
            zeros = rng.integers(0, 1 << bits, (rows, groups), dtype=np.uint8)
            tensors[f"{module}.weight_zero_point"] = stored(
                "I32", np.ascontiguousarray(packed(zeros.T, bits).T)
            )
        difference = codes.astype(np.float32) - zeros[:, index].astype(np.float32)
        return tensors, difference * from_bf16_bits(scales)[:, index]

    return write


def _fp4_codes(rng: Rng, rows: int, columns: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Codes [rows, columns], and their bytes with the even element in the low half."""
    codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    return codes, codes[:, 0::2] | codes[:, 1::2] << 4


def nvfp4(*, is_modelopt: bool) -> Writer:
    def write(rng: Rng, name: str, rows: int, columns: int) -> Written:
        module = _module(name)
        codes, octets = _fp4_codes(rng, rows, columns)
        scales = rng.integers(0x20, 0x7F, (rows, columns // 16), dtype=np.uint8)
        each = np.repeat(E4M3[scales], 16, axis=1)
        last = _positive(rng, 0.0007, 0.0014, 1)
        if is_modelopt:
            tensors = {name: octets, f"{module}.weight_scale_2": last.reshape(())}
            weights = E2M1[codes] * (each * last)
        else:
            last = np.float32(1.0) / last
            tensors = {f"{module}.weight_packed": octets, f"{module}.weight_global_scale": last}
            weights = E2M1[codes] * (each / last)
        written = {key: stored("U8" if value is octets else "F32", value) for key, value in tensors.items()}
        return written | {f"{module}.weight_scale": stored("F8_E4M3", scales)}, weights

    return write


def mxfp4(*, is_gpt_oss: bool) -> Writer:
    def write(rng: Rng, name: str, rows: int, columns: int) -> Written:
        codes, octets = _fp4_codes(rng, rows, columns)
        scales = rng.integers(121, 125, (rows, columns // 32), dtype=np.uint8)
        weights = E2M1[codes] * np.repeat(np.float32(2.0) ** (scales.astype(np.float32) - 127), 32, axis=1)
        if is_gpt_oss:
            blocks = octets.reshape(rows, columns // 32, 16)
            return {f"{name}_blocks": stored("U8", blocks), f"{name}_scales": stored("U8", scales)}, weights
        module = _module(name)
        return {
            f"{module}.weight_packed": stored("U8", octets),
            f"{module}.weight_scale": stored("U8", scales),
        }, weights

    return write


def mxfp4_of_deepseek(rng: Rng, name: str, rows: int, columns: int) -> Written:
    """Signed bytes, and exponents as their own dtype."""
    codes, octets = _fp4_codes(rng, rows, columns)
    scales = rng.integers(121, 125, (rows, columns // 32), dtype=np.uint8)
    weights = E2M1[codes] * np.repeat(np.float32(2.0) ** (scales.astype(np.float32) - 127), 32, axis=1)
    return {
        name: stored("I8", octets.view(np.int8)),
        f"{_module(name)}.scale": stored("F8_E8M0", scales),
    }, weights


def gptq(
    bits: int,
    group: int,
    *,
    is_v2: bool = False,
    has_order: bool = True,
    shares_order: bool = True,
    has_index: bool = True,
) -> Writer:
    def write(rng: Rng, name: str, rows: int, columns: int) -> Written:
        module, size = _module(name), group or columns
        groups = columns // size
        codes = rng.integers(0, 1 << bits, (columns, rows), dtype=np.uint8)
        zeros = rng.integers(0, 1 << bits, (groups, rows), dtype=np.uint8)
        scales = (_positive(rng, 0.5, 2.0, groups, rows) / np.float32(8 << bits)).astype(np.float16)
        index = np.arange(columns) // size
        if has_order:
            index = _ordered(rng, index, is_shared=shares_order)
        zero = zeros.astype(np.float32) + (0 if is_v2 else 1)
        weights = (codes.astype(np.float32) - zero[index]) * scales.astype(np.float32)[index]
        tensors = {
            f"{module}.qweight": stored("I32", np.ascontiguousarray(packed(codes.T, bits).T)),
            f"{module}.qzeros": stored("I32", packed(zeros, bits)),
            f"{module}.scales": stored("F16", scales),
        }
        if has_index:
            tensors[f"{module}.g_idx"] = stored("I32", index)
        return tensors, weights.T

    return write


def awq(group: int) -> Writer:
    def interleaved(codes: NDArray[np.uint8]) -> NDArray[np.int32]:
        places = (0, 2, 4, 6, 1, 3, 5, 7)
        ordered = [column // 8 * 8 + places[column % 8] for column in range(codes.shape[1])]
        return packed(codes[:, ordered], 4)

    def write(rng: Rng, name: str, rows: int, columns: int) -> Written:
        module, groups = _module(name), columns // group
        codes = rng.integers(0, 16, (columns, rows), dtype=np.uint8)
        zeros = rng.integers(0, 16, (groups, rows), dtype=np.uint8)
        scales = _positive(rng, 0.005, 0.02, groups, rows).astype(np.float16)
        index = np.arange(columns) // group
        difference = codes.astype(np.float32) - zeros.astype(np.float32)[index]
        return {
            f"{module}.qweight": stored("I32", interleaved(codes)),
            f"{module}.qzeros": stored("I32", interleaved(zeros)),
            f"{module}.scales": stored("F16", scales),
        }, (difference * scales.astype(np.float32)[index]).T

    return write


NF4_VALUES = np.linspace(-1.0, 1.0, 16, dtype=np.float32) ** 3
"""Not those of bitsandbytes: the tensor gives them."""


def nf4(*, is_nested: bool) -> Writer:
    def write(rng: Rng, name: str, rows: int, columns: int) -> Written:
        count = rows * columns
        codes = rng.integers(0, 16, count, dtype=np.uint8)
        blocks = -(-count // 64)
        state: dict[str, object] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16"}
        state["shape"] = [rows, columns]
        tensors = {
            name: stored("U8", (codes[0::2] << 4 | codes[1::2]).reshape(-1, 1)),
            f"{name}.quant_map": stored("F32", NF4_VALUES),
        }
        if is_nested:
            scales = rng.integers(0, 256, blocks, dtype=np.uint8)
            nested = _positive(rng, 0.1, 0.2, -(-blocks // 256))
            values = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.3}
            tensors[f"{name}.nested_absmax"] = stored("F32", nested)
            tensors[f"{name}.nested_quant_map"] = stored("F32", values)
            tensors[f"{name}.absmax"] = stored("U8", scales)
            absmax = values[scales] * nested[np.arange(blocks) // 256] + np.float32(0.3)
        else:
            absmax = _positive(rng, 0.2, 0.5, blocks)
            tensors[f"{name}.absmax"] = stored("F32", absmax)
        text = np.frombuffer(json.dumps(state).encode(), dtype=np.uint8)
        tensors[f"{name}.quant_state.bitsandbytes__nf4"] = stored("U8", text)
        return tensors, (NF4_VALUES[codes] * absmax[np.arange(count) // 64]).reshape(rows, columns)

    return write


def compressed(form: str, **weights: object) -> dict[str, Any]:
    """`quantization_config` as compressed-tensors writes it, with a plain output head."""
    base: dict[str, object] = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "group_size": None,
        "block_structure": None,
        "actorder": None,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group = {"targets": ["Linear"], "weights": base | weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group | {"output_activations": None}},
        "format": form,
        "ignore": ["lm_head", r"re:.*layers\.1\.mlp\.up.*"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
    }


@dataclass(frozen=True)
class QuantizedFormat:
    """`plain` are modules that the config excludes; `file` is the config's file if not config.json.

    fp8 checkpoints have plain routers unless `packs_router`.
    """

    config: dict[str, Any]
    write: Writer
    plain: tuple[str, ...] = ("layers.1.mlp.up_proj",)
    file: str = "config.json"
    packs_router: bool = False
    packs_head: bool = False


_GPTQ = {"quant_method": "gptq", "desc_act": True, "sym": False, "damp_percent": 0.01, "lm_head": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
_NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_compute_dtype": "bfloat16",
    "llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp.up_proj"],
}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
_FP8 |= {"modules_to_not_convert": ["lm_head", "model.layers.1.mlp.up_proj"]}
_F8 = {"num_bits": 8, "type": "float"}
_I8 = {"num_bits": 8, "type": "int"}
_MODELOPT = {"exclude_modules": ["lm_head", "*.layers.1.mlp.up*"], "kv_cache_quant_algo": "FP8"}

FORMATS: dict[str, QuantizedFormat] = {
    "fp8-block": QuantizedFormat(
        _FP8 | {"weight_block_size": [48, 40]}, fp8((48, 40), scale="weight_scale_inv")
    ),
    "fp8-block-bf16": QuantizedFormat(
        _FP8 | {"weight_block_size": [128, 128]}, fp8((128, 128), scale="weight_scale_inv", dtype="BF16")
    ),
    "fp8-block-e8m0": QuantizedFormat(
        _FP8 | {"weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
        fp8((32, 32), scale="weight_scale_inv", dtype="F8_E8M0"),
    ),
    "fp8-tensor": QuantizedFormat(
        _FP8 | {"weight_block_size": None}, fp8((0, 0), scale="weight_scale_inv", dtype="BF16", shape=())
    ),
    "fp8-tensor-vllm": QuantizedFormat(_FP8, fp8((0, 0), shape=(1,))),
    "float-channel": QuantizedFormat(
        compressed("float-quantized", **_F8, strategy="channel"), fp8((1, 0), dtype="BF16")
    ),
    "float-tensor": QuantizedFormat(
        compressed("naive-quantized", **_F8, strategy="tensor"), fp8((0, 0), shape=(1,))
    ),
    "float-block": QuantizedFormat(
        compressed("float-quantized", **_F8, strategy="block", block_structure=[64, 48]), fp8((64, 48))
    ),
    "int-channel": QuantizedFormat(compressed("int-quantized", **_I8, strategy="channel"), int8((1, 0))),
    "int-group-asymmetric": QuantizedFormat(
        compressed("int-quantized", **_I8, strategy="group", group_size=32, symmetric=False),
        int8((1, 32), is_symmetric=False),
    ),
    "pack4-group": QuantizedFormat(
        compressed("pack-quantized", strategy="group", group_size=32), pack_quantized(4, 32)
    ),
    "pack4-group-asymmetric": QuantizedFormat(
        compressed("pack-quantized", strategy="group", group_size=64, symmetric=False),
        pack_quantized(4, 64, is_symmetric=False),
    ),
    "pack4-actorder": QuantizedFormat(
        compressed("pack-quantized", strategy="group", group_size=32, actorder="group"),
        pack_quantized(4, 32, has_group_index=True),
    ),
    "pack4-channel": QuantizedFormat(compressed("pack-quantized", strategy="channel"), pack_quantized(4, 0)),
    "pack8-group-asymmetric": QuantizedFormat(
        compressed("pack-quantized", num_bits=8, strategy="group", group_size=32, symmetric=False),
        pack_quantized(8, 32, is_symmetric=False),
    ),
    "nvfp4": QuantizedFormat(
        compressed("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16),
        nvfp4(is_modelopt=False),
    ),
    "mxfp4-compressed": QuantizedFormat(
        compressed("mxfp4-pack-quantized", type="float", strategy="group", group_size=32),
        mxfp4(is_gpt_oss=False),
    ),
    "modelopt-fp8": QuantizedFormat(
        {"quant_method": "modelopt", "quant_algo": "FP8"} | _MODELOPT, fp8((0, 0), shape=())
    ),
    "modelopt-nvfp4": QuantizedFormat(
        {"quantization": {"quant_algo": "NVFP4", "group_size": 16} | _MODELOPT},
        nvfp4(is_modelopt=True),
        file="hf_quant_config.json",
    ),
    "mxfp4": QuantizedFormat(
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        mxfp4(is_gpt_oss=True),
        plain=("self_attn",),
    ),
    "gptq": QuantizedFormat(_GPTQ | {"bits": 4, "group_size": 32}, gptq(4, 32), plain=()),
    "gptq-whole-rows": QuantizedFormat(
        _GPTQ | {"bits": 4, "group_size": -1, "checkpoint_format": "gptq"}, gptq(4, 0), plain=()
    ),
    "gptq-v2": QuantizedFormat(
        _GPTQ | {"bits": 4, "group_size": 64, "checkpoint_format": "gptq_v2", "desc_act": False},
        gptq(4, 64, is_v2=True, has_order=False),
        plain=(),
    ),
    "gptq-without-index": QuantizedFormat(
        _GPTQ | {"bits": 4, "group_size": 32, "desc_act": False},
        gptq(4, 32, has_order=False, has_index=False),
        plain=(),
    ),
    "gptq-8-bits": QuantizedFormat(_GPTQ | {"bits": 8, "group_size": 32}, gptq(8, 32), plain=()),
    "awq": QuantizedFormat(_AWQ | {"modules_to_not_convert": ["layers.1.mlp.up_proj"]}, awq(32)),
    "nf4": QuantizedFormat(_NF4 | {"bnb_4bit_use_double_quant": False}, nf4(is_nested=False)),
    "nf4-nested": QuantizedFormat(_NF4 | {"bnb_4bit_use_double_quant": True}, nf4(is_nested=True)),
}

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
}


MOE_CONFIG: dict[str, Any] = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}
"""A mixture of experts in the second of two layers."""
EIGHT_EXPERTS = MOE_CONFIG | {"num_experts": 8}
"""Enough rows of the router for formats that pack eight rows in a word."""


LATENT_CONFIG: dict[str, Any] = CONFIG | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "head_dim": 16,
    "q_lora_rank": 80,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
"""DeepSeek V3 in small: latent attention, and experts in the second layer."""


def _latent_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    query, width = config["q_lora_rank"], config["moe_intermediate_size"]
    nope, rope, value = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    mlp = "model.layers.1.mlp"
    shapes = {
        name: shape
        for name, shape in _dense_shapes().items()
        if "self_attn" not in name and not name.startswith(mlp)
    }
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn"
        shapes |= {
            f"{name}.q_a_proj.weight": (query, hidden),
            f"{name}.q_a_layernorm.weight": (query,),
            f"{name}.q_b_proj.weight": (heads * (nope + rope), query),
            f"{name}.kv_a_proj_with_mqa.weight": (rank + rope, hidden),
            f"{name}.kv_a_layernorm.weight": (rank,),
            f"{name}.kv_b_proj.weight": (heads * (nope + value), rank),
            f"{name}.o_proj.weight": (hidden, heads * value),
        }
    experts = config["n_routed_experts"]
    shapes |= {f"{mlp}.gate.weight": (experts, hidden), f"{mlp}.gate.e_score_correction_bias": (experts,)}
    for module in ("shared_experts", *(f"experts.{expert}" for expert in range(experts))):
        for part, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
            shapes[f"{mlp}.{module}.{part}_proj.weight"] = shape
    return shapes


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    if "kv_lora_rank" in config:
        return _latent_shapes(config)
    shapes = _dense_shapes()
    if "num_experts" not in config:
        return shapes
    hidden, width, name = config["hidden_size"], config["moe_intermediate_size"], "model.layers.1.mlp"
    shapes = {module: shape for module, shape in shapes.items() if not module.startswith(name)}
    shapes |= {
        f"model.layers.{layer}.self_attn.{part}_norm.weight": (config["head_dim"],)
        for layer in range(2)
        for part in ("q", "k")
    }
    shapes[f"{name}.gate.weight"] = (config["num_experts"], hidden)
    for expert in range(config["num_experts"]):
        for part, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
            shapes[f"{name}.experts.{expert}.{part}_proj.weight"] = shape
    return shapes


def _dense_shapes() -> dict[str, tuple[int, ...]]:
    hidden, width = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    keys = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (CONFIG["vocab_size"], hidden)}
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for part, rows in (("q", hidden), ("k", keys), ("v", keys), ("o", hidden)):
            shapes[f"{name}.self_attn.{part}_proj.weight"] = (rows, hidden)
        for part in ("gate", "up"):
            shapes[f"{name}.mlp.{part}_proj.weight"] = (width, hidden)
        shapes[f"{name}.mlp.down_proj.weight"] = (hidden, width)
        for part in ("input", "post_attention"):
            shapes[f"{name}.{part}_layernorm.weight"] = (hidden,)
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (CONFIG["vocab_size"], hidden)}


def is_packed(form: QuantizedFormat, name: str) -> bool:
    """Routers of experts are plain in fp8 checkpoints as transformers writes them."""
    packed = ("_proj.weight", "_proj_with_mqa.weight")
    if form.packs_router or form.config.get("quant_method") != "fp8":
        packed += (".mlp.gate.weight",)
    if form.packs_head:
        packed += ("lm_head.weight",)
    return name.endswith(packed) and not any(part in name for part in form.plain)


def write_quantized(
    directory: Path, form: QuantizedFormat, *, seed: int = 0, config: Mapping[str, Any] = CONFIG
) -> dict[str, Floats]:
    """Write a checkpoint of random codes to `directory`, and return its unpacked weights."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, Stored] = {}
    weights: dict[str, Floats] = {}
    for name, shape in _shapes(config).items():
        if is_packed(form, name):
            parts, weights[name] = form.write(rng, name, *shape)
            tensors |= parts
            continue
        low, high = (0.6, 1.4) if len(shape) == 1 else (-1.0, 1.0)
        weights[name] = rng.uniform(low, high, shape).astype(np.float32)
        tensors[name] = stored("F32", weights[name])
    directory.mkdir(exist_ok=True)
    write_safetensors(directory / "model.safetensors", tensors)
    if form.file == "config.json":
        (directory / form.file).write_text(json.dumps({**config, "quantization_config": form.config}))
    else:
        (directory / "config.json").write_text(json.dumps(dict(config)))
        (directory / form.file).write_text(json.dumps(form.config))
    return weights


def write_plain(
    directory: Path, weights: Mapping[str, Floats], *, config: Mapping[str, Any] = CONFIG
) -> None:
    """Write a checkpoint with these weights in float32."""
    directory.mkdir(exist_ok=True)
    tensors = {name: stored("F32", np.ascontiguousarray(array)) for name, array in weights.items()}
    write_safetensors(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps(dict(config)))
