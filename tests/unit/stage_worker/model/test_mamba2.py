"""Mamba2: chunks of any size give the same sums, and configs are read completely."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint import (
    CheckpointError,
    Dense,
    Experts,
    Mamba2,
    NoFeedForward,
    NoMixer,
    parse_config,
)
from checkpoint.blueprint import Attention
from checkpoint.names import TensorRole
from checkpoint.recurrent import GateNorm
from stage_worker.model.mamba2 import scan_chunk
from tests.families import config_of


def inputs(num_tokens: int) -> tuple[Tensor, ...]:
    """Inputs times time steps, B, C, decays of 6 heads in 2 groups, and a state; float64."""
    torch.manual_seed(0)
    x = torch.randn(num_tokens, 2, 3 * 5, dtype=torch.float64)
    b, c = (torch.randn(num_tokens, 2, 7, dtype=torch.float64) for _ in range(2))
    decay = -torch.rand(num_tokens, 6, dtype=torch.float64)
    return x, b, c, decay, torch.randn(2, 7, 3 * 5, dtype=torch.float64)


@pytest.mark.parametrize("sizes", [(40,), (1,) * 40, (7, 13, 20), (39, 1)])
def test_a_chunk_equals_its_tokens_one_by_one(sizes: tuple[int, ...]) -> None:
    x, b, c, decay, state = inputs(40)
    expected, kept = [], state.clone()
    for token in range(40):
        of_heads = decay[token].exp().view(2, 3)
        for group in range(2):
            for head in range(3):
                at = slice(5 * head, 5 * head + 5)
                added = torch.outer(b[token, group], x[token, group, at])
                kept[group, :, at] = kept[group, :, at] * of_heads[group, head] + added
        expected.append(torch.stack([c[token, group] @ kept[group] for group in range(2)]))
    parts = zip(*(given.split(sizes) for given in (x, b, c, decay)), strict=True)
    found = [scan_chunk(*part, state) for part in parts]
    torch.testing.assert_close(torch.cat(found), torch.stack(expected))
    torch.testing.assert_close(state, kept)


def test_a_chunk_in_float32_is_as_exact_as_its_tokens() -> None:
    """256 tokens in parts of 64: the sums of a state grow, their relative error does not."""
    x, b, c, decay, state = inputs(256)
    wide, narrow = state.clone(), state.float()
    singles = zip(*(given.split(1) for given in (x, b, c, decay)), strict=True)
    parts = zip(*(given.float().split(64) for given in (x, b, c, decay)), strict=True)
    exact = torch.cat([scan_chunk(*part, wide) for part in singles])
    found = torch.cat([scan_chunk(*part, narrow) for part in parts])
    assert float((found - exact).abs().max() / exact.std()) < 1e-5
    assert float((narrow - wide).abs().max() / wide.std()) < 1e-5


def test_a_strong_decay_does_not_overflow() -> None:
    x, b, c, _, state = (given.float() for given in inputs(64))
    output = scan_chunk(x, b, c, torch.full((64, 6), -500.0), state)
    assert bool(output.isfinite().all()) and bool(state.isfinite().all())


GRANITE_SMALL: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.0078125,
    "bos_token_id": 100257,
    "embedding_multiplier": 12,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "init_method": "mup",
    "initializer_range": 0.1,
    "intermediate_size": 768,
    "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
    "logits_scaling": 16,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "num_attention_heads": 32,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "num_local_experts": 72,
    "output_router_logits": False,
    "pad_token_id": 100256,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "router_aux_loss_coef": 0.01,
    "shared_intermediate_size": 1536,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.56.0",
    "use_cache": True,
    "vocab_size": 100352,
}
"""The sizes of Granite 4.0 H Small, in the fields of transformers 4."""


def test_a_config_of_transformers_4_is_read() -> None:
    config = parse_config(GRANITE_SMALL)
    assert [index for index, layer in enumerate(config.layers) if isinstance(layer.mixer, Attention)] == [
        *(5, 15, 25, 35),
    ]
    assert {layer.mixer.rope for layer in config.layers} == {None}
    (mamba,) = {layer.mixer for layer in config.layers if isinstance(layer.mixer, Mamba2)}
    assert (mamba.o_size, mamba.conv_size, mamba.in_size) == (8192, 8448, 16768)
    assert [part.shape for part in mamba.state_parts] == [(8448, 3), (1, 128, 8192)]
    assert not mamba.state_parts[0].is_wide and mamba.state_parts[1].is_wide


NEMOTRON_NANO: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": 128,
    "hidden_dropout": 0.0,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "initializer_range": 0.02,
    "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 64,
    "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "partial_rotary_factor": 1.0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}
"""The sizes of Nemotron 3 Nano, in the fields of its own code."""


def test_a_pattern_lists_mixers_and_feed_forwards() -> None:
    config = parse_config(NEMOTRON_NANO)
    assert config.num_layers == 52 and config.legal_cuts == frozenset(range(1, 52))
    kinds = [type(layer.mixer) for layer in config.layers]
    assert (kinds.count(Mamba2), kinds.count(Attention), kinds.count(NoMixer)) == (23, 6, 23)
    for layer in config.layers:
        is_alone = isinstance(layer.feed_forward, NoFeedForward)
        assert is_alone is not isinstance(layer.mixer, NoMixer)
    (experts,) = {layer.feed_forward for layer in config.layers if isinstance(layer.feed_forward, Experts)}
    assert not experts.is_gated and experts.shared == Dense(
        width=3712, activation=experts.shared.activation, is_gated=False
    )
    names = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
    listed = [names[letter] for letter in NEMOTRON_NANO["hybrid_override_pattern"]]
    others = {"hybrid_override_pattern": None, "layers_block_type": listed, "num_hidden_layers": None}
    assert parse_config(NEMOTRON_NANO | others) == config


FALCON_H1: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375,
    "bos_token_id": 1,
    "embedding_multiplier": 5.656854249492381,
    "eos_token_id": 11,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 2048,
    "key_multiplier": 0.39062499999999994,
    "lm_head_multiplier": 0.0390625,
    "mamba_chunk_size": 128,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 1536,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "mamba_use_mlp": True,
    "max_position_embeddings": 16384,
    "mlp_bias": False,
    "mlp_expansion_factor": 8,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "model_type": "falcon_h1",
    "num_attention_heads": 8,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "projectors_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32784,
}
"""The fields and sizes of Falcon H1 0.5B."""


def test_a_mixer_beside_attention_has_factors_of_its_rows() -> None:
    config = parse_config(FALCON_H1)
    (layer,) = config.kinds
    mamba = layer.beside
    assert mamba is not None and isinstance(layer.mixer, Attention)
    assert (mamba.o_size, mamba.in_size, mamba.gate_norm) == (1536, 2 * 1536 + 2 * 128 + 24, GateNorm.NONE)
    assert [part.shape for part in mamba.state_parts] == [(1792, 3), (1, 128, 1536)]
    assert config.embedding_scale == 5.656854249492381 and config.logit_scale == 0.0390625
    scales = {(scale.role, scale.begin, scale.end): scale.weight for scale in layer.row_scales}
    assert TensorRole.Q not in {role for role, _, _ in scales}, "a factor of 1"
    assert scales[TensorRole.K, 0, 128] == 0.39062499999999994
    assert scales[TensorRole.MAMBA_IN, 1536, 3072] == 1.25 * 0.25
    assert scales[TensorRole.MAMBA_IN, 3328, 3352] == 1.25 * 0.3535533905932738
    of_expand = parse_config(FALCON_H1 | {"mamba_d_ssm": None, "mamba_n_heads": 32})
    assert of_expand.layers[0].beside is not None and of_expand.layers[0].beside.o_size == 2048


def test_layers_without_experts_have_the_shared_mlp() -> None:
    (dense,) = {layer.feed_forward for layer in parse_config(config_of("granitemoehybrid+dense")).layers}
    assert getattr(dense, "width", None) == 80


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("granitemoehybrid", {"layer_types": None}, "all 5 layers are recurrent"),
        ("granitemoehybrid", {"layer_types": ["conv"] * 5}, r"layer_types\[0\]' = 'conv' is not supported"),
        ("granitemoehybrid", {"layer_types": ["mamba"]}, "must list 5 layers"),
        ("granitemoehybrid", {"mamba_n_heads": 9}, "9 is not a multiple of mamba_n_groups 2"),
        ("granitemoehybrid", {"mamba_n_heads": 8}, "8 times mamba_d_head 24 is not mamba_expand times"),
        ("granitemoehybrid", {"mamba_d_conv": 1}, "the minimum is 2"),
        ("granitemoehybrid", {"hidden_act": "gelu"}, "'hidden_act' = 'gelu' is not supported"),
        ("granitemoehybrid", {"time_step_limit": [0.001, 0.1]}, r"only \[0.0, Infinity\] is"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "'alibi' is not supported"),
        ("granitemoehybrid", {"normalization_function": "layernorm"}, "only 'rmsnorm' is"),
        ("falcon_h1", {"mamba_n_heads": 8}, "8 times mamba_d_head 24 is not mamba_d_ssm 144"),
        ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "'ssm_multipliers' must list 5 numbers, has 4"),
        ("falcon_h1", {"mlp_multipliers": 2.0}, "'mlp_multipliers' must be a list"),
        ("falcon_h1", {"ssm_out_multiplier": 0.0}, "'ssm_out_multiplier' must be a positive number"),
        ("falcon_h1", {"mamba_use_mlp": False}, "only True is"),
        ("falcon_h1", {"time_step_limit": [0.001, 0.1]}, r"only \[0.0, Infinity\] is"),
        ("bamba", {"attn_layer_indices": None}, "all 5 layers are recurrent"),
        ("bamba", {"attn_layer_indices": [5]}, "must list layers from 0 to 4"),
        ("bamba", {"layer_types": ["mamba"] * 4 + ["attention"]}, "contradict each other"),
        ("nemotron_h", {"layers_block_type": None}, "'layers_block_type' is missing"),
        ("nemotron_h", {"layers_block_type": ["mamba", "mlp"]}, "one must have full attention, and one must"),
        ("nemotron_h", {"layers_block_type": ["conv"]}, r"layers_block_type\[0\]' = 'conv' is not supported"),
        ("nemotron_h", {"layers_block_type": "M*"}, "must be a list"),
        ("nemotron_h", {"hybrid_override_pattern": "M*"}, "contradict"),
        ("nemotron_h", {"hybrid_override_pattern": "MX"}, r"hybrid_override_pattern\[1\]' = 'X'"),
        ("nemotron_h", {"num_hidden_layers": 7}, "is 7, but types list 5 layers"),
        ("nemotron_h", {"moe_latent_size": 0}, "'moe_latent_size' must be a positive integer"),
        ("nemotron_h", {"mamba_ssm_cache_dtype": "bfloat16"}, "states are summed in float32"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "'mamba_hidden_act' = 'gelu' is not supported"),
        ("nemotron_h", {"norm_eps": 1e-3}, "contradict"),
        ("nemotron_h", {"attention_bias": True}, "only False is"),
    ],
)
def test_impossible_configs_are_refused_by_name(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config(config_of(family) | changes)


def test_the_width_of_a_head_follows_from_the_others() -> None:
    raw = config_of("bamba")
    for head_dim in (None, "auto"):
        assert parse_config(raw | {"mamba_d_head": head_dim}) == parse_config(raw)
