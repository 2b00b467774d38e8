"""The text model of a checkpoint of several modalities is served; the other parts are not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma4Config,
    Kimi_K25Config,
    Mistral3Config,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen4ExpConfig,
)

from checkpoint import (
    BadConfig,
    Blueprint,
    Checkpoint,
    Dense,
    Experts,
    MissingTensor,
    RopeConfig,
    RopeKind,
    UnexpectedTensor,
    UnsupportedModel,
    parse_config,
)
from checkpoint.architectures import ARCHITECTURES
from checkpoint.blueprint import Activation
from checkpoint.compressed import PageShape
from tests.checkpoints import edit_config
from tests.unit.stage_worker.model.pipeline import Pipeline, Running

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "num_hidden_layers": 3,
    "initializer_range": 0.3,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e3,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.5,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 20,
    "q_lora_rank": 40,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "n_group": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 2,
}
CONFIGS = {
    "gemma3": lambda: Gemma3Config(text_config={"model_type": "gemma3_text", **TEXT}, vision_config=VISION),
    "gemma4": lambda: Gemma4Config(
        text_config={
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "global_head_dim": 32,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            **TEXT,
        },
        vision_config={
            **VISION,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "position_embedding_size": 16,
        },
        audio_config=None,
    ),
    "mistral3": lambda: Mistral3Config(
        text_config={"model_type": "ministral3", "rope_parameters": dict(YARN), **TEXT},
        vision_config={"model_type": "pixtral", "head_dim": 8, **VISION},
    ),
    "mistral3 of mistral4": lambda: Mistral3Config(
        text_config={
            "model_type": "mistral4",
            "rope_parameters": YARN | {"partial_rotary_factor": 0.4},
            **TEXT,
            **LATENT,
        },
        vision_config={"model_type": "pixtral", "head_dim": 8, **VISION},
    ),
    "kimi_k25": lambda: Kimi_K25Config(
        text_config={"model_type": "deepseek_v3", "topk_group": 1, **TEXT, **LATENT, "head_dim": 8},
        vision_config=VISION | {"pos_emb_height": 4, "pos_emb_width": 4},
        projection_hidden_size=32,
    ),
}
TOKENS = [5, 99, 17, 64, 3, 3, 120, 8] * 4


@pytest.fixture(params=CONFIGS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIGS[request.param]())
    model.save_pretrained(tmp_path)
    if request.param == "kimi_k25":  # transformers renames the text's layers like those of images
        rename(tmp_path, "language_model.model.blocks.", "language_model.model.layers.")
    return tmp_path


def rename(directory: Path, old: str, new: str) -> None:
    file = directory / "model.safetensors"
    tensors = {name.replace(old, new, 1): value for name, value in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def served_logits(directory: Path) -> torch.Tensor:
    return Pipeline(Checkpoint.open(directory), cuts=(1,)).step([(Running(TOKENS), len(TOKENS))])[0]


@pytest.mark.matrix(2)
def test_the_text_of_a_wrapper_is_served_under_each_of_its_names(directory: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(directory)
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS])).logits[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(served_logits(directory), expected, atol=1e-4, rtol=0)
    rename(directory, "language_model.model.", "model.language_model.")
    torch.testing.assert_close(served_logits(directory), expected, atol=1e-4, rtol=0)


RECURRENT: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e3,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
SMALL_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_heads": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
MIXTURE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}


STREAMS: dict[str, Any] = {
    "hc_lowrank": 20,
    "ple_layer_ids": [3],
    "ple_conv_kernel_size": 3,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 4,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "output_gate_type": "sigmoid",
    "eos_token_id": 3,
}
QWENS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3_5": (Qwen3_5Config, {}),
    "qwen3_5_moe": (Qwen3_5MoeConfig, MIXTURE),
    "qwen4_exp": (Qwen4ExpConfig, MIXTURE | STREAMS),
}


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", QWENS)
def test_the_text_of_qwen_is_served_without_images_and_drafts(tmp_path: Path, name: str) -> None:
    """All three positions of a text's tokens are the same."""
    torch.manual_seed(0)
    new, more = QWENS[name]
    config = new(text_config=TEXT | RECURRENT | more, vision_config=SMALL_VISION)
    model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model.eval()(torch.tensor([TOKENS])).logits[0]
    file = tmp_path / "model.safetensors"
    drafts = {"mtp.norm.weight": torch.ones(64), "mtp.layers.0.input_layernorm.weight": torch.ones(64)}
    save_file(load_file(file) | drafts, file, metadata={"format": "pt"})
    edit_text(tmp_path, mtp_num_hidden_layers=1, attn_output_gate=True, mamba_ssm_dtype="float32")
    assert expected.std() > 0.1
    torch.testing.assert_close(served_logits(tmp_path), expected, atol=1e-3, rtol=0)


def edit_text(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= changes
    path.write_text(json.dumps(config))


def test_other_modalities_are_counted_and_not_read(directory: Path) -> None:
    checkpoint = Checkpoint.open(directory)
    others = {name: entry for name, entry in checkpoint.tensors.items() if "language_model" not in name}
    assert checkpoint.ignored.num_tensors == len(others) > 5
    assert checkpoint.ignored.num_bytes == sum(entry.num_bytes for entry in others.values())
    whole = sum(entry.num_bytes for entry in checkpoint.tensors.values())
    assert checkpoint.weight_file_bytes == whole - checkpoint.ignored.num_bytes


@pytest.mark.matrix(2)
def test_a_head_of_its_own_is_read(directory: Path) -> None:
    """Whatever the fields say: transformers ties the head of a wrapper by another one."""
    rename(directory, "model.language_model.", "language_model.model.")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    embeddings = tensors["language_model.model.embed_tokens.weight"]
    assert Checkpoint.open(directory).config.tie_word_embeddings
    tied = served_logits(directory)
    save_file(tensors | {"language_model.lm_head.weight": 2 * embeddings}, file, metadata={"format": "pt"})
    assert not Checkpoint.open(directory).config.tie_word_embeddings
    torch.testing.assert_close(served_logits(directory), 2 * tied, atol=1e-4, rtol=0)


def test_a_wrapper_without_all_its_text_or_with_unknown_parts_is_refused(directory: Path) -> None:
    edit_config(directory, some_future_field=1)
    with pytest.raises(UnsupportedModel, match="'some_future_field' = 1"):
        Checkpoint.open(directory)
    edit_config(directory, some_future_field=...)
    rename(directory, "model.language_model.", "language_model.model.")
    rename(directory, "language_model.model.layers.1.mlp.up_proj", "speech_tower.up_proj")
    with pytest.raises(MissingTensor, match=r"language_model\.model\.layers\.1\.mlp\.up_proj\.weight"):
        Checkpoint.open(directory)
    rename(directory, "speech_tower.up_proj", "language_model.model.layers.1.mlp.up_proj")
    rename(directory, "vision_tower.", "speech_tower.")
    with pytest.raises(UnexpectedTensor, match=r"speech_tower\."):
        Checkpoint.open(directory)


def test_unknown_wrappers_and_texts_are_refused_by_name() -> None:
    raw: dict[str, Any] = {"model_type": "gemma3", "text_config": {"model_type": "llama"}}
    with pytest.raises(UnsupportedModel, match=r"'text_config.model_type' = 'llama' is not supported"):
        parse_config(raw)
    with pytest.raises(UnsupportedModel, match="model type 'llava'"):
        parse_config(raw | {"model_type": "llava"})
    with pytest.raises(BadConfig, match="'text_config' must be an object"):
        parse_config(raw | {"text_config": [1]})


def test_a_published_config_that_leaves_out_defaults_is_read() -> None:
    """As of Gemma 3 4B."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = parse_config(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "boi_token_index": 255999,
            "eoi_token_index": 256000,
            "eos_token_id": [1, 106],
            "image_token_index": 262144,
            "initializer_range": 0.02,
            "mm_tokens_per_image": 256,
            "model_type": "gemma3",
            "text_config": text,
            "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 1152},
        }
    )
    assert config.layer_windows == tuple(1024 if (layer + 1) % 6 else None for layer in range(34))
    full, windowed = config.layers[5].mixer, config.layers[0].mixer
    assert full.rope is not None and windowed.rope is not None
    assert (full.rope.theta, full.rope.factor) == (1e6, 8.0)
    assert (windowed.rope.theta, windowed.rope.factor) == (1e4, 1.0)
    assert (config.vocab_size, full.num_heads, full.num_kv_heads, full.head_dim) == (262_208, 8, 4, 256)


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.model_type)
def test_defaults_are_those_of_transformers(row: Any) -> None:
    """A config without a field is read like one with transformers' default."""
    from transformers import AutoConfig

    full = json.loads(json.dumps(AutoConfig.for_model(row.model_type).to_dict()))
    has_odd_heads = full["hidden_size"] % full["num_attention_heads"] != 0
    if (
        has_odd_heads and row.latent is None
    ):  # transformers rounds down; every published config names the width
        full.setdefault("head_dim", 128)
    given = full | {"architectures": [row.class_name], "dtype": "bfloat16"}
    if row.model_type == "glm4_moe":  # transformers' default of 96 heads does not divide its hidden_size
        given["num_attention_heads"] = 32
    if row.model_type == "gemma4_text":  # by default it has per-layer embeddings, which are refused
        given["hidden_size_per_layer_input"] = 0
    if row.model_type == "deepseek_v2":  # which has no default
        given["num_experts_per_tok"] = 6
    if row.model_type == "qwen4_exp_text":  # which has no default of the indexer, and by default no n-grams
        given |= dict.fromkeys(("indexer_n_heads", "indexer_kv_heads"), 1)
        given |= {"indexer_head_dim": 256, "indexer_budget": 64, "indexer_compress_ratio": 4}
        given |= {"ple_layer_ids": [1], "eos_token_id": 5}
    if row.model_type in ("granitemoehybrid", "bamba"):  # by default no layer has attention: refused
        given["num_hidden_layers"] = 2
        is_by_index = "attn_layer_indices" in given
        given |= {"attn_layer_indices": [1]} if is_by_index else {"layer_types": ["mamba", "attention"]}
    expected = parse_config(given)
    without_default = _WITHOUT_DEFAULT | ({"head_dim"} if has_odd_heads and row.head_dim is None else set())
    for key in given.keys() - without_default:
        if (row.model_type, key) in _NO_DEFAULTS:
            continue
        short = {name: value for name, value in given.items() if name != key}
        found = parse_or_missing(short)
        if found is None:
            assert key not in row.defaults
        else:
            assert found == expected, key


def parse_or_missing(raw: dict[str, Any]) -> Blueprint | None:
    """None if a field is required and missing."""
    try:
        return parse_config(raw)
    except BadConfig as error:
        if "missing" not in str(error) and "got None" not in str(error):
            raise
        return None


_WITHOUT_DEFAULT = {"architectures", "model_type", "dtype"}
_NO_DEFAULTS = {
    ("ministral3", "rope_parameters"),  # transformers' is that of one model
    ("gemma4_text", "hidden_size_per_layer_input"),  # changed above
    ("glm4_moe", "num_attention_heads"),
    ("granitemoehybrid", "layer_types"),
    ("bamba", "attn_layer_indices"),
    *(("qwen4_exp_text", key) for key in ("ple_layer_ids", "eos_token_id")),
    ("nemotron_h", "layers_block_type"),  # transformers' is that of no model
}
"""Fields whose default is not compared."""


GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "audio_config": None,
    "boi_token_id": 255999,
    "dtype": "bfloat16",
    "eoa_token_id": 258883,
    "eos_token_id": [1, 106],
    "image_token_id": 258880,
    "model_type": "gemma4",
    "tie_word_embeddings": True,
    "vision_config": {"model_type": "gemma4_vision"},
    "vision_soft_tokens_per_image": 280,
}
GEMMA4_TEXT: dict[str, Any] = {
    "attention_k_eq_v": True,
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 5376,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 21504,
    "max_position_embeddings": 262144,
    "model_type": "gemma4_text",
    "moe_intermediate_size": None,
    "num_attention_heads": 32,
    "num_experts": None,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 16,
    "num_kv_shared_layers": 0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "top_k_experts": None,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}


def gemma4(**changes: Any) -> dict[str, Any]:
    """A config of the size of Gemma 4 31B; `...` removes a field of the text model."""
    text = {key: value for key, value in (GEMMA4_TEXT | changes).items() if value is not ...}
    return GEMMA4 | {"text_config": text}


def test_gemma_4_has_other_keys_in_layers_with_full_attention() -> None:
    config = parse_config(gemma4())
    assert config.layer_windows == tuple(1024 if (layer + 1) % 6 else None for layer in range(60))
    assert (config.page_shape(None), config.page_shape(1024)) == (PageShape(2, 4, 512), PageShape(2, 16, 256))
    full, windowed = config.layers[5].mixer, config.layers[0].mixer
    assert (full.value_is_key, windowed.value_is_key) == (True, False)
    assert full.rope == RopeConfig(kind=RopeKind.PROPORTIONAL, theta=1e6, width=128)
    assert windowed.rope == RopeConfig(theta=1e4)
    assert (full.scale, config.logit_softcap, config.tie_word_embeddings) == (1.0, 30.0, True)
    rewritten = {str(layer): {"head_dim": 512, "num_key_value_heads": 4} for layer in range(5, 60, 6)}
    as_transformers_writes = gemma4(
        global_head_dim=..., num_global_key_value_heads=..., per_layer_config=rewritten
    )
    assert parse_config(as_transformers_writes) == config
    assert parse_config(gemma4(rope_parameters=...)) == config
    assert parse_config(gemma4(num_hidden_layers=4)).layer_windows == (1024, 1024, 1024, None)
    assert parse_config(gemma4(attention_k_eq_v=False)).page_shape(None) == PageShape(2, 16, 512)


def test_gemma_4_has_experts_beside_the_mlp_if_enabled() -> None:
    """The sizes of 26B-A4B."""
    sizes = {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704, "intermediate_size": 2112}
    assert isinstance(parse_config(gemma4(**sizes)).layers[0].feed_forward, Dense)
    config = parse_config(gemma4(enable_moe_block=True, **sizes))
    experts = config.layers[0].feed_forward
    assert isinstance(experts, Experts)
    assert (experts.count, experts.per_token, experts.width) == (128, 8, 704)
    assert experts.shared == Dense(width=2112, activation=Activation.GELU_TANH)
    assert experts.branch_norm == config.layers[0].norm
    with pytest.raises(BadConfig, match="'num_experts' must give one number of experts"):
        parse_config(gemma4(enable_moe_block=True))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size_per_layer_input": 256}, "'hidden_size_per_layer_input' = 256 .*per-layer embeddings"),
        ({"hidden_size_per_layer_input": ...}, "'hidden_size_per_layer_input' = 256"),
        ({"num_kv_shared_layers": 20}, "'num_kv_shared_layers' = 20 .* E2B and E4B"),
        ({"use_double_wide_mlp": True}, "'use_double_wide_mlp' = True"),
        ({"use_bidirectional_attention": "all"}, "'use_bidirectional_attention' = 'all'"),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "'per_layer_config' gives layers of one type other"),
        ({"per_layer_config": {"0": {"sliding_window": 8}}}, r"'per_layer_config\[0\].sliding_window'"),
    ],
)
def test_what_gemma_4_has_beyond_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        parse_config(gemma4(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"per_layer_config": []},
        {"per_layer_config": {"60": {"head_dim": 512}}},
        {"per_layer_config": {"5": 512}},
        {"num_global_key_value_heads": 5},
        {"global_head_dim": 511},
    ],
)
def test_impossible_heads_of_gemma_4_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadConfig, match=r"per_layer_config|layers with full attention have"):
        parse_config(gemma4(**changes))
