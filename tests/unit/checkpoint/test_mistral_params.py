"""params.json: published files are read, and what may change tokens is refused with its name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoint import (
    Attention,
    BadConfig,
    BadHeader,
    Blueprint,
    Checkpoint,
    CheckpointNotFound,
    Dense,
    Experts,
    Latent,
    MissingTensor,
    UnexpectedTensor,
    UnsupportedModel,
    parse_config,
    stage_tensor_shapes,
)
from checkpoint.blueprint import RouterScore
from checkpoint.dtypes import DType
from checkpoint.inspection import inspect
from checkpoint.mistral.model import describe_mistral
from checkpoint.mistral.params import read_params
from checkpoint.rope_config import QueryGrowth, RopeKind
from tests.checkpoints import make_checkpoint
from tests.mistral_files import save_mistral, write_mistral

LARGE: dict[str, Any] = {
    "dim": 7168,
    "n_layers": 61,
    "head_dim": 192,
    "hidden_dim": 16384,
    "n_heads": 128,
    "n_kv_heads": 128,
    "rope_theta": 10000.0,
    "norm_eps": 1e-06,
    "vocab_size": 131072,
    "tied_embeddings": False,
    "max_position_embeddings": 294912,
    "llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1},
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "kv_lora_rank": 512,
    "v_head_dim": 128,
    "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "NO_SCALES"},
    "yarn": {
        "original_max_position_embeddings": 8192,
        "factor": 36,
        "apply_scale": False,
        "beta": 32,
        "alpha": 1,
    },
    "moe": {
        "expert_parallel": 1,
        "expert_model_parallel": 1,
        "route_every_n": 1,
        "first_k_dense_replace": 3,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "num_expert_groups": 1,
        "num_expert_groups_per_tok": 1,
        "routed_scale": 1.0,
        "expert_hidden_dim": 4096,
        "num_shared_experts": 1,
    },
    "vision_encoder": {"image_token_id": 10, "hidden_size": 1664},
}
DENSE: dict[str, Any] = {
    "dim": 5120,
    "n_layers": 40,
    "head_dim": 128,
    "hidden_dim": 16384,
    "n_heads": 32,
    "n_kv_heads": 8,
    "rope_theta": 1e9,
    "norm_eps": 1e-05,
    "vocab_size": 131072,
    "max_position_embeddings": 262144,
    "llama_4_scaling": {"original_max_position_embeddings": 16384, "beta": 0.1},
    "yarn": {
        "original_max_position_embeddings": 16384,
        "factor": 16,
        "apply_scale": False,
        "beta": 32,
        "alpha": 1,
    },
    "q_lora_rank": None,
}


def config_of(params: dict[str, Any]) -> Blueprint:
    found = read_params(params)
    return parse_config(found.raw, stored_dtype=DType.BF16, row=found.row)


def with_changes(params: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Changed fields by their dotted paths; `...` removes one."""
    made: dict[str, Any] = json.loads(json.dumps(params))
    for path, value in changes.items():
        *parents, key = path.split(".")
        inner = made
        for parent in parents:
            inner = inner[parent]
        if value is ...:
            del inner[key]
        else:
            inner[key] = value
    return made


def test_mistral_large_3_is_read() -> None:
    config = config_of(LARGE)
    assert [type(layer.feed_forward) for layer in config.layers[2:4]] == [Dense, Experts]
    experts, mixer = config.layers[3].feed_forward, config.layers[0].mixer
    assert isinstance(experts, Experts)
    assert isinstance(mixer, Latent)
    assert (experts.count, experts.per_token, experts.width) == (128, 4, 4096)
    assert experts.router.score is RouterScore.SOFTMAX
    assert experts.router.is_normalised
    assert not experts.router.has_choice_bias
    assert mixer.scale == 192**-0.5, "no temperature without apply_scale"
    assert mixer.query_growth == QueryGrowth(beta=0.1, original_length=8192)
    assert mixer.rope is not None
    assert (mixer.rope.kind, mixer.rope.factor, mixer.rope.attention_factor) == (RopeKind.YARN, 36.0, 1.0)
    assert mixer.rope.is_interleaved
    assert config.max_position_embeddings == 294912
    shapes = stage_tensor_shapes(config, 3, 4, has_embeddings=True, has_head=True)
    assert shapes["layers.3.attention.wkv_a_with_mqa.weight"] == (576, 7168)
    assert shapes["layers.3.experts.127.w2.weight"] == (7168, 4096)
    assert shapes["tok_embeddings.weight"] == shapes["output.weight"] == (131072, 7168)
    every = stage_tensor_shapes(config, 0, 61, has_embeddings=True, has_head=True).values()
    assert round(sum(torch.Size(shape).numel() for shape in every) / 1e9) == 673


def test_the_temperature_of_yarn_multiplies_scores_unless_it_is_off() -> None:
    mixer = config_of(with_changes(LARGE, {"yarn.apply_scale": ...})).layers[0].mixer
    assert isinstance(mixer, Latent)
    assert mixer.scale == pytest.approx(192**-0.5 * (0.1 * 3.58351894 + 1) ** 2)
    dense = config_of(with_changes(DENSE, {"yarn.apply_scale": True})).layers[0].mixer
    assert isinstance(dense, Attention)
    assert dense.rope is not None
    assert dense.rope.attention_factor is None, "so that rotated elements have the temperature"


def test_dense_models_are_read() -> None:
    config = config_of(DENSE)
    mixer = config.layers[0].mixer
    assert isinstance(mixer, Attention)
    assert config.model_type == "ministral3"
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.window) == (32, 8, 128, None)
    assert mixer.rope is not None
    assert mixer.rope.is_interleaved
    assert mixer.query_growth == QueryGrowth(beta=0.1, original_length=16384)
    old = {key: DENSE[key] for key in ("dim", "n_layers", "head_dim", "hidden_dim", "n_heads", "n_kv_heads")}
    old |= {"norm_eps": 1e-5, "vocab_size": 32768, "sliding_window": 4096}
    config = config_of(old)
    assert (config.model_type, config.max_position_embeddings) == ("mistral", 128_000)
    assert config.layer_windows == (4096,) * 40
    assert config_of(old | {"max_seq_len": 4000}).max_position_embeddings == 4000


@pytest.mark.parametrize(
    ("params", "changes", "named"),
    [
        (LARGE, {"rope_scaling": {}}, "'rope_scaling' = {} is not supported"),
        (LARGE, {"model_type": "mamba"}, "'model_type' = 'mamba' is not supported, only 'transformer' is"),
        (LARGE, {"causal": False}, "'causal' = False is not supported, only True is"),
        (LARGE, {"multimodal": {"whisper_model_args": {}}}, "'multimodal' = .* is not supported"),
        (LARGE, {"moe.router_noise": 1}, "'moe.router_noise' = 1 is not supported"),
        (LARGE, {"moe.route_every_n": 2}, "'moe.route_every_n' = 2 is not supported, only 1 is"),
        (LARGE, {"moe.use_load_balancing_bias": True}, "'moe.use_load_balancing_bias' = True is not"),
        (LARGE, {"moe.num_experts": ...}, "'moe.num_experts' is missing"),
        (LARGE, {"moe": ...}, "'moe' must be an object"),
        (LARGE, {"norm_eps": 1e-5}, "'norm_eps' = 1e-05 is not supported with latent attention"),
        (LARGE, {"sliding_window": 4096}, "'sliding_window' is not supported with latent attention"),
        (LARGE, {"kv_lora_rank": ...}, "'kv_lora_rank' is missing"),
        (LARGE, {"head_dim": 96}, "'head_dim' = 96 contradicts"),
        (LARGE, {"yarn.truncate": True}, "'yarn.truncate' = True is not supported"),
        (LARGE, {"yarn.factor": ...}, "'factor' is missing"),
        (LARGE, {"yarn": ...}, "'llama_4_scaling' is supported together with 'yarn' only"),
        (
            LARGE,
            {"llama_4_scaling.original_max_position_embeddings": 4096},
            "'llama_4_scaling.original_max_position_embeddings' = 4096 is not supported, only the 8192",
        ),
        (LARGE, {"quantization.qformat_weight": "int4"}, "'quantization.qformat_weight' = 'int4' is not"),
        (LARGE, {"quantization.qscheme_act": "ROW"}, "'quantization.qscheme_act' = 'ROW' is not supported"),
        (LARGE, {"quantization.zero": 1}, "'quantization.zero' = 1 is not supported"),
        (LARGE, {"quantization_config": {"quant_method": "fp8"}}, "'quantization' and .* are both given"),
        (LARGE, {"quantization": {"quant_method": "exl3"}}, "quant_method 'exl3', which is not supported"),
        (DENSE, {"moe": {"num_experts": 8}}, "'moe' is supported with latent attention .* only"),
        (DENSE, {"kv_lora_rank": 512}, "'kv_lora_rank' is given, but 'qk_nope_head_dim' is missing"),
        (DENSE, {"sliding_window": [4096, None]}, "'sliding_window' lists a window for each layer"),
        (DENSE, {"activation": "quick"}, "'hidden_act' = 'quick' is not supported"),
        (DENSE, {"dim": ...}, "'hidden_size' is missing"),
    ],
)
def test_what_may_change_tokens_is_refused_by_name(
    params: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    with pytest.raises((UnsupportedModel, BadConfig), match=named):
        config_of(with_changes(params, changes))


def test_fields_without_effect_are_accepted() -> None:
    same = {
        "model_type": "transformer",
        "causal": True,
        "use_biases": False,
        "moe.renorm_strategy": "WEIGHTS",
    }
    assert config_of(with_changes(LARGE, same)) == config_of(LARGE)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    source = make_checkpoint(tmp_path / "source", "mistral", num_layers=2, sliding_window=None)
    return write_mistral(tmp_path / "model", source, {}, num_shards=2)


def test_a_directory_is_opened(directory: Path) -> None:
    checkpoint = Checkpoint.open(directory)
    assert checkpoint.name == "model"
    assert (checkpoint.bos_token_id, checkpoint.eos_token_ids) == (1, (2,))
    assert checkpoint.config.dtype is DType.F32
    assert inspect(directory).errors == []
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert Checkpoint.open(directory).eos_token_ids == (2, 7)


def test_other_values_and_fields_give_another_fingerprint(directory: Path) -> None:
    before = Checkpoint.open(directory).fingerprint
    params = json.loads((directory / "params.json").read_text())
    (directory / "params.json").write_text(json.dumps(params | {"norm_eps": 0.01}))
    assert Checkpoint.open(directory).fingerprint.partition("-")[0] != before.partition("-")[0]


def test_a_stored_head_is_used_where_the_file_ties_it(directory: Path) -> None:
    params = json.loads((directory / "params.json").read_text())
    (directory / "params.json").write_text(json.dumps(params | {"tied_embeddings": True}))
    assert not Checkpoint.open(directory).config.tie_word_embeddings


def test_a_config_takes_precedence(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(BadConfig, match="'num_hidden_layers' is missing"):
        Checkpoint.open(directory)


def test_tensors_are_named_as_in_the_files(directory: Path) -> None:
    config, headers = describe_mistral(directory).config, describe_mistral(directory).headers
    tensors = {name: torch.zeros(entry.shape) for name, entry in headers.tensors.items()}
    params = json.loads((directory / "params.json").read_text())
    wq = tensors.pop("layers.1.attention.wq.weight")
    one = directory.parent / "one"
    save_mistral(one, tensors, params)
    with pytest.raises(MissingTensor, match=re.escape("lacks layers.1.attention.wq.weight")):
        Checkpoint.open(one)
    assert [type(error) for error in inspect(one).errors] == [MissingTensor]
    more = tensors | {"layers.1.attention.wq.weight": wq, "eagle_linear.weight": torch.zeros(2)}
    save_mistral(one, more, params)
    with pytest.raises(UnexpectedTensor, match=r"has eagle_linear.weight, unknown to 'mistral'"):
        Checkpoint.open(one)
    assert config.num_layers == 2


def test_missing_files_are_named(directory: Path) -> None:
    index = directory / "consolidated.safetensors.index.json"
    content = json.loads(index.read_text())
    extra = {"weight_map": content["weight_map"] | {"a": "consolidated-00001-of-00002.safetensors"}}
    index.write_text(json.dumps(extra))
    with pytest.raises(MissingTensor, match=r"consolidated.safetensors.index.json places tensor a in"):
        Checkpoint.open(directory)
    del content["weight_map"]["norm.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(BadHeader, match=r"has tensor norm.weight, which consolidated.safetensors.index"):
        Checkpoint.open(directory)
    index.unlink()
    with pytest.raises(CheckpointNotFound, match=r"neither consolidated.safetensors nor consolidated"):
        Checkpoint.open(directory)
    save_file({"a": torch.zeros(1)}, directory / "model.safetensors")
    with pytest.raises(CheckpointNotFound, match=r"neither consolidated.safetensors nor"):
        Checkpoint.open(directory)
