"""A quantised checkpoint generates the tokens of its unpacked weights in transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint import Checkpoint, DType, WeightFormat, stage_weight_bytes
from stage_worker.model.quantize import rounded_to
from tests.checkpoints import load_reference
from tests.local_pipeline import LocalPipeline
from tests.quantized import (
    CONFIG,
    FORMATS,
    LATENT_CONFIG,
    MOE_CONFIG,
    is_packed,
    write_plain,
    write_quantized,
)

NUM_NEW_TOKENS = 24
PROMPTS = [[5, 17, 60, 2, 90], [44], list(range(3, 60, 2))]


def _reference_tokens(directory: Path, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    output = load_reference(directory).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.matrix(2, full=10)
@pytest.mark.parametrize("form", FORMATS)
def test_tokens_are_those_of_the_unpacked_weights(form: str, tmp_path: Path) -> None:
    weights = write_quantized(tmp_path / "quantized", FORMATS[form], seed=2)
    write_plain(tmp_path / "plain", weights)
    expected = [_reference_tokens(tmp_path / "plain", prompt) for prompt in PROMPTS]
    assert len({token for tokens in expected for token in tokens}) > 12, "a degenerate model proves nothing"
    for layers in ((CONFIG["num_hidden_layers"],), (1, 1)):
        pipeline = LocalPipeline(tmp_path / "quantized", layers, block_size=16, max_step_tokens=16)
        assert pipeline.generate(PROMPTS, max_tokens=NUM_NEW_TOKENS) == expected


@pytest.mark.matrix(1)
@pytest.mark.parametrize("form", ["fp8-block", "float-channel", "pack4-group"])
def test_quantised_experts_generate_the_tokens_of_their_unpacked_weights(form: str, tmp_path: Path) -> None:
    """The router is plain, as in published checkpoints."""
    listed = "modules_to_not_convert" if "modules_to_not_convert" in FORMATS[form].config else "ignore"
    plain = ["lm_head", "model.layers.1.mlp.gate"]
    packed = replace(FORMATS[form], config=FORMATS[form].config | {listed: plain}, plain=(".mlp.gate.",))
    weights = write_quantized(tmp_path / "quantized", packed, seed=2, config=MOE_CONFIG)
    assert is_packed(packed, "model.layers.1.mlp.experts.3.up_proj.weight")
    write_plain(tmp_path / "plain", weights, config=MOE_CONFIG)
    expected = [_reference_tokens(tmp_path / "plain", prompt) for prompt in PROMPTS]
    assert len({token for tokens in expected for token in tokens}) > 12, "a degenerate model proves nothing"
    for layers in ((CONFIG["num_hidden_layers"],), (1, 1)):
        pipeline = LocalPipeline(tmp_path / "quantized", layers, block_size=16, max_step_tokens=16)
        assert pipeline.generate(PROMPTS, max_tokens=NUM_NEW_TOKENS) == expected


def test_native_fp8_of_deepseek_v3_generates_the_tokens_of_its_unpacked_weights(tmp_path: Path) -> None:
    """Its config names no module that is plain; the projections of latents are unpacked before use."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    native = replace(FORMATS["fp8-block"], config=config | {"weight_block_size": [48, 40]}, plain=())
    weights = write_quantized(tmp_path / "quantized", native, seed=3, config=LATENT_CONFIG)
    assert is_packed(native, "model.layers.0.self_attn.kv_a_proj_with_mqa.weight")
    write_plain(tmp_path / "plain", weights, config=LATENT_CONFIG)
    expected = [_reference_tokens(tmp_path / "plain", prompt) for prompt in PROMPTS]
    assert len({token for tokens in expected for token in tokens}) > 12, "a degenerate model proves nothing"
    for layers in ((2,), (1, 1)):
        pipeline = LocalPipeline(tmp_path / "quantized", layers, block_size=16, max_step_tokens=16)
        assert pipeline.generate(PROMPTS, max_tokens=NUM_NEW_TOKENS) == expected
    unpacked, plain = (Checkpoint.open(tmp_path / name).config for name in ("quantized", "plain"))
    sizes = [
        stage_weight_bytes(one, DType.F32, 0, 2, has_embeddings=True, has_head=True)
        for one in (unpacked, plain)
    ]
    assert sizes[0] == sizes[1] == sum(array.nbytes for array in weights.values())


@pytest.mark.matrix(1)
@pytest.mark.parametrize("form", WeightFormat)
def test_tokens_are_those_of_the_rounded_weights(form: WeightFormat, tmp_path: Path) -> None:
    plain = write_quantized(tmp_path / "random", FORMATS["float-tensor"], seed=4)
    write_plain(tmp_path / "plain", plain)
    rounded = {
        name: rounded_to(form, torch.from_numpy(array)).numpy() if name.endswith("_proj.weight") else array
        for name, array in plain.items()
    }
    write_plain(tmp_path / "rounded", rounded)
    expected = [_reference_tokens(tmp_path / "rounded", prompt) for prompt in PROMPTS]
    assert expected != [_reference_tokens(tmp_path / "plain", prompt) for prompt in PROMPTS]
    for layers in ((CONFIG["num_hidden_layers"],), (1, 1)):
        pipeline = LocalPipeline(tmp_path / "plain", layers, max_step_tokens=16, weights=form)
        assert pipeline.generate(PROMPTS, max_tokens=NUM_NEW_TOKENS) == expected
