"""A GGUF file serves what a safetensors checkpoint of the same weights serves."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file

from checkpoint import (
    Checkpoint,
    CheckpointError,
    DType,
    GatedDelta,
    KimiDelta,
    Latent,
    Mamba2,
    NoMixer,
    UnsupportedModel,
    stage_tensor_names,
)
from checkpoint.directory import describe
from checkpoint.dtypes import BlockDType
from checkpoint.gguf.families import FAMILIES
from checkpoint.gguf.files import read_gguf_file
from checkpoint.names import LLAMA_NAMES
from stage_worker.loading.reference import StreamedModel
from stage_worker.loading.reference_copies import EXACT
from stage_worker.model.latent_attention import LatentAttention
from stage_worker.model.weights import load_rows, load_tensors
from tests.checkpoints import make_checkpoint
from tests.families import FAMILIES as FAMILY_SETTINGS
from tests.families import make_family
from tests.gguf_files import (
    ARCHITECTURES,
    QuantType,
    add_tensor,
    dequantised,
    quantised,
    tensors_of,
    write_gguf,
)
from tests.gguf_mamba import MAMBA_TYPES
from tests.local_pipeline import LocalPipeline
from tests.unit.stage_worker.model.pipeline import Pipeline
from tests.unit.stage_worker.model.test_families import spread_of
from tests.unit.stage_worker.model.test_parity import compute_in_chunks, random_sequences
from tests.unit.stage_worker.model.test_weights import make_stage

PROMPTS = [[5, 17, 60, 2, 90], [44], list(range(3, 60, 2))]
ALL_SPARSE: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": []}
NO_WINDOW: dict[str, Any] = {"use_sliding_window": False, "sliding_window": None}
_NO_BIAS: dict[str, Any] = {
    "attention_bias": False,
    "rope_parameters": FAMILY_SETTINGS["deepseek_v3"]["rope_parameters"] | {"mscale": 0.5},
}
_NO_FACTORS: dict[str, Any] = dict.fromkeys(
    ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"), False
) | {"embedding_multiplier": 1.0, "lm_head_multiplier": 1.0}
"""Those of Falcon H1's ends, which would be in embeddings and head; llama.cpp knows no biases."""
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {"mlp_bias": False},
    "mixtral": {"sliding_window": None},
    "qwen2": NO_WINDOW,
    "qwen3": {},
    "qwen2_moe": NO_WINDOW | ALL_SPARSE,
    "qwen3_moe": NO_WINDOW | ALL_SPARSE,
    "qwen3_moe+fused": NO_WINDOW | ALL_SPARSE,
    "gemma3_text": {
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "query_pre_attn_scalar": 16,
        "num_layers": 7,
    },
    "gpt_oss": {"swiglu_limit": 7.0, "rms_norm_eps": 1e-5},
    "deepseek_v2": _NO_BIAS | {"topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "deepseek_v3": _NO_BIAS,
    "deepseek_v3+split": _NO_BIAS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3}},
    "deepseek_v32+split": _NO_BIAS,
    "glm_moe_dsa": {"mlp_layer_types": None, "first_k_dense_replace": 2},
    "glm_moe_dsa+split": {"mlp_layer_types": None, "first_k_dense_replace": 2},
    "qwen3_next": {"mlp_only_layers": []},
    "qwen3_next+one": {"mlp_only_layers": []},
    "qwen3_5_text": {"attention_bias": False},
    "qwen3_5_moe_text": {},
    "kimi_linear": {"linear_num_heads": 4, "mlp_layer_types": None},
    "granitemoehybrid": {"mamba_proj_bias": False},
    "granitemoehybrid+dense": {
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
    },
    "nemotron_h+dense": {"layers_block_type": ["linear_attention", "mlp", "mlp", "full_attention", "mlp"]},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "moe", "full_attention", "linear_attention"],
        "moe_latent_size": 40,
    },
    "falcon_h1": _NO_FACTORS | {"mamba_norm_before_gate": False},
    "falcon_h1+plain": _NO_FACTORS | {"mamba_rms_norm": False},
}
"""What llama.cpp's metadata cannot express is left at its default."""
MAMBA_ARCHITECTURES = {"granitehybrid", "nemotron_h", "nemotron_h_moe", "falcon-h1"}
assert {
    ARCHITECTURES[name] for family in SETTINGS if (name := family.partition("+")[0]) not in MAMBA_TYPES
} | MAMBA_ARCHITECTURES == {family.architecture for family in FAMILIES}


QUICK = (
    "llama",
    "gemma3_text",
    "gpt_oss",
    "deepseek_v3+split",
    "qwen3_moe+fused",
    "qwen3_next",
    "qwen3_5_moe_text",
)
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("", "dense", "plain")},
    "split": {"has_split_heads": True},
    "one": {"has_one_input": True},
    "fused": {"has_fused_experts": True},
}
REORDERED = ("qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid", "falcon_h1")
"""Files have heads, or their elements, in another order, so that a product sums over them in another order,
or weights that were multiplied and rounded before.
"""


@pytest.fixture(
    scope="module",
    params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in SETTINGS],
)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in float32, and the GGUF file of its weights."""
    parent = tmp_path_factory.mktemp(request.param)
    family, _, variant = request.param.partition("+")
    directory = make_family(parent / "model", family, **SETTINGS[request.param])
    return directory, write_gguf(parent / "model.gguf", directory, settings=VARIANTS[variant])


@pytest.mark.matrix(3)
def test_logits_have_the_bits_of_the_same_weights_in_safetensors(both: tuple[Path, Path]) -> None:
    plain, packed = (Checkpoint.open(path) for path in both)
    cuts = (1, 3)
    logits = [
        compute_in_chunks(Pipeline(checkpoint, cuts), random_sequences([41, 1, 17]), [7, 5, 11])
        for checkpoint in (plain, packed)
    ]
    for expected, found in zip(*logits, strict=True):
        assert expected.std() > 0.1
        if plain.config.model_type in REORDERED:
            assert spread_of(found, expected) < 1e-4
        else:
            assert torch.equal(found, expected)


def with_logarithms(mixer: Any) -> Any:
    return replace(mixer, has_rates=False) if isinstance(mixer, KimiDelta | Mamba2) else mixer


def test_the_plan_is_the_one_of_config_json(both: tuple[Path, Path]) -> None:
    """But for names, for pairs of rotated elements, and for the 1 in weights of norms."""
    plain, packed = (Checkpoint.open(path).config for path in both)
    assert packed.names != LLAMA_NAMES
    assert packed.num_layers == plain.num_layers
    assert replace(packed, names=plain.names, layers=plain.layers, final_norm=plain.final_norm) == plain
    for found, expected in zip(packed.layers, plain.layers, strict=True):
        assert found.feed_forward == expected.feed_forward
        assert found.norm.eps == expected.norm.eps
        if isinstance(expected.mixer, KimiDelta | Mamba2 | NoMixer):
            assert with_logarithms(found.mixer) == expected.mixer
            continue
        assert with_logarithms(found.beside) == expected.beside
        if isinstance(expected.mixer, GatedDelta):
            assert isinstance(found.mixer, GatedDelta)
            assert replace(found.mixer, layout=expected.mixer.layout) == expected.mixer
            continue
        assert not isinstance(found.mixer, GatedDelta | KimiDelta | Mamba2 | NoMixer)
        assert found.mixer.page_shape == expected.mixer.page_shape
        assert found.mixer.window == expected.mixer.window


def test_the_reference_of_the_self_check_reads_gguf(both: tuple[Path, Path]) -> None:
    text = list(range(3, 40))
    found = []
    for path in both:
        model = StreamedModel(Checkpoint.open(path), DType.F32)
        with torch.inference_mode():
            *_, hidden = model.hidden_states([text])
            found.append(hidden[EXACT])
    assert spread_of(found[1], found[0]) < 1e-4


@pytest.mark.full
@pytest.mark.parametrize("family", [pytest.param("qwen3_5_text", marks=pytest.mark.full), "qwen3_5_moe_text"])
def test_tiled_value_heads_give_the_same_tokens_at_any_cut(family: str, tmp_path: Path) -> None:
    """Value heads of two key heads take turns, three each; draft layers are at the end, and not read."""
    directory = make_family(tmp_path / "model", family, **SETTINGS[family])

    def add_draft(writer: GGUFWriter) -> None:
        add_tensor(writer, "blk.5.nextn.eh_proj.weight", np.ones((4, 8), np.float32), QuantType.F32)

    path = write_gguf(tmp_path / "model.gguf", directory, settings={"num_drafts": 1}, extra=add_draft)
    checkpoint = Checkpoint.open(path)
    assert (checkpoint.config.num_layers, checkpoint.drafts.num_tensors) == (5, 1)
    expected = LocalPipeline(directory, (5,)).generate(PROMPTS, max_tokens=24)
    for cuts in ((5,), (1, 4), (2, 1, 2), (4, 1)):
        assert LocalPipeline(path, cuts).generate(PROMPTS, max_tokens=24) == expected


def test_as_many_key_heads_as_value_heads_keep_their_order(tmp_path: Path) -> None:
    directory = make_family(tmp_path / "model", "qwen3_5_text", attention_bias=False, linear_num_key_heads=6)
    checkpoints = [Checkpoint.open(path) for path in (directory, write_gguf(tmp_path / "a.gguf", directory))]
    expected, found = (
        compute_in_chunks(Pipeline(checkpoint, (2,)), random_sequences([33, 1]), [7, 5])
        for checkpoint in checkpoints
    )
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_quantised_projections_of_the_delta_rule_are_unpacked(tmp_path: Path) -> None:
    widths = {"hidden_size": 64, "linear_value_head_dim": 32, "linear_key_head_dim": 32}
    directory = make_family(tmp_path / "model", "qwen3_5_moe_text", **widths)
    kind = quantised("Q8_0")
    packed, rounded = (
        Checkpoint.open(write_gguf(tmp_path / f"{name}.gguf", directory, *types, rounding=kind))
        for name, types in (("packed", (kind,)), ("rounded", ()))
    )
    assert {"blk.0.attn_qkv.weight", "blk.0.ssm_out.weight", "blk.0.ssm_beta.weight"} <= packed.packed.keys()
    packed = replace(packed, config=replace(packed.config, dtype=DType.F32))
    expected, found = (
        compute_in_chunks(Pipeline(checkpoint, (2,)), random_sequences([33, 1]), [7, 5])
        for checkpoint in (rounded, packed)
    )
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_the_usual_interval_of_full_attention_is_a_number(tmp_path: Path) -> None:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    settings = {"attention_bias": False, "layer_types": kinds * 2, "num_layers": 8}
    directory = make_family(tmp_path / "model", "qwen3_5_text", **settings)
    file = read_gguf_file(path := write_gguf(tmp_path / "model.gguf", directory))
    assert file.metadata["qwen35.full_attention_interval"] == 4
    layers = Checkpoint.open(path).config.layers
    assert [isinstance(layer.mixer, GatedDelta) for layer in layers] == [True, True, True, False] * 2


def test_draft_layers_of_nemotron_3_are_counted_and_not_read(tmp_path: Path) -> None:
    directory = make_family(tmp_path / "model", "nemotron_h", **SETTINGS["nemotron_h"])
    expected = Checkpoint.open(write_gguf(tmp_path / "plain.gguf", directory)).config

    def add_draft(writer: GGUFWriter) -> None:
        add_tensor(writer, "blk.5.nextn.eh_proj.weight", np.ones((4, 8), np.float32), QuantType.F32)

    path = write_gguf(tmp_path / "model.gguf", directory, settings={"num_drafts": 1}, extra=add_draft)
    checkpoint = Checkpoint.open(path)
    assert (checkpoint.config.num_layers, checkpoint.drafts.num_tensors) == (5, 1)
    assert replace(checkpoint.config, num_draft_layers=0) == expected


@pytest.mark.parametrize(
    ("family", "metadata", "message"),
    [
        ("granitemoehybrid", {"granitehybrid.rope.dimension_count": 12}, "rope.dimension_count' = 12 is not"),
        ("granitemoehybrid", {"granitehybrid.ssm.dt_b_c_rms": True}, "'granitehybrid.ssm.dt_b_c_rms' = True"),
        ("granitemoehybrid", {"granitehybrid.ssm.inner_size": 145}, "is 145, no multiple of 6 heads"),
        ("granitemoehybrid", {"granitehybrid.ssm.inner_size": 150}, "mamba_n_heads 6 times mamba_d_head 25"),
        ("nemotron_h", {"nemotron_h_moe.expert_gating_func": 1}, "expert_gating_func' = 1 is not supported"),
        (
            "nemotron_h",
            {"nemotron_h_moe.expert_shared_count": 2},
            "expert_shared_count' = 2 is not supported",
        ),
        ("nemotron_h", {"nemotron_h_moe.rope.scaling.finetuned": True}, "has no layers with rotation"),
        ("kimi_linear", {"kimi-linear.expert_gating_func": 1}, "expert_gating_func' = 1 is not supported"),
        ("kimi_linear", {"kimi-linear.hidden_act": "situ"}, "'kimi-linear.hidden_act' = 'situ' is not"),
        ("falcon_h1", {"falcon-h1.ssm.group_count": 0}, "must be a positive integer, is 0"),
    ],
)
def test_what_files_with_states_cannot_have_is_refused_by_key(
    family: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    directory = make_family(tmp_path / "model", family, **SETTINGS.get(family, {}))
    path = write_gguf(tmp_path / "model.gguf", directory, metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(path)


def test_glm_5_2_shares_indexers_without_a_list_of_them(tmp_path: Path) -> None:
    types = ["full", "full", "full", "shared", "shared"]
    settings = SETTINGS["glm_moe_dsa"] | {"indexer_types": types}
    directory = make_family(tmp_path / "model", "glm_moe_dsa", **settings)
    for length, num_own in ((1 << 20, 3), (1 << 17, 5)):
        path = tmp_path / f"{length}.gguf"
        write_gguf(path, directory, settings={"indexer_types": None, "max_position_embeddings": length})
        layers = describe(path).config.layers
        assert [isinstance(layer.mixer, Latent) and layer.mixer.indexer is None for layer in layers] == [
            False
        ] * num_own + [True] * (5 - num_own)


def test_quantised_matrices_of_heads_are_loaded_as_keys_and_values(tmp_path: Path) -> None:
    """A head's keys are stored across: [kv_rank, nope_dim], in blocks of nope_dim."""
    widths = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
    directory = make_family(tmp_path / "model", "deepseek_v3", **_NO_BIAS, **widths)
    path = write_gguf(
        tmp_path / "model.gguf", directory, quantised("Q8_0"), settings={"has_split_heads": True}
    )
    checkpoint, exact = Checkpoint.open(path), dequantised(path)
    stage = make_stage(checkpoint, 0, checkpoint.config.num_layers)
    stage.load(checkpoint)
    for index, layer in enumerate(stage._loaded().layers):
        assert isinstance(layer._mix, LatentAttention)
        keys, values = (torch.from_numpy(exact[f"blk.{index}.attn_{name}_b.weight"]) for name in "kv")
        assert torch.equal(layer._mix._to_keys, keys.transpose(1, 2).to(stage.torch_dtype))
        assert torch.equal(layer._mix._to_values, values.to(stage.torch_dtype))


def test_latents_of_deepseek2_are_read_from_older_and_newer_files(tmp_path: Path) -> None:
    directory = make_family(tmp_path / "model", "deepseek_v3", **_NO_BIAS)
    found = [
        Checkpoint.open(
            write_gguf(tmp_path / f"{is_split}.gguf", directory, settings={"has_split_heads": is_split})
        ).config
        for is_split in (False, True)
    ]
    mixers = [config.layers[0].mixer for config in found]
    assert all(isinstance(mixer, Latent) for mixer in mixers)
    assert [mixer.is_split for mixer in mixers if isinstance(mixer, Latent)] == [False, True]
    assert mixers[0] == replace(mixers[1], is_split=False)
    names = {True: "blk.0.attn_k_b.3.weight", False: "blk.0.attn_kv_b.weight"}
    for is_split, config in zip((False, True), found, strict=True):
        tensors = stage_tensor_names(config, 0, 1, has_embeddings=False, has_head=False)
        assert {kind: name in tensors for kind, name in names.items()} == {
            is_split: True,
            not is_split: False,
        }


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"deepseek2.expert_gating_func": 3},
            "'deepseek2.expert_gating_func' = 3 is not",
        ),
        ({"deepseek2.attention.indexer.top_k": 2048}, "'deepseek2.attention.indexer.top_k' = 2048"),
        ({"deepseek2.expert_group_count": 4}, "'deepseek2.expert_group_count' = 4 is not supported"),
    ],
)
def test_what_deepseek2_does_not_compute_is_refused_by_key(
    metadata: dict[str, int], message: str, tmp_path: Path
) -> None:
    """Groups of DeepSeek V2 are ranked by their best expert, which llama.cpp does not do."""
    directory = make_family(tmp_path / "model", "deepseek_v2", **SETTINGS["deepseek_v2"])
    path = write_gguf(tmp_path / "model.gguf", directory, metadata=metadata)
    with pytest.raises(UnsupportedModel, match=message):
        Checkpoint.open(path)


BLOCKS = (
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "MXFP4",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
)
"""The last ones have random blocks, which the package cannot make of weights."""
WHOLE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "head_dim": 64,
    "num_layers": 2,
    "initializer_range": 0.2,
}
"""Sizes of whole blocks."""


def write_plain_of(path: Path, packed: Path, like: Path) -> Path:
    """A safetensors checkpoint of the dequantised weights, which keep llama.cpp's order of rows."""
    config = json.loads((like / "config.json").read_text())
    weights = dequantised(packed)
    tensors = {}
    for name, tensor in load_file(like / "model.safetensors").items():
        array = weights[next(iter(tensors_of(config, {name: tensor.numpy()})))]
        if name.endswith(("q_proj.weight", "k_proj.weight")) and config["model_type"] == "llama":
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            array = array.reshape(heads, -1, 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        tensors[name] = torch.from_numpy(array.copy())
    path.mkdir()
    (path / "config.json").write_text((like / "config.json").read_text())
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    "kind",
    [kind if kind in ("Q4_0", "Q6_K") else pytest.param(kind, marks=pytest.mark.full) for kind in BLOCKS],
)
def test_quantised_weights_compute_the_bits_of_their_unpacked_weights(kind: str, tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "made", "llama", **WHOLE)
    packed = write_gguf(tmp_path / "packed.gguf", made, quantised(kind))
    plain = write_plain_of(tmp_path / "plain", packed, made)
    checkpoint = Checkpoint.open(packed)
    assert checkpoint.config.quantization is not None
    assert checkpoint.config.quantization.label == kind.lower()
    assert len(checkpoint.packed) == 2 * 7 + 2
    assert checkpoint.config.dtype is DType.BF16
    expected, found = (
        compute_in_chunks(
            Pipeline(replace(opened, config=replace(opened.config, dtype=DType.F32)), (1,)),
            random_sequences([23, 1, 9]),
            [7, 5],
        )
        for opened in (Checkpoint.open(plain), checkpoint)
    )
    for one, other in zip(expected, found, strict=True):
        assert one.std() > 0.1
        assert torch.equal(one, other)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K", "F16", "BF16"])
def test_windows_and_rows_of_any_size_have_the_bits_of_the_whole_tensor(kind: str, tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "made", "llama", **WHOLE | {"num_layers": 1})
    packed = write_gguf(tmp_path / "packed.gguf", made, quantised(kind))
    checkpoint, weights = Checkpoint.open(packed), dequantised(packed)
    for window_bytes in (64, 5000, 1 << 25):
        places = {name: torch.full(array.shape, float("nan")) for name, array in weights.items()}
        load_tensors(checkpoint, places, window_bytes=window_bytes)
        for name, array in weights.items():
            assert np.array_equal(places[name].numpy(), array), name
    name = "blk.0.ffn_up.weight"
    for first, last in ((0, 1), (3, 4), (5, 27), (0, 256)):
        rows = torch.empty((last - first, 256))
        load_rows(checkpoint, name, rows, first_row=first)
        assert np.array_equal(rows.numpy(), weights[name][first:last])


def test_a_stage_reads_its_tensors_and_no_others(tmp_path: Path) -> None:
    """The other tensors are holes beyond the end of the file."""
    made = make_checkpoint(tmp_path / "made", "qwen3", **WHOLE | {"num_layers": 4})
    packed = write_gguf(tmp_path / "packed.gguf", made, quantised("Q4_0"))
    checkpoint = Checkpoint.open(packed)
    own = stage_tensor_names(checkpoint.config, 1, 3, has_embeddings=False, has_head=False)
    expected = {name: checkpoint.tensors[name].num_bytes for name in own}
    stage = make_stage(checkpoint, 1, 3)
    with packed.open("r+b") as stream:
        for name, entry in checkpoint.tensors.items():
            if name not in own:
                stream.seek(entry.begin)
                stream.write(b"\xff" * entry.num_bytes)
    read = stage.load(checkpoint)
    assert read.num_bytes == sum(expected.values())
    matrices = 2 * 256 * (256 + 2 * 128 + 256 + 3 * 256)
    assert sum(expected.values()) == matrices // 32 * 18 + 2 * (2 * 256 + 2 * 64) * 4


def test_a_model_of_several_files_is_the_model_of_one(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "made", "llama", num_layers=3)
    whole = write_gguf(tmp_path / "whole.gguf", made)
    first = write_gguf(tmp_path / "shards.gguf", made, split_max_tensors=7)
    files = sorted(tmp_path.glob("shards-*.gguf"))
    assert len(files) == math.ceil(len(dequantised(whole)) / 7) > 2
    checkpoint = Checkpoint.open(first)
    assert {entry.file for entry in checkpoint.tensors.values()} == {file.name for file in files}
    assert checkpoint.name == "shards"
    found, expected = (LocalPipeline(path, (1, 2)).generate(PROMPTS, max_tokens=8) for path in (first, whole))
    assert found == expected


def test_frequencies_are_divided_by_the_factors_of_the_file(tmp_path: Path) -> None:
    """Llama 3.1 as llama.cpp's converter writes it: the scaling is a tensor."""
    scaling = {"rope_type": "llama3", "rope_theta": 1e3, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 128}  # fmt: skip
    made = make_checkpoint(tmp_path / "made", "llama", num_layers=2, rope_parameters=scaling)
    wavelengths = [2 * math.pi * 1e3 ** (pair / 8) for pair in range(8)]
    factors = [_llama3_factor(wavelength) for wavelength in wavelengths]
    assert len(set(factors)) > 2

    def extra(writer: Any) -> None:
        add_tensor(writer, "rope_freqs.weight", np.array(factors, np.float32), QuantType.F32)

    packed = write_gguf(tmp_path / "packed.gguf", made, extra=extra)
    sequences = [random_sequences([60, 21]) for _ in range(2)]
    expected, found = (
        compute_in_chunks(Pipeline(Checkpoint.open(path), (1,)), sequence, [60])
        for path, sequence in zip((made, packed), sequences, strict=True)
    )
    for one, other in zip(expected, found, strict=True):
        assert spread_of(other, one) < 1e-4
    assert not Checkpoint.open(packed).for_length(None).config.has_long_rope


def _llama3_factor(wavelength: float) -> float:
    """llama.cpp's convert_hf_to_gguf.py, generate_extra_tensors."""
    if wavelength < 128 / 4:
        return 1.0
    if wavelength > 128 / 1:
        return 8.0
    smooth = (128 / wavelength - 1.0) / (4.0 - 1.0)
    return 1 / ((1 - smooth) / 8 + smooth)


def test_any_order_of_dtypes_in_one_file_is_served(tmp_path: Path) -> None:
    """As in published files, whose matrices have different types by name."""
    made = make_checkpoint(tmp_path / "made", "qwen2", **WHOLE)
    kinds = {"attn_v": "Q8_0", "ffn_down": "F16", "token_embd": "Q5_1", "attn_q": "BF16"}

    def type_of(name: str, array: Any) -> QuantType:
        found = next((kind for part, kind in kinds.items() if f"{part}.weight" in name), "Q4_1")
        return quantised(found)(name, array)

    packed = write_gguf(tmp_path / "packed.gguf", made, type_of)
    checkpoint = Checkpoint.open(packed)
    assert checkpoint.tensors["blk.1.attn_v.weight"].dtype is BlockDType.Q8_0
    assert checkpoint.tensors["blk.1.ffn_down.weight"].dtype is DType.F16
    plain = write_plain_of(tmp_path / "plain", packed, made)
    expected = LocalPipeline(plain, (1, 1)).generate(PROMPTS, max_tokens=16)
    assert LocalPipeline(packed, (1, 1)).generate(PROMPTS, max_tokens=16) == expected
