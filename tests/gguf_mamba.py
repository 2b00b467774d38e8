"""Checkpoints with Mamba2 as GGUF files, by the rules of llama.cpp's converter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]
MAMBA_TYPES = ("granitemoehybrid", "nemotron_h", "falcon_h1")
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "backbone.embeddings.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.final_layernorm.weight": "output_norm.weight",
    "backbone.norm_f.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mixer\.experts\.(\d+)\.(up|down)_proj\.weight")
_MODULES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "norm": "attn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"mixer.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"{module}.o_proj": "attn_output" for module in ("self_attn", "mixer")},
    **{
        f"{module}.{part}": f"ssm_{ours}"
        for module in ("mamba", "mixer")
        for part, ours in (("in_proj", "in"), ("conv1d", "conv1d"), ("norm", "norm"), ("out_proj", "out"))
    },
    **{
        f"{module}.{part}_proj": f"ffn_{part}"
        for module in ("feed_forward", "mixer")
        for part in ("gate", "up", "down")
    },
    **{f"mixer.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("up", "down")},
    "mixer.gate": "ffn_gate_inp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.output_linear": "ffn_down_exps",
}
_SPECIAL = {
    "pre_ff_layernorm.weight": "ffn_norm",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
}


def architecture_of(config: Mapping[str, Any]) -> str:
    """Of files of the `MAMBA_TYPES`."""
    if config["model_type"] == "nemotron_h":
        return "nemotron_h_moe" if "moe" in config["layers_block_type"] else "nemotron_h"
    return {"granitemoehybrid": "granitehybrid", "falcon_h1": "falcon-h1"}[config["model_type"]]


def mamba_tensors(config: Mapping[str, Any], tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors under llama.cpp's names, in its shapes and order of rows."""
    found: dict[str, Array] = {}
    stacks: dict[str, dict[int, Array]] = {}
    for name, array in tensors.items():
        if name in _OUTSIDE:
            found[_OUTSIDE[name]] = array
            continue
        place = _LAYER.fullmatch(name)
        assert place is not None, name
        if (expert := _EXPERT.fullmatch(place[2])) is not None:
            stacks.setdefault(f"blk.{place[1]}.ffn_{expert[2]}_exps.weight", {})[int(expert[1])] = array
            continue
        found |= {f"blk.{place[1]}.{inner}": part for inner, part in _converted(config, place[2], array)}
    for name, parts in stacks.items():
        found[name] = np.stack([parts[number] for number in sorted(parts)])
    return found


def _converted(config: Mapping[str, Any], inner: str, array: Array) -> Iterator[tuple[str, Array]]:
    module, _, kind = inner.rpartition(".")
    if inner in _SPECIAL:
        yield _SPECIAL[inner], array
    elif kind == "A_log":
        yield "ssm_a", -torch.from_numpy(array).exp().numpy().reshape(-1, 1)
    elif kind == "D":
        yield "ssm_d", array.reshape(-1, 1)
    elif kind == "dt_bias":
        yield "ssm_dt.bias", array
    elif module.endswith("input_linear"):
        is_dense = module.startswith("shared_mlp") and not config["num_local_experts"]
        end = "" if is_dense else "_shexp" if module.startswith("shared_mlp") else "_exps"
        for part, rows in zip(("gate", "up"), np.split(array, 2, axis=-2), strict=True):
            yield f"ffn_{part}{end}.weight", np.ascontiguousarray(rows)
    elif module == "shared_mlp.output_linear":
        yield f"ffn_down{'_shexp' if config['num_local_experts'] else ''}.weight", array
    else:
        yield f"{_MODULES[module]}.{kind}", _arranged(config, module, kind, array)


def _arranged(config: Mapping[str, Any], module: str, kind: str, array: Array) -> Array:
    if module.endswith("conv1d") and kind == "weight":
        return array.squeeze(1)
    if module in ("mamba.norm", "mixer.norm"):
        return array.reshape(config.get("mamba_n_groups") or config["n_groups"], -1)
    if config["model_type"] == "granitemoehybrid" and module in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config["num_attention_heads" if module.endswith("q_proj") else "num_key_value_heads"]
        return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    return array * _factors(config, module) if config["model_type"] == "falcon_h1" else array


def _factors(config: Mapping[str, Any], module: str) -> Array:
    """Of the rows of a matrix of Falcon H1."""
    into = config["attention_in_multiplier"]
    gate, down = config["mlp_multipliers"]
    found = {
        "self_attn.q_proj": into,
        "self_attn.k_proj": into * config["key_multiplier"],
        "self_attn.v_proj": into,
        "self_attn.o_proj": config["attention_out_multiplier"],
        "mamba.out_proj": config["ssm_out_multiplier"],
        "feed_forward.gate_proj": gate,
        "feed_forward.down_proj": down,
    }
    if module != "mamba.in_proj":
        return np.array(found.get(module, 1.0), np.float32)
    inner, states = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    widths = (inner, inner, states, states, config["mamba_n_heads"])
    factors = config["ssm_in_multiplier"] * np.array(config["ssm_multipliers"])
    return np.repeat(factors, widths).astype(np.float32)[:, None]


def write_mamba_metadata(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """All of the architecture."""
    kinds = config.get("layers_block_type") or range(config["num_hidden_layers"])
    writer.add_block_count(len(kinds) + config.get("num_drafts", 0))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["layer_norm_epsilon"])
    writer.add_vocab_size(config["vocab_size"])
    if (head_dim := config.get("head_dim")) is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
    if "rope_parameters" in config:
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_ssm_conv_kernel(config.get("mamba_d_conv") or config["conv_kernel"])
    writer.add_ssm_state_size(config.get("mamba_d_state") or config["ssm_state_size"])
    writer.add_ssm_group_count(config.get("mamba_n_groups") or config["n_groups"])
    num_heads = config.get("mamba_n_heads") or config["mamba_num_heads"]
    writer.add_ssm_time_step_rank(num_heads)
    writer.add_ssm_inner_size(num_heads * (config.get("mamba_d_head") or config["mamba_head_dim"]))
    {
        "granitemoehybrid": _write_granite,
        "nemotron_h": _write_nemotron,
        "falcon_h1": _write_falcon,
    }[config["model_type"]](writer, config)


def _write_granite(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_feed_forward_length(config["intermediate_size"])
    kinds = [kind in ("attention", "full_attention") for kind in config["layer_types"]]
    writer.add_head_count_kv([config["num_key_value_heads"] * has_attention for has_attention in kinds])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"] if config["num_local_experts"] else 0)
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_rope_scaling_finetuned(config.get("position_embedding_type") == "rope")


def _write_falcon(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count_kv(config["num_key_value_heads"])


def _write_nemotron(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """A draft layer has attention and experts."""
    kinds, drafts = config["layers_block_type"], config.get("num_drafts", 0)
    has_experts = "moe" in kinds
    width = config["moe_intermediate_size" if has_experts else "intermediate_size"]
    writer.add_feed_forward_length([width * (kind in ("moe", "mlp")) for kind in kinds] + [width] * drafts)
    heads = config["num_key_value_heads"]
    are_attention = [kind in ("attention", "full_attention") for kind in kinds]
    writer.add_head_count_kv([heads * has_attention for has_attention in are_attention] + [heads] * drafts)
    writer.add_rope_scaling_finetuned(False)
    if drafts:
        writer.add_nextn_predict_layers(drafts)
    if not has_experts:
        return
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    if config.get("moe_latent_size"):
        writer.add_moe_latent_size(config["moe_latent_size"])
