"""Writes checkpoints of transformers as GGUF files, by the rules of llama.cpp's converter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from tests.gguf_kimi import kimi_tensors, write_kimi_metadata
from tests.gguf_mamba import MAMBA_TYPES, architecture_of, mamba_tensors, write_mamba_metadata

Array = NDArray[Any]
QuantType = gguf.GGMLQuantizationType
TypeOf = Callable[[str, Array], QuantType]
"""The type of a tensor by its name in the GGUF file."""
ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "deepseek_v32": "deepseek32",
    "glm_moe_dsa": "glm-dsa",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "kimi_linear": "kimi-linear",
}
_INDEXED_TYPES = ("deepseek_v32", "glm_moe_dsa")
_DELTA_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_OFFSET_NORMS = ("gemma3_text", *_DELTA_TYPES)
"""Weights of norms get their 1."""
_MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_DELTA_MODULES = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_GEMMA_MODULES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_EXPERT_MODULES = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}


def as_stored(name: str, array: Array) -> QuantType:
    """float32 for every tensor."""
    return QuantType.F32


def quantised(kind: str) -> TypeOf:
    """`kind` for all matrices with whole blocks, float32 for vectors, routers and the rest."""

    def type_of(name: str, array: Array) -> QuantType:
        found = QuantType[kind]
        is_matrix = array.ndim > 1 and "ffn_gate_inp" not in name
        return (
            found if is_matrix and array.shape[-1] % gguf.GGML_QUANT_SIZES[found][0] == 0 else QuantType.F32
        )

    return type_of


def write_gguf(
    path: Path,
    checkpoint: Path,
    type_of: TypeOf = as_stored,
    *,
    pre: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    split_max_tensors: int = 0,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    settings: Mapping[str, Any] | None = None,
    rounding: TypeOf = as_stored,
) -> Path:
    """Write the checkpoint in a directory, with its tokenizer if `pre` names its rule; return the first file.

    `metadata` are further keys, `extra` adds tensors. Values are those that the types of `rounding` can
    hold. `settings` are added to config.json; with "has_fused_experts", gates and ups of experts are one
    tensor; with "has_split_heads", keys and values of latents are split by head, as in newer files; with
    "has_one_input", Qwen3-Next has one matrix before its delta rule, as in older ones.
    """
    config = json.loads((checkpoint / "config.json").read_text()) | (settings or {})
    model_type = config["model_type"]
    is_mamba = model_type in MAMBA_TYPES
    architecture = architecture_of(config) if is_mamba else ARCHITECTURES[model_type]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    of_type = {"kimi_linear": write_kimi_metadata} | dict.fromkeys(MAMBA_TYPES, write_mamba_metadata)
    of_type.get(model_type, _write_metadata)(writer, config)
    if pre is not None:
        add_byte_level_tokenizer(writer, checkpoint, pre)
    for key, value in (metadata or {}).items():
        _add(writer, key, value)
    loaded = {
        name: tensor.float().numpy() for name, tensor in load_file(checkpoint / "model.safetensors").items()
    }
    for name, array in tensors_of(config, loaded).items():
        rounded = _rounded(array, rounding(name, array))
        add_tensor(writer, name, rounded, type_of(name, rounded))
    extra(writer)
    close(writer)
    if split_max_tensors:
        return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))
    return path


def close(writer: gguf.GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_byte_level_tokenizer(writer: gguf.GGUFWriter, directory: Path, pre: str) -> None:
    """The tokens, merges and special tokens of tokenizer.json, and the chat template."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    config = json.loads((directory / "tokenizer_config.json").read_text())
    added = {token["content"]: token for token in tokenizer["added_tokens"]}
    ids = tokenizer["model"]["vocab"] | {text: token["id"] for text, token in added.items()}
    tokens = sorted(ids, key=lambda text: int(ids[text]))
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.USER_DEFINED}
    types = [kinds[added[text]["special"]] if text in added else gguf.TokenType.NORMAL for text in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for field, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        if config.get(field):
            add(ids[config[field]])
    if config.get("chat_template"):
        writer.add_chat_template(config["chat_template"])


def add_tensor(writer: gguf.GGUFWriter, name: str, array: Array, kind: QuantType) -> None:
    if kind in (QuantType.F32, QuantType.F16):
        writer.add_tensor(name, array.astype(np.float32 if kind is QuantType.F32 else np.float16))
        return
    writer.add_tensor(name, blocks_of(array, kind), raw_dtype=kind)


def _rounded(array: Array, kind: QuantType) -> Array:
    if kind is QuantType.F32:
        return array
    return np.asarray(gguf.quants.dequantize(blocks_of(array, kind), kind)).reshape(array.shape)


def blocks_of(array: Array, kind: QuantType) -> Array:
    """Quantised rows; random blocks with scales of fit size for types that the package cannot quantise."""
    try:
        return np.asarray(gguf.quants.quantize(array, kind))
    except NotImplementedError:
        return random_blocks(kind, array.shape, seed=array.size)


_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
_SCALES |= {"IQ4_NL": (0,), "IQ4_XS": (0,)}
"""Places of float16 numbers in a block."""
_SPANS = {"Q2_K": 24, "Q3_K": 80, "Q4_K": 500, "Q5_K": 1000, "Q6_K": 2000, "IQ4_NL": 70, "IQ4_XS": 1500}
"""Standard deviation of values with a scale of 1, about."""


def random_blocks(kind: QuantType, shape: tuple[int, ...], *, seed: int, std: float = 0.2) -> Array:
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // elements, size), dtype=np.uint8)
    scales = rng.uniform(0.5, 1.5, blocks.shape[:-1]) * std / _SPANS[kind.name]
    for number, place in enumerate(_SCALES[kind.name]):
        half = (scales * (1 if number == 0 else 8)).astype(np.float16)
        blocks[..., place : place + 2] = half[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def dequantised(path: Path) -> dict[str, Array]:
    """All tensors of a GGUF file as float32, by the `gguf` package."""
    return {
        tensor.name: np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).reshape(
            tuple(int(size) for size in reversed(tensor.shape))
        )
        for tensor in gguf.GGUFReader(path).tensors
    }


def checkpoint_tensors(config: Mapping[str, Any], path: Path) -> dict[str, torch.Tensor]:
    """The dequantised weights of a dense model under transformers' names and in its order of rows."""
    gemma = config["model_type"] == "gemma3_text"
    modules = {ours: theirs for theirs, ours in (_MODULES | (_GEMMA_MODULES if gemma else {})).items()}
    outside = {ours: theirs for theirs, ours in _OUTSIDE.items()}
    found = {}
    for name, given in dequantised(path).items():
        array = given
        if name.startswith("blk."):
            _, layer, module, kind = name.split(".")
            theirs = f"model.layers.{layer}.{modules[module]}.{kind}"
        else:
            theirs = outside[name]
        if not gemma and ".self_attn." in theirs and ("q_proj" in theirs or "k_proj" in theirs):
            heads = config["num_attention_heads" if "q_proj" in theirs else "num_key_value_heads"]
            array = array.reshape(heads, -1, 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        if gemma and "norm" in theirs:
            array = array - np.float32(1)
        found[theirs] = torch.from_numpy(array.copy())
    return found


def tensors_of(config: Mapping[str, Any], tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors under llama.cpp's names and in its order of rows."""
    if config["model_type"] in MAMBA_TYPES:
        return mamba_tensors(config, tensors)
    if config["model_type"] == "kimi_linear":
        return kimi_tensors(config, tensors)
    found: dict[str, Array] = {}
    stacks: dict[str, dict[int, Array]] = {}
    for name, array in tensors.items():
        if name in _OUTSIDE:
            found[_OUTSIDE[name]] = _normed(config, name, array)
            continue
        layer, inner = _split(name)
        if (expert := _EXPERT.fullmatch(inner)) is not None:
            stack = f"blk.{layer}.ffn_{_EXPERT_MODULES[expert[2]]}_exps.weight"
            stacks.setdefault(stack, {})[int(expert[1])] = array
        elif inner == "self_attn.kv_b_proj.weight" and config.get("has_split_heads"):
            found |= {f"blk.{layer}.{key}": part for key, part in _by_head(config, array)}
        elif inner == "linear_attn.in_proj_qkvz.weight" and not config.get("has_one_input"):
            rows, gates = _ungrouped(config, array)
            found |= {f"blk.{layer}.attn_qkv.weight": rows, f"blk.{layer}.attn_gate.weight": gates}
        elif config["model_type"] == "gpt_oss" and ".experts." in name:
            found |= {f"blk.{layer}.{key}": part for key, part in _gpt_oss_experts(inner, array)}
        else:
            found[f"blk.{layer}.{_named(config, inner)}"] = _converted(config, inner, array)
    experts = {name: np.stack([parts[number] for number in sorted(parts)]) for name, parts in stacks.items()}
    return found | (_fused(experts) if config.get("has_fused_experts") else experts)


def _fused(experts: dict[str, Array]) -> dict[str, Array]:
    """Stacks with rows of gates before rows of ups."""
    fused = {}
    for name in experts:
        if "_gate_" in name:
            both = experts[name], experts[name.replace("_gate_", "_up_")]
            fused[name.replace("_gate_", "_gate_up_")] = np.concatenate(both, axis=1)
        elif "_down_" in name:
            fused[name] = experts[name]
    return fused


def _split(name: str) -> tuple[str, str]:
    found = _LAYER.fullmatch(name)
    assert found is not None, name
    return found[1], found[2]


def _named(config: Mapping[str, Any], inner: str) -> str:
    if inner == "self_attn.sinks":
        return "attn_sinks.weight"
    if inner == "mlp.gate.e_score_correction_bias":
        return "exp_probs_b.bias"
    if (delta := {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}.get(inner)) is not None:
        return delta
    modules = _MODULES | (_GEMMA_MODULES if config["model_type"] == "gemma3_text" else {})
    if config["model_type"] == "gpt_oss":
        modules = modules | {"post_attention_layernorm": "post_attention_norm"}
    if config["model_type"] in _DELTA_TYPES:
        modules = modules | _DELTA_MODULES
    module, _, kind = inner.rpartition(".")
    return f"{modules[module]}.{kind}"


def _converted(config: Mapping[str, Any], inner: str, array: Array) -> Array:
    if ARCHITECTURES[config["model_type"]] == "llama" and inner.startswith(
        ("self_attn.q_proj", "self_attn.k_proj")
    ):
        is_query = inner.startswith("self_attn.q_proj")
        heads = config["num_attention_heads" if is_query else "num_key_value_heads"]
        return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    if inner.startswith("mlp.shared_expert_gate"):
        return array.squeeze()
    if inner.startswith("linear_attn."):
        return _delta(config, inner, array)
    return _normed(config, inner, array)


def _delta(config: Mapping[str, Any], inner: str, array: Array) -> Array:
    """Rates instead of logarithms; value heads of Qwen3.5 in turns by key head."""
    if inner == "linear_attn.A_log":
        array = -torch.from_numpy(array).exp().numpy()
    elif inner == "linear_attn.conv1d.weight":
        array = array.squeeze(1)
    if config["model_type"] == "qwen3_next" or inner == "linear_attn.norm.weight":
        return array
    key_heads, value_dim = config["linear_num_key_heads"], config["linear_value_head_dim"]
    first = 2 * key_heads * config["linear_key_head_dim"]
    match inner.split(".")[1]:
        case "in_proj_qkv" | "conv1d":
            return np.concatenate((array[:first], _tiled(array[first:], key_heads, value_dim)))
        case "in_proj_z":
            return _tiled(array, key_heads, value_dim)
        case "out_proj":
            return np.ascontiguousarray(_tiled(array.T, key_heads, value_dim).T)
    return _tiled(array, key_heads, 1)


def _tiled(rows: Array, key_heads: int, width: int) -> Array:
    """Rows of value heads, `width` each: from one key head after the other to turns of all key heads."""
    grouped = rows.reshape(key_heads, -1, width, *rows.shape[1:])
    return np.ascontiguousarray(grouped.swapaxes(0, 1)).reshape(rows.shape)


def _ungrouped(config: Mapping[str, Any], array: Array) -> tuple[Array, Array]:
    """Rows of queries, keys and values, and of gates, which are grouped by key head."""
    key_heads, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    groups = array.reshape(key_heads, -1, array.shape[1])
    of_values = (groups.shape[1] - 2 * key_dim) // 2
    places = np.cumsum([key_dim, key_dim, of_values])
    *rows, gates = (part.reshape(-1, array.shape[1]) for part in np.split(groups, places, axis=1))
    return np.concatenate(rows), gates


def _normed(config: Mapping[str, Any], name: str, array: Array) -> Array:
    is_offset = config["model_type"] in _OFFSET_NORMS and "norm" in name
    return array + np.float32(1) if is_offset else array


def _by_head(config: Mapping[str, Any], array: Array) -> Iterator[tuple[str, Array]]:
    """Keys [heads, kv_rank, nope_dim] and values [heads, value_dim, kv_rank] of latents."""
    by_head = array.reshape(config["num_attention_heads"], -1, array.shape[1])
    keys, values = np.split(by_head, [config["qk_nope_head_dim"]], axis=1)
    yield "attn_k_b.weight", np.ascontiguousarray(keys.swapaxes(1, 2))
    yield "attn_v_b.weight", np.ascontiguousarray(values)


def _gpt_oss_experts(inner: str, array: Array) -> Iterator[tuple[str, Array]]:
    """[experts, in, out] with rows of gate and up in turns, as [experts, out, in] apart."""
    kind = "bias" if inner.endswith("_bias") else "weight"
    rows = array if kind == "bias" else array.swapaxes(1, 2)
    if "gate_up" in inner:
        yield f"ffn_gate_exps.{kind}", np.ascontiguousarray(rows[:, 0::2])
        yield f"ffn_up_exps.{kind}", np.ascontiguousarray(rows[:, 1::2])
    else:
        yield f"ffn_down_exps.{kind}", np.ascontiguousarray(rows)


def _write_metadata(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"] + config.get("num_drafts", 0))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    has_latents = "kv_lora_rank" in config
    if has_latents:
        _write_latents(writer, config)
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if (head_dim := config.get("head_dim")) is not None and not has_latents:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        share = config["rope_parameters"].get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(head_dim * share))
    _write_rope(writer, config)
    for keys, add_count in (
        (("num_experts", "num_local_experts", "n_routed_experts"), writer.add_expert_count),
        (("num_experts_per_tok",), writer.add_expert_used_count),
        (("shared_expert_intermediate_size",), writer.add_expert_shared_feed_forward_length),
    ):
        for key in keys:
            if config.get(key):
                add_count(config[key])
    if config["model_type"] in _DELTA_TYPES:
        _write_delta(writer, config)
    if config["model_type"] in ("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["model_type"] == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if config["model_type"] in ("gemma3_text", "gpt_oss"):
        writer.add_sliding_window(config["sliding_window"])


def _write_delta(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    num_drafts = config.get("num_drafts", 0)
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    if num_drafts:
        writer.add_nextn_predict_layers(num_drafts)
    are_recurrent = [kind == "linear_attention" for kind in config["layer_types"]] + [False] * num_drafts
    if are_recurrent == [bool((layer + 1) % 4) for layer in range(len(are_recurrent))]:
        writer.add_full_attention_interval(4)
    else:
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", are_recurrent)
    if config["model_type"] != "qwen3_next":
        writer.add_rope_dimension_sections([1, 1, 1, 0])


def _write_latents(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    rank, rope_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
    widths = config["qk_nope_head_dim"] + rope_dim, config["v_head_dim"]
    if config.get("has_split_heads"):
        writer.add_head_count_kv(1)
        writer.add_key_length(rank + rope_dim)
        writer.add_value_length(rank)
        writer.add_key_length_mla(widths[0])
        writer.add_value_length_mla(widths[1])
    else:
        writer.add_head_count_kv(config["num_attention_heads"])
        writer.add_key_length(widths[0])
        writer.add_value_length(widths[1])
    writer.add_rope_dimension_count(rope_dim)
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["model_type"] in _INDEXED_TYPES:
        _write_indexer(writer, config)
    if config["model_type"] != "deepseek_v2":
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def _write_indexer(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_indexer_head_count(config["index_n_heads"])
    writer.add_indexer_key_length(config["index_head_dim"])
    writer.add_indexer_top_k(config["index_topk"])
    if (types := config.get("indexer_types")) is not None:
        writer.add_array(f"{writer.arch}.attention.indexer.types", [kind == "full" for kind in types])
    if config.get("num_drafts"):
        writer.add_nextn_predict_layers(config["num_drafts"])


def _write_rope(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    rope = config["rope_parameters"]
    if config["model_type"] == "gemma3_text":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if (kind := rope["rope_type"]) in ("default", "llama3"):  # the latter is a tensor
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast", 32.0))
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow", 1.0))
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        adders[type(value)](key, value)
