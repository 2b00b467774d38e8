"""Kimi Delta Attention: chunks of any size give the same sums, and configs are read completely."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint import Checkpoint, CheckpointError, Experts, KimiDelta, Latent, parse_config
from checkpoint.config import config_errors
from stage_worker.model.kernels import PLAIN
from stage_worker.model.kimi_delta import BatchedGates, SeparateGates, channel_delta_chunk
from stage_worker.model.layer_weights import KimiDeltaWeights
from tests.families import config_of, make_family
from tests.unit.stage_worker.model.test_families import logits_of
from tests.unit.stage_worker.model.test_parity import random_sequences

KIMI = "kimi_linear"


def inputs(num_tokens: int, num_heads: int = 3) -> tuple[Tensor, ...]:
    """Queries, keys, values, strengths, decays and a state, float64."""
    torch.manual_seed(0)
    query, key = (torch.randn(num_tokens, num_heads, 6, dtype=torch.float64) for _ in range(2))
    value = torch.randn(num_tokens, num_heads, 5, dtype=torch.float64)
    strength = torch.rand(num_tokens, num_heads, dtype=torch.float64)
    decay = -torch.rand(num_tokens, num_heads, 6, dtype=torch.float64)
    state = torch.randn(num_heads, 6, 5, dtype=torch.float64)
    return query, key / key.norm(dim=-1, keepdim=True), value, strength, decay, state


@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize("sizes", [(40,), (1,) * 40, (7, 13, 20), (39, 1), (8, 32)])
def test_a_chunk_equals_its_tokens_one_by_one(sizes: tuple[int, ...], num_heads: int) -> None:
    query, key, value, strength, decay, state = inputs(40, num_heads)
    expected, kept = [], state.clone()
    for token in range(40):
        kept = kept * decay[token].exp()[..., None]
        error = (value[token] - (kept * key[token][..., None]).sum(1)) * strength[token][:, None]
        kept = kept + key[token][..., None] * error[:, None]
        expected.append((kept * query[token][..., None]).sum(1))
    parts = zip(*(x.split(sizes) for x in (query, key, value, strength, decay)), strict=True)
    found = [channel_delta_chunk(*part, state) for part in parts]
    torch.testing.assert_close(torch.cat(found), torch.stack(expected))
    torch.testing.assert_close(state, kept)


@pytest.mark.parametrize("strongest", [1.0, 30.0])
def test_a_chunk_in_float32_is_as_exact_as_its_tokens(strongest: float) -> None:
    """Also where exp(-G), which a product of decayed keys and queries would have, exceeds float32."""
    query, key, value, strength, decay, state = inputs(256)
    decay = decay.pow(4) * -strongest
    wide, narrow = state.clone(), state.float()
    given = (query, key, value, strength, decay)
    singles = zip(*(x.split(1) for x in given), strict=True)
    parts = zip(*(x.float().split(64) for x in given), strict=True)
    exact = torch.cat([channel_delta_chunk(*part, wide) for part in singles])
    found = torch.cat([channel_delta_chunk(*part, narrow) for part in parts])
    assert float((found - exact).abs().max() / exact.std()) < 2e-5
    assert float((narrow - wide).abs().max() / wide.std()) < 2e-5


def test_a_strong_decay_does_not_overflow() -> None:
    query, key, value, strength, _, state = (x.float() for x in inputs(61))
    output = channel_delta_chunk(query, key, value, strength, torch.full((61, 3, 6), -500.0), state)
    assert bool(output.isfinite().all()) and bool(state.isfinite().all())


@pytest.mark.parametrize("num_rows", [1, 5])
def test_a_batched_projection_of_gates_equals_two_products(num_rows: int) -> None:
    """Of latents that are columns of a wider projection."""
    torch.manual_seed(0)
    projected, ups = torch.randn(num_rows, 40), torch.randn(2, 12, 7)
    unused: Any = None
    weights = KimiDeltaWeights(
        input=unused, decay_up=ups[0], gate_up=ups[1], conv=unused, decay=unused, dt_bias=unused, norm=unused
    )
    latents = projected[:, 26:]
    found, expected = BatchedGates(*ups)(latents), SeparateGates(weights, PLAIN)(latents)
    assert [part.shape for part in found] == [(num_rows, 12)] * 2
    for part, other in zip(found, expected, strict=True):
        torch.testing.assert_close(part, other)
    torch.testing.assert_close(found[1], latents[:, 7:] @ ups[1].t())


KIMI_LINEAR_48B: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"},
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [number for number in range(1, 27) if number % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "transformers_version": "4.56.2",
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
"""The fields and sizes of Kimi Linear 48B A3B."""


def test_a_published_config_is_read() -> None:
    config = parse_config(KIMI_LINEAR_48B)
    full = [index for index, layer in enumerate(config.layers) if isinstance(layer.mixer, Latent)]
    assert full == [3, 7, 11, 15, 19, 23, 26]
    (latent,) = {layer.mixer for layer in config.layers if isinstance(layer.mixer, Latent)}
    assert latent.rope is None and latent.query_rank is None and latent.page_shape.width == 576
    (delta,) = {layer.mixer for layer in config.layers if isinstance(layer.mixer, KimiDelta)}
    assert (delta.num_heads, delta.head_dim, delta.rank, delta.kernel_size) == (32, 128, 128, 4)
    assert [part.shape for part in delta.state_parts] == [(12288, 3), (32, 128, 128)]
    assert [part.is_wide for part in delta.state_parts] == [False, True]
    sparse = [layer.feed_forward for layer in config.layers if isinstance(layer.feed_forward, Experts)]
    assert len(sparse) == 26 and (sparse[0].count, sparse[0].per_token) == (256, 8)
    assert sparse[0].router.scaling == 2.446 and sparse[0].router.has_choice_bias
    assert config.max_position_embeddings == 1048576


def test_both_forms_of_a_config_are_one_model() -> None:
    """As transformers reads and writes it."""
    from transformers import AutoConfig

    given = {key: value for key, value in KIMI_LINEAR_48B.items() if key != "rope_scaling"}
    rewritten = AutoConfig.for_model(**given).to_dict()
    assert rewritten["layer_types"].count("full_attention") == 7
    flat = {key: value for key, value in rewritten.items() if key != "linear_attn_config"}
    assert parse_config(flat) == parse_config(KIMI_LINEAR_48B)


def test_layers_that_nothing_lists_are_those_of_transformers() -> None:
    from transformers import AutoConfig

    changes = {"layer_types": None, "num_hidden_layers": 9, "mlp_layer_types": None}
    kinds = [isinstance(layer.mixer, Latent) for layer in parse_config(config_of(KIMI) | changes).layers]
    theirs = AutoConfig.for_model(KIMI, num_hidden_layers=9).layer_types
    assert kinds == [name == "full_attention" for name in theirs]


def test_published_names_of_the_mlp_are_read(tmp_path: Path) -> None:
    """transformers writes the MLP of layers without experts under the name of experts."""
    directory = make_family(tmp_path / "model", KIMI)
    tokens = random_sequences([30])[0].tokens
    expected = logits_of(Checkpoint.open(directory), tokens)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    assert "model.layers.0.block_sparse_moe.up_proj.weight" in tensors
    save_file(published(tensors), file, metadata={"format": "pt"})
    assert torch.equal(logits_of(Checkpoint.open(directory), tokens), expected)


def published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` with the names that the published model has."""
    dense = re.compile(r"block_sparse_moe\.(gate|up|down)_proj")
    return {dense.sub(r"mlp.\1_proj", name): tensor for name, tensor in tensors.items()}


NESTED = KIMI_LINEAR_48B["linear_attn_config"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"linear_attn_config": NESTED | {"gate_lower_bound": -5.0}},
            r"'linear_attn_config.gate_lower_bound'",
        ),
        ({"linear_attn_config": [1]}, "'linear_attn_config' must be an object"),
        ({"linear_attn_config": NESTED | {"kda_layers": [1]}}, "must list layers 1 to 27 once"),
        ({"linear_attn_config": NESTED | {"kda_layers": None}}, "must list layers 1 to 27 once"),
        (
            {"linear_attn_config": NESTED | {"kda_layers": [7] * 4000}},
            r"once, are \[7(, 7){12}, \.\.\. and",
        ),
        (
            {"linear_head_dim": 64},
            "'linear_attn_config.head_dim' = 128 and 'linear_head_dim' = 64 contradict",
        ),
        ({"layer_types": ["linear_attention"] * 26 + ["full_attention"]}, "contradict each other"),
        ({"linear_attn_config": NESTED | {"short_conv_kernel_size": 1}}, "the minimum is 2"),
        ({"mla_use_nope": False}, "'mla_use_nope' = False is not supported"),
        ({"moe_router_activation_func": "softmax"}, "only 'sigmoid' is"),
        ({"moe_layer_freq": 2}, "only 1 is"),
        ({"use_grouped_topk": False}, "only True is"),
        ({"hidden_act": "situ"}, "'hidden_act' = 'situ' is not supported"),
        ({"activation_situ_beta": 4.0}, "'activation_situ_beta' = 4.0 is not supported"),
        ({"num_experts_per_tok": 4}, "'num_experts_per_token' = 8 and 'num_experts_per_tok' = 4 contradict"),
        ({"num_key_value_heads": 8}, "with latent attention, only num_attention_heads 32 is"),
    ],
)
def test_impossible_configs_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    raw = json.loads(json.dumps(KIMI_LINEAR_48B)) | changes
    with pytest.raises(CheckpointError, match=message):
        parse_config(raw)
    assert any(str(error) for error in config_errors(raw))
