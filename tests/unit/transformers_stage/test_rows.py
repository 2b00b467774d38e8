"""transformers' layers compute what native ones do, cut by cut: each is the other's oracle.

`make test` has some families, `make test-full` further ones each day, `make test-models` all.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint import Checkpoint, CheckpointError
from stage_worker.model.pipeline_stage import PipelineStage
from tests.families import families_of, make_family
from tests.unit.stage_worker.model.pipeline import Pipeline
from tests.unit.stage_worker.model.test_parity import compute_in_chunks, random_sequences
from transformers_stage.stage import TransformersStage

QUICK = ("gemma2", "gpt_oss", "granite", "cohere2")
"""Caps, sinks and experts, multipliers of both ends, layers without rotation."""
LATENT = (
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "deepseek_v32", "glm_moe_dsa", "hy_v4"),
)
RECURRENT = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "qwen4_exp_text"),
    *(
        "granitemoehybrid",
        "granitemoehybrid+dense",
        "bamba",
        "falcon_h1",
        "falcon_h1+plain",
        "nemotron_h",
        "nemotron_h+latent",
    ),
)
CUTS = (1, 2, 3, 4)


def params() -> Iterator[Any]:
    for name in dict.fromkeys((*QUICK, *families_of(datetime.date.today()))):
        is_chosen = name in QUICK or "STAGELINE_TEST_FAMILIES" in os.environ
        yield name if is_chosen else pytest.param(name, marks=pytest.mark.full)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("family", list(params()))
def test_hidden_states_at_every_cut_equal_native_ones(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = make_family(tmp_path_factory.mktemp(family) / "model", family)
    checkpoint = Checkpoint.open(directory)
    if (reason := refused_because(family)) is not None:
        with pytest.raises(CheckpointError, match=reason):
            Pipeline(checkpoint, CUTS, stage_type=TransformersStage)
        return
    native, other = (outputs(checkpoint, stage_type) for stage_type in (None, TransformersStage))
    assert len(native) == len(other) > len(CUTS)
    for expected, found in zip(native, other, strict=True):
        assert expected.std() > 0
        assert float((found - expected).abs().max() / expected.std()) < 1e-4


def refused_because(family: str) -> str | None:
    """The text of the error of families that only native layers serve."""
    if family in LATENT:
        return r"layer 0: (queries of|latents are kept)|has no causal language model of it|cannot be examined"
    if family in (*RECURRENT, "deepseek_v4"):  # whose compressors keep the tokens of open entries
        return "layers keep recurrent state, which has no pages"
    return "'longrope' depend on the sequences" if family == "phi3" else None


def outputs(checkpoint: Checkpoint, stage_type: Any) -> list[Tensor]:
    """Hidden states after each stage of each step, and the logits of each sequence."""
    options = {} if stage_type is None else {"stage_type": stage_type}
    pipeline = Pipeline(checkpoint, CUTS, **options)
    found: list[Tensor] = []
    for stage in pipeline.stages:
        record(stage, found)
    found += compute_in_chunks(pipeline, random_sequences([41, 1, 9, 26]), [7, 5, 1, 11])
    return found


def record(stage: PipelineStage, found: list[Tensor]) -> None:
    """Let `stage` note what it hands on."""
    forward = stage.forward

    def recorded(*args: Any) -> Tensor:
        hidden = forward(*args)
        found.append(hidden.to(torch.float32).clone())
        return hidden

    stage.forward = recorded  # type: ignore[method-assign]
