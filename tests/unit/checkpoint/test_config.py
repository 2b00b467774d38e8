"""Validation of config.json: supported families in both dialects; other values are rejected by name."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from checkpoint import (
    Attention,
    BadConfig,
    Blueprint,
    CheckpointError,
    Dense,
    DType,
    LayerPlan,
    Norm,
    RopeConfig,
    RopeKind,
    UnknownDType,
    UnsupportedModel,
    parse_config,
)

# As published on the hub for transformers 4; fields without effect are removed.
LLAMA2: dict[str, Any] = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA31 = LLAMA2 | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": [128001, 128008, 128009],
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "rope_interleaved": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN25: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"),
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}
HUB = {
    "llama2": LLAMA2,
    "llama3.1": LLAMA31,
    "mistral": MISTRAL,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "gpt-oss-20b": GPT_OSS,
}
SMALL = LLAMA2 | {"num_hidden_layers": 4}


def yarn(**more: Any) -> dict[str, Any]:
    return {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, **more}


@pytest.mark.parametrize("name", HUB)
def test_configs_of_the_hub_pass_in_both_dialects(name: str) -> None:
    """transformers 5 rewrites the old dialect into the new one; both give the same config."""
    raw = HUB[name]
    rewritten = AutoConfig.for_model(**raw).to_dict()
    assert "rope_parameters" in rewritten
    assert parse_config(rewritten) == parse_config(raw)


def test_a_config_is_read_completely() -> None:
    layer = LayerPlan(
        mixer=Attention(
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            rope=RopeConfig(
                kind=RopeKind.LLAMA3,
                theta=500000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
            window=None,
            scale=128**-0.5,
            qk_norm=None,
            qkv_bias=False,
            o_bias=False,
        ),
        feed_forward=Dense(width=11008, has_bias=False),
        norm=Norm(eps=1e-05),
    )
    assert parse_config(LLAMA31 | {"num_hidden_layers": 2}) == Blueprint(
        model_type="llama",
        hidden_size=4096,
        vocab_size=128256,
        max_position_embeddings=131072,
        layers=(layer, layer),
        final_norm=Norm(eps=1e-05),
        tie_word_embeddings=False,
        dtype=DType.BF16,
        legal_cuts=frozenset({1}),
    )


def test_biases_and_qk_norm_follow_the_family() -> None:
    def biases(raw: dict[str, Any]) -> tuple[bool, bool, bool, bool]:
        layer = parse_config(raw).layers[0]
        return (
            layer.mixer.qkv_bias,
            layer.mixer.o_bias,
            layer.feed_forward.has_bias,
            bool(layer.mixer.qk_norm),
        )

    assert biases(QWEN25) == (True, False, False, False)
    assert biases(QWEN3) == (False, False, False, True)
    assert biases(SMALL | {"attention_bias": True, "mlp_bias": True}) == (True, True, True, False)


@pytest.mark.parametrize(
    ("raw", "windows"),
    [
        (MISTRAL | {"num_hidden_layers": 2}, (4096, 4096)),
        (MISTRAL | {"num_hidden_layers": 2, "sliding_window": None}, (None, None)),
        (QWEN3 | {"num_hidden_layers": 3, "sliding_window": 8}, (None, None, None)),
        (
            QWEN3 | {"num_hidden_layers": 3, "sliding_window": 8, "use_sliding_window": True},
            (None, None, None),
        ),
        (
            QWEN25
            | {
                "num_hidden_layers": 3,
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 1,
            },
            (None, 8, 8),
        ),
        (
            QWEN3
            | {
                "num_hidden_layers": 3,
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
    ],
)
def test_windows_per_layer(raw: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert parse_config(raw).layer_windows == windows


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (SMALL | {"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel'"),
        (SMALL | {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        (SMALL | {"architectures": None, "model_type": "gpt2"}, "model type 'gpt2'"),
        (
            SMALL | {"quantization_config": {"quant_method": "aqlm"}},
            r"quantization_config has quant_method 'aqlm', which is not supported \(fp8, ",
        ),
        (SMALL | {"hidden_act": "gelu_new"}, "'hidden_act' = 'gelu_new'"),
        (SMALL | {"partial_rotary_factor": 0.5}, "'partial_rotary_factor' = 0.5"),
        (SMALL | {"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' = 50.0"),
        (SMALL | {"num_experts": 8}, "'num_experts' = 8"),
        (SMALL | {"rope_interleaved": True}, "'rope_interleaved' = True"),
        (SMALL | {"sliding_window": 128}, "'sliding_window' = 128 is not supported for 'llama'"),
        (SMALL | {"some_future_field": "on"}, "'some_future_field' = 'on'"),
        (SMALL | {"some_future_field": False}, "'some_future_field' = False"),
        (SMALL | {"some_future_field": 0}, "'some_future_field' = 0"),
        (SMALL | {"some_future_field": []}, r"'some_future_field' = \[\]"),
        (SMALL | {"is_causal": False}, "'is_causal' = False is not supported for 'llama'"),
        (QWEN3 | {"is_causal": 1}, "'is_causal' = 1 is not supported for 'qwen3'"),
        (SMALL | {"use_rope": False}, "'use_rope' = False"),
        (SMALL | {"num_experts": False}, "'num_experts' = False"),
        (SMALL | {"rotary_pct": 0.5}, "'rotary_pct' = 0.5"),
        (SMALL | {"lm_head_bias": True}, "'lm_head_bias' = True"),
        (SMALL | {"mlp_only_layers": [1]}, r"'mlp_only_layers' = \[1\]"),
        (SMALL | {"rope_scaling": yarn(attn_factor=0.5)}, "'rope_scaling.attn_factor' = 0.5"),
        (SMALL | {"rope_scaling": yarn(future=False)}, "'rope_scaling.future' = False"),
        (MISTRAL | {"attention_bias": True}, "'attention_bias' = True is not supported for 'mistral'"),
        (QWEN25 | {"mlp_bias": True}, "'mlp_bias' = True is not supported for 'qwen2'"),
        (
            SMALL | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "'rope_scaling.rope_type' = 'dynamic'",
        ),
        (SMALL | {"rope_parameters": {"rope_type": "longrope"}}, "'rope_parameters.rope_type' = 'longrope'"),
        (SMALL | {"rope_scaling": {"type": "mrope"}}, "'mrope'"),
        (SMALL | {"rope_scaling": yarn(mrope_section=[1])}, r"'rope_scaling.mrope_section' = \[1\]"),
        (
            SMALL | {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
            "rope_parameters.full_attention",
        ),
        (
            SMALL | {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor",
        ),
        (QWEN3 | {"layer_types": ["chunked_attention"] * 28}, r"'layer_types\[0\]' = 'chunked_attention'"),
        (
            MISTRAL | {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
            "'layer_types'",
        ),
    ],
)
def test_unsupported_settings_are_rejected_by_name(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        parse_config(raw)


@pytest.mark.parametrize(
    ("scaling", "parameters"),
    [
        ({"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 2.0}),
        ({"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}),
        ({"type": "linear", "factor": 2.0, "rope_theta": 1e6}, {"rope_type": "linear", "factor": 2.0}),
    ],
)
def test_two_rotary_embeddings_that_differ_are_refused(
    scaling: dict[str, Any], parameters: dict[str, Any]
) -> None:
    """Of two, transformers reads rope_scaling, with the default base."""
    with pytest.raises(BadConfig, match="'rope_scaling' and 'rope_parameters' contradict each other: '"):
        parse_config(SMALL | {"rope_scaling": scaling, "rope_parameters": parameters})


@pytest.mark.parametrize(
    "more",
    [
        {"some_future_field": None},
        {"is_causal": True, "use_rope": True, "use_qk_norm": False},
        {"attn_logit_softcapping": 0.0, "num_local_experts": 0, "quantization_config": {}},
        {"partial_rotary_factor": 1, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}},
        {"attention_dropout": 0.1, "pretraining_tp": 2, "use_cache": False},
        {"auto_map": {"AutoModelForCausalLM": "m.M"}, "transformers.js_config": {"dtype": "q4"}},
        {"_attn_implementation_autoset": True, "video_token_id": 7, "classifier_dropout": 0.1},
        {"output_router_logits": True, "is_decoder": True, "mlp_only_layers": [], "rotary_pct": 1.0},
        {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ],
)
def test_settings_that_change_no_logit_are_ignored(more: dict[str, Any]) -> None:
    assert parse_config(SMALL | more) == parse_config(SMALL)


@pytest.mark.parametrize(
    ("raw", "longest"),
    [
        (QWEN3 | {"rope_scaling": yarn()}, 131072),
        (QWEN3 | {"rope_parameters": yarn(rope_theta=1e6), "rope_theta": None}, 131072),
        (QWEN3 | {"rope_scaling": {"type": "yarn", "factor": 2.0}}, 2 * 40960),
        (LLAMA2 | {"rope_scaling": {"type": "linear", "factor": 2.5}}, 10240),
        (LLAMA31, 131072),
        (GPT_OSS, 131072),
        (LLAMA2, 4096),
        (LLAMA2 | {"rope_scaling": {"type": "linear", "factor": 0.5}}, 4096),
    ],
)
def test_a_scaled_rotary_embedding_reaches_factor_times_the_original_length(
    raw: dict[str, Any], longest: int
) -> None:
    config = parse_config(raw)
    assert config.longest_sequence == longest
    assert config.max_position_embeddings == raw["max_position_embeddings"]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt_oss"])
def test_every_field_that_transformers_writes_by_default_is_known(family: str) -> None:
    config = AutoConfig.for_model(family, dtype="bfloat16")
    assert parse_config(config.to_dict()) == parse_config(config.to_diff_dict())


def test_the_fields_that_transformers_4_wrote_for_every_model_are_known() -> None:
    common = {
        "add_cross_attention": False,
        "bad_words_ids": None,
        "chunk_size_feed_forward": 0,
        "cross_attention_hidden_size": None,
        "encoder_no_repeat_ngram_size": 0,
        "is_decoder": False,
        "is_encoder_decoder": False,
        "output_attentions": False,
        "output_scores": False,
        "prefix": None,
        "pruned_heads": {},
        "remove_invalid_values": False,
        "return_dict": True,
        "return_dict_in_generate": False,
        "tf_legacy_loss": False,
        "tie_encoder_decoder": False,
        "torchscript": False,
        "use_bfloat16": False,
    }
    assert parse_config(SMALL | common) == parse_config(SMALL)


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (
            SMALL | {"num_key_value_heads": 5},
            "num_attention_heads 32 is not a multiple of num_key_value_heads 5",
        ),
        (SMALL | {"num_hidden_layers": 0}, "'num_hidden_layers' must be a positive integer, is 0"),
        (SMALL | {"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000, the limit is 4096"),
        (SMALL | {"vocab_size": 10**60}, "'vocab_size' is 10{39}..., the limit is 16777216"),
        (SMALL | {"hidden_size": 10**9}, "'hidden_size' is 1000000000, the limit is 1048576"),
        (SMALL | {"hidden_size": True}, "'hidden_size' must be a positive integer, is True"),
        (SMALL | {"hidden_size": "4096"}, "'hidden_size' must be a positive integer, is '4096'"),
        (SMALL | {"hidden_size": 4095}, "hidden_size 4095 is not a multiple of 32 attention heads"),
        (SMALL | {"head_dim": 15}, "head_dim 15 is odd"),
        (SMALL | {"rms_norm_eps": 0}, "'rms_norm_eps' must be a positive number, is 0"),
        (SMALL | {"vocab_size": None}, "'vocab_size' is missing"),
        (SMALL | {"torch_dtype": None}, "'dtype' is missing"),
        (SMALL | {"dtype": "bfloat16"}, "'dtype' and 'torch_dtype' contradict"),
        (SMALL | {"tie_word_embeddings": "yes"}, "'tie_word_embeddings' must be true or false, is 'yes'"),
        (SMALL | {"architectures": ["Qwen2ForCausalLM"]}, "must name one model"),
        (SMALL | {"architectures": [], "model_type": None}, "must name one model"),
        (SMALL | {"rope_scaling": {"type": "linear"}}, "'factor' is missing"),
        (SMALL | {"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "names two kinds: linear, yarn"),
        (SMALL | {"rope_scaling": [1]}, "'rope_scaling' must be an object"),
        (SMALL | {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "contradict"),
        (SMALL | {"rope_scaling": yarn(beta_fast=1.0, beta_slow=2.0)}, "beta_slow 2.0"),
        (
            GPT_OSS | {"experts_per_token": 8},
            "'experts_per_token' = 8 and 'num_experts_per_tok' = 4 contradict",
        ),
        (GPT_OSS | {"initial_context_length": 8192}, "'initial_context_length' = 8192 and 'rope_scaling"),
        (QWEN3 | {"layer_types": ["sliding_attention"] * 28}, "no sliding window is set"),
        (QWEN3 | {"layer_types": ["full_attention"]}, "must list 28 layers"),
        (
            {k: v for k, v in MISTRAL.items() if k != "num_key_value_heads"},
            "'num_key_value_heads' is missing",
        ),
    ],
)
def test_impossible_values_are_rejected_with_their_numbers(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(BadConfig, match=named):
        parse_config(raw)


def rope_of(raw: dict[str, Any]) -> RopeConfig:
    rope = parse_config(raw).layers[0].mixer.rope
    assert rope is not None
    return rope


def test_every_rope_parameter_arrives() -> None:
    scaling = yarn(
        attention_factor=1.5, beta_fast=16, beta_slow=2, mscale=0.7, mscale_all_dim=0.9, truncate=False
    )
    assert rope_of(SMALL | {"rope_theta": 5000, "rope_scaling": scaling}) == RopeConfig(
        kind=RopeKind.YARN,
        theta=5000.0,
        factor=4.0,
        original_max_position_embeddings=32768,
        attention_factor=1.5,
        beta_fast=16.0,
        beta_slow=2.0,
        mscale=0.7,
        mscale_all_dim=0.9,
        truncate=False,
    )
    linear = {"type": "linear", "factor": 2.5}
    assert rope_of(SMALL | {"rope_scaling": linear}) == RopeConfig(kind=RopeKind.LINEAR, factor=2.5)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bf16", DType.BF16),
        ("bfloat16", DType.BF16),
        ("torch.float16", DType.F16),
        ("half", DType.F16),
        ("float32", DType.F32),
        ("F32", DType.F32),
    ],
)
def test_dtype_names(name: str, dtype: DType) -> None:
    assert DType.from_name(name) is dtype
    assert dtype.size_bytes == (4 if dtype is DType.F32 else 2)


@pytest.mark.parametrize("name", ["auto", "int8", "float64", ""])
def test_an_unknown_dtype_lists_the_legal_names(name: str) -> None:
    with pytest.raises(UnknownDType, match=f"{name!r} is not one of bf16, f16, f32, bfloat16"):
        DType.from_name(name)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(key=st.sampled_from(sorted(LLAMA31 | QWEN3 | {"rope_parameters": 0, "layer_types": 0})), value=_json)
def test_any_value_of_any_field_is_accepted_or_rejected_without_a_crash(key: str, value: object) -> None:
    for raw in (SMALL, QWEN3):
        with suppress(CheckpointError):
            assert isinstance(parse_config(raw | {key: value}), Blueprint)
