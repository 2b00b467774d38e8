"""Writes checkpoints of transformers in Mistral's own format, by names and fields of its own."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_RULES = (
    (r"model\.embed_tokens\.", "tok_embeddings."),
    (r"lm_head\.", "output."),
    (r"model\.norm\.", "norm."),
    (r"model\.layers\.", "layers."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.q_a_proj\.", ".attention.wq_a."),
    (r"\.self_attn\.q_a_layernorm\.", ".attention.q_a_norm."),
    (r"\.self_attn\.q_b_proj\.", ".attention.wq_b."),
    (r"\.self_attn\.kv_a_proj_with_mqa\.", ".attention.wkv_a_with_mqa."),
    (r"\.self_attn\.kv_a_layernorm\.", ".attention.kv_a_norm."),
    (r"\.self_attn\.kv_b_proj\.", ".attention.wkv_b."),
    (r"\.self_attn\.([qkvo])_proj\.", r".attention.w\1."),
    (r"\.mlp\.gate\.", ".gate."),
    (r"\.mlp\.(shared_experts|experts\.\d+)\.", r".\1."),
    (r"\.mlp\.", ".feed_forward."),
    (r"\.gate_proj\.", ".w1."),
    (r"\.up_proj\.", ".w3."),
    (r"\.down_proj\.", ".w2."),
)
"""Applied in order to transformers' names."""


def mistral_name(name: str) -> str:
    """Mistral's name of a tensor of transformers."""
    for pattern, replacement in _RULES:
        name = re.sub(pattern, replacement, name)
    return name


def write_mistral(directory: Path, source: Path, params: dict[str, Any], *, num_shards: int = 1) -> Path:
    """Write the safetensors checkpoint `source` in Mistral's format, with `params` beside its own fields."""
    config = json.loads((source / "config.json").read_text())
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors |= _stored(name, tensor, config)
    return save_mistral(directory, tensors, params_of(config) | params, num_shards=num_shards)


def save_mistral(
    directory: Path, tensors: dict[str, Tensor], params: dict[str, Any], *, num_shards: int = 1
) -> Path:
    """Write params.json, and weights in one file or in several with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "params.json").write_text(json.dumps(params))
    if num_shards == 1:
        save_file(tensors, directory / "consolidated.safetensors")
        return directory
    placed = {
        name: f"consolidated-{number % num_shards + 1:05}-of-{num_shards:05}.safetensors"
        for number, name in enumerate(tensors)
    }
    for file in set(placed.values()):
        save_file({name: tensors[name] for name in tensors if placed[name] == file}, directory / file)
    index = {"metadata": {}, "weight_map": placed}
    (directory / "consolidated.safetensors.index.json").write_text(json.dumps(index))
    return directory


def _stored(name: str, tensor: Tensor, config: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of Mistral's format that one of transformers stands for."""
    if name.endswith("mlp.experts.gate_up_proj"):
        stem = name.removesuffix("gate_up_proj")
        halves = [part.chunk(2) for part in tensor]
        return {
            mistral_name(f"{stem}{number}.{module}.weight"): half.contiguous()
            for number, pair in enumerate(halves)
            for module, half in zip(("gate_proj", "up_proj"), pair, strict=True)
        }
    if name.endswith("mlp.experts.down_proj"):
        stem = name.removesuffix("down_proj")
        return {
            mistral_name(f"{stem}{number}.down_proj.weight"): part.contiguous()
            for number, part in enumerate(tensor)
        }
    if (found := re.search(r"self_attn\.([qk])_proj", name)) is not None and "q_lora_rank" not in config:
        heads = config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
        tensor = neighbours_rotated(tensor, heads)
    return {mistral_name(name): tensor}


def neighbours_rotated(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder rows of a head from halves that are rotated together to neighbours that are."""
    rows, columns = weight.shape
    halves = weight.view(num_heads, 2, rows // num_heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns).contiguous()


def params_of(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of params.json that have other names in config.json, but for rotary embeddings."""
    params = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "head_dim": config["head_dim"],
        "hidden_dim": config["intermediate_size"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "norm_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"],
        "tied_embeddings": config["tie_word_embeddings"],
    }
    if "kv_lora_rank" not in config:
        return params
    latents = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    experts = {
        "expert_parallel": 1,
        "expert_model_parallel": 1,
        "route_every_n": 1,
        "first_k_dense_replace": config["first_k_dense_replace"],
        "num_experts": config["n_routed_experts"],
        "num_experts_per_tok": config["num_experts_per_tok"],
        "num_expert_groups": config["n_group"],
        "num_expert_groups_per_tok": config["topk_group"],
        "routed_scale": config["routed_scaling_factor"],
        "expert_hidden_dim": config["moe_intermediate_size"],
        "num_shared_experts": config["n_shared_experts"],
    }
    return params | {name: config[name] for name in latents} | {"moe": experts}


def vision_tensors() -> dict[str, Tensor]:
    """Tensors of images, which are not read."""
    return {
        "vision_encoder.patch_conv.weight": torch.ones(4, 3, 2, 2),
        "vision_language_adapter.w_in.weight": torch.ones(4, 4),
        "patch_merger.merging_layer.weight": torch.ones(4, 16),
        "pre_mm_projector_norm.weight": torch.ones(4),
    }


def tekken(tokens: list[bytes], *, specials: list[str] | None = None, reserved: int = 8) -> dict[str, Any]:
    """A tekken.json with all bytes and `tokens`, and one more token than its size allows."""
    vocabulary = [bytes([byte]) for byte in range(256)] + tokens
    config = {
        "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+(?!\S)|\s+",
        "num_vocab_tokens": len(vocabulary) + 1,
        "default_vocab_size": len(vocabulary) + reserved,
        "default_num_special_tokens": reserved,
        "version": "v13",
    }
    listed = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"] if specials is None else specials
    return {
        "config": config,
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate([*vocabulary, b"unused"])
        ],
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(listed)
        ],
    }
