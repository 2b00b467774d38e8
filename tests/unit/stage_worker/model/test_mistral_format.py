"""A checkpoint in Mistral's own format serves what transformers computes of the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoint import Checkpoint
from tests.checkpoints import load_reference
from tests.families import FAMILIES, make_family
from tests.local_pipeline import LocalPipeline, Request
from tests.mistral_files import mistral_name, save_mistral, vision_tensors, write_mistral
from tests.unit.stage_worker.model.pipeline import Pipeline
from tests.unit.stage_worker.model.test_families import CUTS, NUM_TOKENS, greedy_tokens, spread_of
from tests.unit.stage_worker.model.test_parity import compute_in_chunks, random_sequences, reference_logits

YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta": 2.0, "alpha": 0.125}
GROWTH = {"beta": 0.5, "original_max_position_embeddings": 32}
_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e3,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 2.0,
    "beta_slow": 0.125,
    "llama_4_scaling_beta": 0.5,
}
_PARTIAL = {"partial_rotary_factor": 0.4}
_LARGE = {"rms_norm_eps": 1e-6, "n_group": 1, "topk_group": 1}
_SCALED = {"rope_theta": 1e3, "yarn": YARN | {"apply_scale": False}, "llama_4_scaling": GROWTH}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # Without a temperature: as published.
    "large": (
        "mistral4",
        _LARGE | {"rope_parameters": _ROPE | _PARTIAL | {"attention_factor": 1.0}},
        _SCALED | {"vision_encoder": {"hidden_size": 4}},
    ),
    "large with a temperature": (
        "mistral4",
        _LARGE | {"rope_parameters": _ROPE | _PARTIAL | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        _SCALED | {"yarn": YARN},
    ),
    "dense": (
        "ministral3",
        {"sliding_window": None, "rope_parameters": _ROPE | {"attention_factor": 1.0}},
        _SCALED,
    ),
    "dense with a temperature": (
        "ministral3",
        {"sliding_window": None, "rope_parameters": _ROPE},
        _SCALED | {"yarn": YARN},
    ),
    "windows": ("mistral", {}, {"rope_theta": 1e3, "sliding_window": FAMILIES["mistral"]["sliding_window"]}),
}
"""Family in transformers, its settings, and the same in params.json."""


@pytest.fixture(scope="module", params=CASES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint of transformers in float32, and the same weights in Mistral's format."""
    family, settings, params = CASES[request.param]
    parent = tmp_path_factory.mktemp("mistral")
    source = make_family(parent / "source", family, **settings)
    return source, write_mistral(parent / "model", source, params, num_shards=3)


@pytest.mark.matrix(0, full=1)
def test_greedy_tokens_equal_transformers_at_every_cut(both: tuple[Path, Path]) -> None:
    source, directory = both
    prompts = [sequence.tokens for sequence in random_sequences([61, 1, 23])]
    expected = [greedy_tokens(source, prompt) for prompt in prompts]
    assert len(set(expected[0])) > 8, "a degenerate model proves nothing"
    for cut in CUTS:
        pipeline = LocalPipeline(directory, cut, block_size=8, max_step_tokens=24, num_blocks=64)
        run = pipeline.serve([Request(prompt=prompt, max_tokens=NUM_TOKENS) for prompt in prompts])
        assert run.tokens == expected, cut


def test_logits_equal_transformers(both: tuple[Path, Path]) -> None:
    source, directory = both
    sequences = random_sequences([61, 1, 34])
    found = compute_in_chunks(Pipeline(Checkpoint.open(directory), cuts=(1, 3)), sequences, [7, 5, 11])
    reference = load_reference(source)
    for sequence, logits in zip(sequences, found, strict=True):
        assert spread_of(logits, reference_logits(reference, sequence.tokens)) < 1e-4


def fp8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A matrix in fp8 with a scale of each block, its scales [rows, columns], and what the two stand for."""
    rows, columns = (-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    padded = torch.zeros(rows * block[0], columns * block[1])
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, block[0], columns, block[1])
    scales = blocks.abs().amax(dim=(1, 3)) / 448
    wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    wide = wide[: weight.shape[0], : weight.shape[1]]
    packed = (weight / wide).to(torch.float8_e4m3fn)
    return packed, scales, packed.float() * wide


_PLAIN = (".wkv_a_with_mqa.weight", ".wq_a.weight")
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed_tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "FP8_BLOCK": {
            "targets": ["Linear"],
            "input_activations": {"dynamic": True, "num_bits": 8, "type": "float"},
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "block",
                "block_structure": [16, 32],
                "dynamic": False,
            },
        }
    },
    "ignore": [
        "model.embed_tokens",
        "re:vision_encoder.*",
        "re:.*kv_a_proj_with_mqa$",
        "re:.*q_a_proj$",
        "re:.*gate$",
        "lm_head",
    ],
}


@pytest.mark.parametrize("is_block", [False, True])
def test_fp8_weights_equal_what_they_stand_for(is_block: bool, tmp_path: Path) -> None:
    """With a scale per tensor in Mistral's words, and with blocks of compressed-tensors, as published."""
    family, settings, params = CASES["large"]
    source = make_family(tmp_path / "source", family, **settings)
    plain = write_mistral(tmp_path / "plain", source, params)
    tensors, packed, unpacked = load_file(plain / "consolidated.safetensors"), {}, {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        is_outside = name.startswith("layers.") is False or name.endswith(".gate.weight")
        if tensor.dim() != 2 or is_outside or (is_block and name.endswith(_PLAIN)):
            packed[name] = unpacked[name] = tensor
            continue
        block = (16, 32) if is_block else (tensor.shape[0], tensor.shape[1])
        packed[name], scales, unpacked[name] = fp8(tensor, block)
        if is_block:
            packed[f"{module}.weight_scale"] = scales
        else:
            packed |= {f"{module}.qscale_weight": scales[0, 0], f"{module}.qscale_act": torch.ones(())}
    given = json.loads((plain / "params.json").read_text())
    save_mistral(tmp_path / "unpacked", unpacked, given)
    form = {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}}
    if is_block:
        form = {"quantization_config": COMPRESSED}
    save_mistral(tmp_path / "packed", packed | vision_tensors(), given | form)
    checkpoint = Checkpoint.open(tmp_path / "packed")
    assert checkpoint.ignored.num_tensors == len(vision_tensors())
    assert any("experts.0.w1" in name for name in checkpoint.packed)
    logits = [
        compute_in_chunks(Pipeline(Checkpoint.open(path), (1, 3)), random_sequences([17, 40]), [7, 5])
        for path in (tmp_path / "packed", tmp_path / "unpacked", plain)
    ]
    for found, expected, other in zip(*logits, strict=True):
        assert spread_of(found, expected) < 1e-5
        assert spread_of(found, other) > 1e-3, "quantisation changes nothing"


def test_names_are_those_that_a_published_index_has() -> None:
    names = {
        "model.layers.7.self_attn.kv_a_proj_with_mqa.weight": "layers.7.attention.wkv_a_with_mqa.weight",
        "model.layers.7.mlp.experts.12.down_proj.weight": "layers.7.experts.12.w2.weight",
        "model.layers.7.mlp.shared_experts.up_proj.weight": "layers.7.shared_experts.w3.weight",
        "model.layers.7.mlp.gate.weight": "layers.7.gate.weight",
        "model.layers.0.mlp.gate_proj.weight": "layers.0.feed_forward.w1.weight",
        "lm_head.weight": "output.weight",
    }
    assert {name: mistral_name(name) for name in names} == names
