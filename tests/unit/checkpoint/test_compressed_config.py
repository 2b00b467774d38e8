"""Compressed attention in config.json: DeepSeek V4, in DeepSeek's and in transformers' fields."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from transformers import AutoConfig

from checkpoint import (
    BadConfig,
    Blueprint,
    CheckpointError,
    Compressed,
    DType,
    Experts,
    TensorEntry,
    UnsupportedModel,
    cached_bytes_per_token,
    entry_bytes_per_block,
    parse_config,
    stage_tensor_shapes,
)
from checkpoint.blueprint import ClampedSwiGlu, RouterScore
from checkpoint.compressed import Compressor, EntryIndexer
from checkpoint.description import as_stored
from checkpoint.dtypes import PackedDType
from checkpoint.quantization import Fp4, Quantization, Scaled, StoredPart
from checkpoint.rope_config import RopeKind
from checkpoint.tensors import packed_tensors, stored_tensors

FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "compress_rope_theta": 160000,
    "expert_dtype": "fp4",
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
}
"""A config in the fields of DeepSeek's own code, with a layer for speculation at the end of a list."""
PLAIN = {key: value for key, value in FLASH.items() if key not in ("quantization_config", "expert_dtype")}
SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"


def mixers_of(config: Blueprint) -> list[Compressed]:
    mixers = [layer.mixer for layer in config.layers]
    return [mixer for mixer in mixers if isinstance(mixer, Compressed)]


def test_layers_are_windowed_compressed_or_indexed() -> None:
    config = parse_config(PLAIN)
    windowed, sparse, heavy = mixers_of(config)[1:4]
    assert (windowed.compressor, windowed.window, windowed.scale) == (None, 128, 512**-0.5)
    assert sparse.compressor == Compressor(
        ratio=4, has_overlap=True, indexer=EntryIndexer(num_heads=64, head_dim=128, num_chosen=512)
    )
    assert heavy.compressor == Compressor(ratio=128)
    assert len(mixers_of(config)) == 43
    assert config.legal_cuts == set(range(1, 43))
    assert (config.num_draft_layers, config.num_streams, config.boundary_width) == (1, 4, 4 * 4096)


def test_only_layers_with_a_compressor_have_yarn_and_no_temperature() -> None:
    windowed, sparse, _ = mixers_of(parse_config(PLAIN))[1:4]
    assert windowed.rope is not None and sparse.rope is not None
    assert (windowed.rope.kind, windowed.rope.theta) == (RopeKind.DEFAULT, 10_000)
    assert (sparse.rope.kind, sparse.rope.theta, sparse.rope.factor) == (RopeKind.YARN, 160_000, 16)
    assert sparse.rope.attention_factor == 1.0
    assert (sparse.rope_dim, windowed.rope_dim, sparse.rope.is_interleaved) == (64, 64, True)


def test_tokens_choose_the_experts_of_the_first_layers() -> None:
    config = parse_config(PLAIN)
    plans = [layer.feed_forward for layer in config.layers]
    hashed = [plan.router for plan in plans if isinstance(plan, Experts) and plan.router.num_hashed_tokens]
    assert [layer.is_hashed for layer in config.layers] == [True] * 3 + [False] * 40
    assert {(one.num_hashed_tokens, one.has_choice_bias) for one in hashed} == {(129280, False)}
    last = plans[-1]
    assert isinstance(last, Experts) and last.shared is not None
    assert (last.router.score, last.router.has_choice_bias) == (RouterScore.SQRT_SOFTPLUS, True)
    assert last.activation == last.shared.activation == ClampedSwiGlu(alpha=1.0, limit=10.0, offset=0.0)


def test_a_layer_keeps_its_window_and_few_bytes_of_all_other_tokens() -> None:
    """In bf16: 320 bytes of every token with an index, 8 of the others, if blocks are as long as entries."""
    windowed, sparse, heavy = mixers_of(parse_config(PLAIN))[1:4]
    of_tokens = [cached_bytes_per_token(mixer, DType.BF16, None) for mixer in (windowed, sparse, heavy)]
    assert of_tokens == [1024, 1024 + 2 * 2 * 2 * (512 + 128), 1024 + 2 * 2 * 512]
    of_entries = [entry_bytes_per_block(mixer, 128, DType.BF16) / 128 for mixer in (windowed, sparse, heavy)]
    assert of_entries == [0, 320, 8]
    assert entry_bytes_per_block(heavy, 16, DType.BF16) / 16 == 64


def test_fields_of_a_drafter_change_nothing() -> None:
    """Those of V4 Flash 0731, whose list of ratios goes on with the drafter's three layers."""
    fields: dict[str, Any] = {
        "dspark_block_size": 5,
        "dspark_markov_rank": 256,
        "dspark_noise_token_id": 128_799,
        "dspark_target_layer_ids": [40, 41, 42],
    }
    ratios = {"compress_ratios": [*FLASH["compress_ratios"][:43], 0, 0, 0]}
    assert parse_config(FLASH | fields | ratios) == parse_config(FLASH)
    with pytest.raises(UnsupportedModel, match="'dspark_n_routed_experts' = 128 is not supported"):
        parse_config(FLASH | fields | {"dspark_n_routed_experts": 128})


@pytest.mark.parametrize("layers", [2, 7])
def test_defaults_are_those_of_transformers(layers: int) -> None:
    given = {"num_hidden_layers": layers, "max_position_embeddings": 4096, "vocab_size": 64}
    saved = AutoConfig.for_model("deepseek_v4", **given).to_dict() | {"dtype": "float32"}
    sizes = {"hidden_size": 4096, "num_attention_heads": 64, "model_type": "deepseek_v4", "dtype": "float32"}
    bare = given | sizes | {"rms_norm_eps": 1e-6}
    assert parse_config(bare) == parse_config(saved)
    assert [mixer.compressor is not None for mixer in mixers_of(parse_config(bare))] == [True] * layers


def test_old_and_new_fields_say_the_same() -> None:
    types = {0: "sliding_attention", 4: SPARSE, 128: HEAVY}
    listed = [types[ratio] for ratio in FLASH["compress_ratios"][:43]]
    yarn = FLASH["rope_scaling"] | {"rope_type": "yarn", "attention_factor": 1.0}
    new = {key: value for key, value in PLAIN.items() if key not in ("rope_scaling", "compress_ratios")} | {
        "layer_types": listed,
        "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40,
        "compress_rates": {SPARSE: 4, HEAVY: 128},
        "partial_rotary_factor": 0.125,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.125},
            "compress": yarn | {"rope_theta": 160000, "partial_rotary_factor": 0.125},
        },
    }
    assert parse_config(new) == parse_config(PLAIN)
    assert parse_config(PLAIN | {"compress_rate_csa": 8, "compress_rate_hca": 64}) == parse_config(
        PLAIN | {"compress_rates": {SPARSE: 8, HEAVY: 64}}
    )


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"engram_layers": 2}, UnsupportedModel, "'engram_layers' = 2 is not supported for 'deepseek_v4'"),
        (
            {"layer_types": ["full_attention"] * 43},
            UnsupportedModel,
            "only 43 times one of sliding_attention",
        ),
        ({"compress_ratios": [8] * 43}, UnsupportedModel, "only one of [0, 4, 128] for each of 43 layers"),
        ({"compress_ratios": [4] * 42}, UnsupportedModel, "only one of [0, 4, 128] for each of 43 layers"),
        (
            {"sliding_window": 64},
            UnsupportedModel,
            "'sliding_window' = 64 is not supported with entries of 128",
        ),
        ({"compress_rates": {"dense": 4}}, BadConfig, "'compress_rates' must have numbers for"),
        ({"o_groups": 3}, BadConfig, "64 heads of 512 are no multiple of o_groups 3"),
        ({"index_head_dim": 32}, BadConfig, "'index_head_dim' is 32, the minimum is the 64 rotated"),
        ({"partial_rotary_factor": 0.25}, BadConfig, "'qk_rope_head_dim' = 64 and 'partial_rotary_factor'"),
        ({"compress_ratios": [[4]] * 43}, UnsupportedModel, "only one of [0, 4, 128] for each of 43 layers"),
        ({"partial_rotary_factor": 1e308}, BadConfig, "'partial_rotary_factor' = 1e+308 is not above 0"),
        ({"rope_parameters": {"main": {}}}, BadConfig, "must have 'main' and 'compress' with objects"),
        (
            {"rope_parameters": {"main": {}, "compress": {}, "extra": 1}},
            BadConfig,
            "no other field, has ['compress', 'extra', 'main']",
        ),
        (
            {"rope_parameters": {"main": {"rope_theta": 500.0}, "compress": {}}, "rope_theta": 600.0},
            BadConfig,
            "'rope_theta' = 600.0 and 'rope_parameters.main.rope_theta' = 500.0 contradict",
        ),
        ({"mlp_layer_types": ["sparse"] * 43}, BadConfig, "'hash_moe' or 'moe' for 43 layers"),
        ({"num_key_value_heads": 2}, UnsupportedModel, "only 1 is"),
        ({"scoring_func": "sigmoid"}, UnsupportedModel, "only 'sqrtsoftplus' is"),
        ({"hc_mult": 0}, BadConfig, "'hc_mult' must be a positive integer"),
    ],
)
def test_other_values_are_refused_by_name(
    given: dict[str, Any], error: type[CheckpointError], message: str
) -> None:
    with pytest.raises(error) as raised:
        parse_config(PLAIN | given)
    assert message in str(raised.value)


def stored(config: Blueprint, layer: int, plain: Collection[str], scale: str = "scale") -> Blueprint:
    """`config` as the tensors of a layer decide: all matrices but those that end with `plain` have scales."""
    shapes = stage_tensor_shapes(config, layer, layer + 1, has_embeddings=False, has_head=False)
    tensors: dict[str, TensorEntry] = {}
    for name, shape in shapes.items():
        is_packed = len(shape) > 1 and name.endswith(".weight") and not name.endswith(tuple(plain))
        dtype = PackedDType.I8 if is_packed else DType.BF16
        tensors[name] = TensorEntry("model.safetensors", dtype, shape, 0, 0)
        if is_packed:
            scales = name.removesuffix("weight") + scale
            tensors[scales] = TensorEntry("model.safetensors", PackedDType.F8_E8M0, (1, 1), 0, 0)
    return as_stored(config, tensors)


_PLAIN = ("wo_a.weight", "gate.weight", "wgate.weight", "compressor.wkv.weight", "weights_proj.weight")


def test_experts_of_fp4_and_other_matrices_of_fp8_have_short_names_of_scales() -> None:
    """Modules that have no scales are plain."""
    found = stored(parse_config(FLASH), 2, _PLAIN).quantization
    assert isinstance(found, Quantization)
    names = ("attn.wq_a", "attn.wo_a", "ffn.experts.0.w1", "ffn.gate")
    schemes = {name: found.scheme_of(f"layers.2.{name}.weight") for name in names}
    assert schemes["attn.wo_a"] is schemes["ffn.gate"] is None
    assert schemes["attn.wq_a"] == Scaled(dtype=PackedDType.F8_E4M3, block=(128, 128), scale="scale")
    experts = schemes["ffn.experts.0.w1"]
    assert isinstance(experts, Fp4) and experts == found.scheme_of("layers.9.ffn.experts.255.w2.weight")
    assert isinstance(found.scheme_of("layers.2.ffn.shared_experts.w1.weight"), Scaled)
    parts = experts.parts("layers.2.ffn.experts.0.w1.weight", (2048, 4096))
    assert parts[StoredPart.WEIGHT].shapes == ((2048, 2048),)
    assert (parts[StoredPart.SCALE].name, parts[StoredPart.SCALE].shapes) == (
        "layers.2.ffn.experts.0.w1.scale",
        ((2048, 128),),
    )


def test_what_decides_on_entries_and_experts_may_be_plain_and_tables_are_whole_numbers() -> None:
    config = stored(parse_config(FLASH), 2, _PLAIN[1:])
    shapes = stage_tensor_shapes(config, 2, 3, has_embeddings=False, has_head=False)
    packed = {name.removeprefix("layers.2.") for name in packed_tensors(config, shapes)}
    assert {
        name for name in packed if "experts.0" not in name and "w1" not in name and ".experts." not in name
    } == {
        *(f"attn.{name}.weight" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b")),
        *(f"ffn.shared_experts.{name}.weight" for name in ("w2", "w3")),
    }
    table = stored_tensors(config, shapes)["layers.2.ffn.gate.tid2eid"]
    assert (table.dtypes, table.shapes) == ((PackedDType.I32, PackedDType.I64), ((129280, 6),))
