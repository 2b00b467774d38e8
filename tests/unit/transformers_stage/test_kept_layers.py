"""Layers by transformers stay in memory from one plan to the next, as native ones do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoint import Checkpoint, CheckpointError, DType, stage_tensor_names
from stage_worker.model.decoder import DecoderStage
from stage_worker.model.parts import LoadedParts
from stage_worker.validation import SliceLayout
from tests.step_layouts import layout_for
from tests.unit.stage_worker.model.pipeline import NanPages
from tests.unit.transformers_stage.test_families import NUM_LAYERS, CountedBytes, make, new_stage
from transformers_stage.stage import TransformersStage

PLANS = [(0, 2), (1, 3), (2, 4), (0, 4), (0, 1), (3, 4)]
"""Layers of one worker in one plan after the other."""


def outputs(stage: TransformersStage) -> list[Tensor]:
    """Hidden states, and logits of the last stage, of a prompt."""
    config = stage.config
    pages = NanPages.of(config.page_shape(None), len(stage.layers), 4, 8, stage.torch_dtype)
    layout = layout_for(stage, [SliceLayout(first_position=0, num_tokens=21, pages=(0, 1, 2))], block_size=8)
    generator = torch.Generator().manual_seed(3)
    if stage.has_embeddings:
        hidden = stage.embed(torch.randint(0, config.vocab_size, (21,), generator=generator))
    else:
        hidden = torch.randn((21, config.hidden_size), generator=generator).to(stage.torch_dtype)
    hidden = stage.forward(hidden, layout, pages)
    return [hidden, stage.logits(hidden)] if stage.has_head else [hidden]


def sizes_of(checkpoint: Checkpoint, begin: int, end: int) -> dict[str, int]:
    """Bytes of the tensors that a stage needs."""
    names = stage_tensor_names(
        checkpoint.config, begin, end, has_embeddings=begin == 0, has_head=end == NUM_LAYERS
    )
    return {name: checkpoint.tensors[name].num_bytes for name in names}


@pytest.mark.matrix(1)
@pytest.mark.parametrize("family", ["helium", "gemma", "phimoe"])
def test_a_new_plan_reads_only_what_the_worker_lacks(family: str, tmp_path: Path) -> None:
    checkpoint, parts = Checkpoint.open(make(tmp_path, family)), LoadedParts()
    before: dict[str, int] = {}
    for begin, end in PLANS:
        stage, progress, asked = new_stage(checkpoint.config, begin, end), CountedBytes(), list[str]()
        report = stage.load(checkpoint, parts=parts, progress=progress, prepare=asked.extend)
        needed = sizes_of(checkpoint, begin, end)
        lacked = needed.keys() - before.keys()
        assert set(asked) == lacked
        assert progress.read == progress.expected == report.num_bytes == sum(needed[name] for name in lacked)
        assert sorted((*report.read_layers, *report.kept_layers)) == list(range(begin, end))
        fresh = new_stage(checkpoint.config, begin, end)
        fresh.load(checkpoint)
        for found, expected in zip(outputs(stage), outputs(fresh), strict=True):
            assert torch.equal(found, expected), (begin, end)
        before = needed


def test_layers_that_leave_are_dropped_before_others_are_read(tmp_path: Path) -> None:
    checkpoint, parts = Checkpoint.open(make(tmp_path, "helium")), LoadedParts()
    new_stage(checkpoint.config, 0, 3).load(checkpoint, parts=parts)
    held: list[int] = []

    class Watched(CountedBytes):
        def expect(self, num_bytes: int) -> None:
            held.append(sum(one.nbytes for values in parts.in_modules.values() for one in values.values()))

    stage = new_stage(checkpoint.config, 2, 4)
    stage.load(checkpoint, parts=parts, progress=Watched())
    sizes = [sizes_of(checkpoint, *plan) for plan in ((0, 3), (2, 4))]
    assert held == [sum(sizes[0][name] for name in sizes[0].keys() & sizes[1].keys())]
    values = [one for values in parts.in_modules.values() for one in values.values()]
    assert sum(one.nbytes for one in values) == stage.weight_bytes


def test_a_load_that_fails_keeps_what_it_has_read(tmp_path: Path) -> None:
    checkpoint, parts = Checkpoint.open(make(tmp_path, "helium")), LoadedParts()
    new_stage(checkpoint.config, 0, 1).load(checkpoint, parts=parts)

    class Ending(CountedBytes):
        def advance(self, num_bytes: int) -> None:
            super().advance(num_bytes)
            if any("layers.1." in tensors[0] for tensors in parts.in_modules):
                raise TimeoutError

    with pytest.raises(TimeoutError):
        new_stage(checkpoint.config, 0, 4).load(checkpoint, parts=parts, progress=Ending())
    progress = CountedBytes()
    new_stage(checkpoint.config, 0, 2).load(checkpoint, parts=parts, progress=progress)
    assert progress.read == 0


def test_parts_of_another_format_or_code_are_dropped(tmp_path: Path) -> None:
    checkpoint, parts = Checkpoint.open(make(tmp_path, "llama", num_key_value_heads=2)), LoadedParts()
    for stage in (
        new_stage(checkpoint.config, 0, 4),
        new_stage(checkpoint.config, 0, 4, dtype=DType.BF16),
        DecoderStage(
            checkpoint.config,
            layer_begin=0,
            layer_end=4,
            has_embeddings=True,
            has_head=True,
            dtype=DType.BF16,
        ),
        new_stage(checkpoint.config, 0, 4, dtype=DType.BF16),
    ):
        progress = CountedBytes()
        stage.load(checkpoint, parts=parts, progress=progress)
        assert progress.read == sum(sizes_of(checkpoint, 0, 4).values())
    assert not parts.layers


def test_a_checkpoint_error_leaves_no_part_half_filled(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    directory, parts = make(tmp_path, "helium"), LoadedParts()
    file = directory / "model.safetensors"
    tensors = load_file(file)
    bad = tensors | {"model.layers.2.mlp.extra.weight": torch.zeros(2)}
    save_file(bad, file, {"format": "pt"})
    checkpoint = Checkpoint.open(directory)
    with pytest.raises(CheckpointError, match="unknown to"):
        new_stage(checkpoint.config, 0, 4).load(checkpoint, parts=parts)
    assert not any("layers.2." in name for names in parts.in_modules for name in names)
