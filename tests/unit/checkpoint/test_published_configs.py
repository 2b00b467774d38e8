"""Published config.json files of every listed family are read, with the names that vendors give fields."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint import BadConfig, UnsupportedModel, parse_config
from checkpoint.architectures import ARCHITECTURES
from checkpoint.config import config_errors
from tests.published import PUBLISHED
from tests.unit.checkpoint import test_compressed_config, test_config, test_latent_config, test_ngrams

_HERE = {name: config.get("text_config", config)["model_type"] for name, config in PUBLISHED.items()}
_ELSEWHERE = (
    test_config.GPT_OSS,
    test_latent_config.V3,
    test_latent_config.V2_LITE,
    test_latent_config.V32,
    test_latent_config.GLM_FLASH,
    test_latent_config.HY_4,
    test_latent_config.MISTRAL_4,
    test_compressed_config.FLASH,
    test_ngrams.PUBLISHED,
)
"""Published configs of other families, whose fields other tests change."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read(name: str) -> None:
    assert config_errors(PUBLISHED[name]) == ()


def test_every_family_has_a_published_config() -> None:
    found = {*_HERE.values(), *(config.get("text_config", config)["model_type"] for config in _ELSEWHERE)}
    assert found == {row.model_type for row in ARCHITECTURES}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", {"rope_interleaved": True}),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", {"is_llama_config": False}),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", {"use_qk_norm": False}),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", {"qkv_bias": True}),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", {"shared_expert_intermediate_size": 8}),
        ("Qwen/Qwen3.6-27B", {"output_gate_type": "sigmoid"}),
        ("MiniMaxAI/MiniMax-M2", {"attn_type_list": [1, 0, 1]}),
        ("MiniMaxAI/MiniMax-M2", {"layernorm_mlp_beta": 3.5}),
        ("MiniMaxAI/MiniMax-M2", {"qk_norm_type": "per_head"}),
        ("bigcode/starcoder2-15b", {"norm_type": "rms_norm"}),
        ("bigcode/starcoder2-15b", {"mlp_type": "gated"}),
        ("baidu/ERNIE-4.5-21B-A3B-PT", {"moe_gate_act": "sigmoid"}),
        ("tencent/Hunyuan-7B-Instruct", {"use_cla": True}),
        ("tencent/Hunyuan-7B-Instruct", {"add_classification_head": True}),
        ("microsoft/Phi-4-mini-instruct", {"full_attn_mod": 2}),
        ("microsoft/Phi-4-mini-instruct", {"lm_head_bias": True}),
        ("CohereLabs/c4ai-command-r7b-12-2024", {"rotary_pct": 0.5}),
        ("CohereLabs/c4ai-command-r7b-12-2024", {"use_parallel_block": False}),
        ("CohereLabs/c4ai-command-r7b-12-2024", {"order_of_interleaved_layers": "local_attn_last"}),
        ("nvidia/Nemotron-H-8B-Base-8K", {"time_step_limit": [0.0, 0.1]}),
    ],
)
def test_a_published_field_with_another_value_is_refused_by_name(name: str, change: dict[str, Any]) -> None:
    raw = PUBLISHED[name]
    changed = raw | {"text_config": raw["text_config"] | change} if "text_config" in raw else raw | change
    ((key, value),) = change.items()
    with pytest.raises(UnsupportedModel, match=f"'{key}' = ") as refused:
        parse_config(changed)
    assert repr(value)[:20] in str(refused.value)


_LLAMA = "HuggingFaceTB/SmolLM2-1.7B-Instruct"
_WINDOW_OFF = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 24}
_NO_GROWTH = {"type": "dynamic", "factor": 1.0}


@pytest.mark.parametrize(
    "change",
    [
        {"text_config": None},
        _WINDOW_OFF,
        {"rope_scaling": _NO_GROWTH},
        {"rotary_dim": 64},
        {"no_rope_layers": [], "cross_attention_layers": []},
        dict.fromkeys(("alibi", "parallel_attn", "qk_layernorm", "moe", "bias", "ffn_bias", "o_bias"), False),
        {"hidden_activation": "silu"},
    ],
    ids=lambda change: min(change),
)
def test_fields_that_say_what_is_so_anyway_change_nothing(change: dict[str, Any]) -> None:
    raw = PUBLISHED[_LLAMA]
    assert parse_config(raw | change) == parse_config(raw)


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (_WINDOW_OFF | {"use_sliding_window": True}, "use_sliding_window"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"rope_scaling": _NO_GROWTH | {"factor": 2.0}}, "rope_type"),
        ({"rotary_dim": 32}, "rotary_dim"),
        ({"cross_attention_layers": [3]}, "cross_attention_layers"),
        ({"alibi": True}, "alibi"),
        ({"hidden_activation": "gelu"}, "hidden_activation"),
    ],
)
def test_the_same_fields_with_another_meaning_are_refused_by_name(
    change: dict[str, Any], refused: str
) -> None:
    with pytest.raises(UnsupportedModel, match=f"{refused}' = "):
        parse_config(PUBLISHED[_LLAMA] | change)


def test_an_attention_factor_that_only_vllm_reads_is_refused_with_the_remedy() -> None:
    scaling = {"rope_type": "yarn", "factor": 2.0, "attn_factor": 1.2}
    with pytest.raises(UnsupportedModel, match=r"attn_factor' = 1\.2 .* leave it out .* 'attention_factor'"):
        parse_config(PUBLISHED[_LLAMA] | {"rope_scaling": scaling})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("CohereLabs/c4ai-command-r7b-12-2024", {"layer_switch": 8}),
        ("google/gemma-2-9b", {"sliding_window_size": 8192}),
        ("tencent/Hunyuan-7B-Instruct", {"attention_head_dim": 64}),
        ("bigcode/starcoder2-3b", {"layer_norm_epsilon": 1e-6}),
        ("nvidia/Nemotron-H-8B-Base-8K", {"attention_head_dim": 64, "head_dim": 128}),
    ],
)
def test_fields_that_repeat_others_must_agree(name: str, change: dict[str, Any]) -> None:
    with pytest.raises(BadConfig, match="contradict"):
        parse_config(PUBLISHED[name] | change)
