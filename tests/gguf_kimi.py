"""Checkpoints of Kimi Linear as GGUF files, by the rules of llama.cpp's converter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight")
_STACKS = {"w1": "gate", "w2": "down", "w3": "up"}
_MODULES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.b_proj": "ssm_beta",
    **{f"self_attn.{part}_proj": f"ssm_{part}" for part in ("f_a", "f_b", "g_a", "g_b")},
    "self_attn.o_norm": "ssm_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "block_sparse_moe.gate": "ffn_gate_inp",
    **{f"block_sparse_moe.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{
        f"block_sparse_moe.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")
    },
}


def kimi_tensors(config: Mapping[str, Any], tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors under llama.cpp's names and in its shapes."""
    found: dict[str, Array] = {}
    stacks: dict[str, dict[int, Array]] = {}
    for name, array in tensors.items():
        if name in _OUTSIDE:
            found[_OUTSIDE[name]] = array
            continue
        place = _LAYER.fullmatch(name)
        assert place is not None, name
        if (expert := _EXPERT.fullmatch(place[2])) is not None:
            stack = f"blk.{place[1]}.ffn_{_STACKS[expert[2]]}_exps.weight"
            stacks.setdefault(stack, {})[int(expert[1])] = array
            continue
        found |= {f"blk.{place[1]}.{inner}": part for inner, part in _converted(config, place[2], array)}
    for name, parts in stacks.items():
        found[name] = np.stack([parts[number] for number in sorted(parts)])
    return found


def _converted(config: Mapping[str, Any], inner: str, array: Array) -> Iterator[tuple[str, Array]]:
    module, _, kind = inner.rpartition(".")
    if kind == "A_log":
        yield "ssm_a", -torch.from_numpy(array).exp().numpy()
    elif kind == "dt_bias":
        yield "ssm_dt.bias", array
    elif kind == "e_score_correction_bias":
        yield "exp_probs_b.bias", array
    elif module.endswith("_conv1d"):
        yield f"ssm_conv1d_{module[-8]}.weight", array.reshape(1, len(array), 1, -1)
    elif module == "self_attn.kv_b_proj":
        by_head = array.reshape(config["num_attention_heads"], -1, array.shape[1])
        keys, values = np.split(by_head, [config["qk_nope_head_dim"]], axis=1)
        yield "attn_k_b.weight", np.ascontiguousarray(keys.swapaxes(1, 2))
        yield "attn_v_b.weight", np.ascontiguousarray(values)
    else:
        yield f"{_MODULES[module]}.{kind}", array


def write_kimi_metadata(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """All of the architecture."""
    rank, rope_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["model_max_length"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv([int(kind == "full_attention") for kind in config["layer_types"]])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_uint32(f"{writer.arch}.kda.head_dim", config["linear_head_dim"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(rope_dim)
    writer.add_key_length(rank + rope_dim)
    writer.add_value_length(config["hidden_size"] // config["num_attention_heads"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope_dim)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_token"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(config["num_expert_group"])
    writer.add_expert_group_used_count(config["topk_group"])
