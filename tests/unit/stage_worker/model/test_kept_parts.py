"""A stage built from parts of a previous load computes the same as a freshly loaded one."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoint import Checkpoint, DType, stage_tensor_names
from stage_worker.model.decoder import DecoderStage
from stage_worker.model.kernels import PLAIN, Kernels, ProductMethod
from stage_worker.model.parts import LoadedParts, PartsRead
from stage_worker.validation import SliceLayout
from tests.checkpoints import byte_outside_of_samples, flip_byte, make_checkpoint
from tests.step_layouts import layout_for
from tests.unit.stage_worker.model.kernel_choices import CHOICES, PACKED_SDPA, skip_unless_possible
from tests.unit.stage_worker.model.pipeline import NanPages

LAYERS, BLOCK, NUM_BLOCKS = 8, 8, 16
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "yarn window": (
        "mistral",
        {
            "sliding_window": 11,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
    "mixed windows": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 11,
            "max_window_layers": 3,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
}
RANGES = [(begin, end) for begin in range(LAYERS) for end in range(begin + 1, LAYERS + 1)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    return {
        name: Checkpoint.open(
            make_checkpoint(
                tmp_path_factory.mktemp("kept"),
                family,
                num_layers=LAYERS,
                dtype="bfloat16",
                head_dim=32,
                **options,
            )
        )
        for name, (family, options) in MODELS.items()
    }


@dataclass
class Reading:
    """Counts bytes read; calls `then` after each read."""

    expected: list[int] = field(default_factory=list)
    num_bytes: int = 0
    then: Callable[[], None] = lambda: None

    def expect(self, num_bytes: int) -> None:
        self.expected.append(num_bytes)

    def advance(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.then()


def new_stage(
    checkpoint: Checkpoint, begin: int, end: int, kernels: Kernels, dtype: DType = DType.BF16
) -> DecoderStage:
    return DecoderStage(
        checkpoint.config,
        layer_begin=begin,
        layer_end=end,
        has_embeddings=begin == 0,
        has_head=end == LAYERS,
        dtype=dtype,
        kernels=kernels,
    )


def outputs(stage: DecoderStage) -> list[Tensor]:
    """Hidden states, and logits of LAST, for a prompt in two chunks and four decodes."""
    config, size = stage.config, stage.config.hidden_size
    shape = config.page_shape(stage.windows[0])
    pages = NanPages.of(shape, len(stage.layers), NUM_BLOCKS, BLOCK, stage.torch_dtype)
    generator = torch.Generator().manual_seed(3)
    found, done = [], 0
    for count in (21, 8, 1, 1, 1, 1):
        order = tuple(7 * block % NUM_BLOCKS for block in range(-(-(done + count) // BLOCK)))
        layout = layout_for(
            stage, [SliceLayout(first_position=done, num_tokens=count, pages=order)], block_size=BLOCK
        )
        if stage.has_embeddings:
            hidden = stage.embed(torch.randint(0, config.vocab_size, (count,), generator=generator))
        else:
            hidden = torch.randn((count, size), generator=generator).to(stage.torch_dtype)
        hidden = stage.forward(hidden, layout, pages)
        found += [hidden, stage.logits(hidden)] if stage.has_head else [hidden]
        done += count
    assert all(torch.isfinite(tensor).all() for tensor in found)
    return found


def names_of(checkpoint: Checkpoint, begin: int, end: int) -> set[str]:
    return set(
        stage_tensor_names(checkpoint.config, begin, end, has_embeddings=begin == 0, has_head=end == LAYERS)
    )


def bytes_of(checkpoint: Checkpoint, names: Collection[str]) -> int:
    return sum(checkpoint.tensors[name].end - checkpoint.tensors[name].begin for name in names)


def is_only_packed(ranges: tuple[int, int], *, tied: bool, kernels: Kernels) -> bool:
    """Whether the stage has the embedding matrix only in oneDNN's packed layout."""
    return tied and kernels.products is not ProductMethod.LINEAR and ranges[0] > 0 and ranges[1] == LAYERS


@pytest.mark.matrix(1, full=4)
@pytest.mark.parametrize("choice", ["plain", "packed", "in place"])
@pytest.mark.parametrize("model", MODELS)
def test_any_sequence_of_ranges_equals_a_fresh_load_and_reads_only_new_layers(
    model: str, choice: str, checkpoints: dict[str, Checkpoint]
) -> None:
    checkpoint, kernels = checkpoints[model], CHOICES[choice]
    skip_unless_possible(kernels, checkpoint.config)
    tied = checkpoint.config.tie_word_embeddings
    draw = random.Random(f"{model} {choice}")
    fresh: dict[tuple[int, int], list[Tensor]] = {}
    parts, held, before = LoadedParts(), set[str](), (0, 1)
    # Every role after every other, then random ranges.
    corners = [(0, LAYERS), (0, 5), (3, 6), (3, LAYERS)]
    walk = [corner for pair in itertools.permutations(corners, 2) for corner in pair]
    for begin, end in walk + draw.choices(RANGES, k=16):
        stage, reading = new_stage(checkpoint, begin, end, kernels), Reading()
        wanted = names_of(checkpoint, begin, end)
        missing = wanted - held
        if begin == 0 and is_only_packed(before, tied=tied, kernels=kernels):
            missing.add("model.embed_tokens.weight")
        read = stage.load(checkpoint, parts=parts, progress=reading)
        assert reading.num_bytes == read.num_bytes == bytes_of(checkpoint, missing)
        assert reading.expected == [read.num_bytes]
        if (begin, end) not in fresh:
            alone = new_stage(checkpoint, begin, end, kernels)
            alone.load(checkpoint)
            fresh[begin, end] = outputs(alone)
        for found, expected in zip(outputs(stage), fresh[begin, end], strict=True):
            assert torch.equal(found, expected), (before, (begin, end))
        held, before = wanted, (begin, end)


def test_a_load_reports_loaded_and_kept_parts(checkpoints: dict[str, Checkpoint]) -> None:
    checkpoint, parts = checkpoints["llama"], LoadedParts()

    def loaded(begin: int, end: int) -> str:
        return str(new_stage(checkpoint, begin, end, PLAIN).load(checkpoint, parts=parts))

    assert loaded(1, 6) == "layers 1-5 loaded, none kept"
    assert loaded(1, 7) == "layers 6 loaded, 1-5 kept"
    assert loaded(0, 8) == ("layers 0, 7 loaded, 1-6 kept; embeddings loaded; final norm loaded; head loaded")
    assert loaded(4, 8) == "layers none loaded, 4-7 kept; final norm kept; head kept"


def test_a_tied_head_is_listed_once(checkpoints: dict[str, Checkpoint]) -> None:
    stage = new_stage(checkpoints["tied"], 0, LAYERS, PLAIN)
    read = stage.load(checkpoints["tied"])
    assert str(read) == "layers 0-7 loaded, none kept; embeddings loaded; final norm loaded"


def read_again(
    checkpoint: Checkpoint, parts: LoadedParts, *, dtype: DType = DType.BF16, kernels: Kernels = PLAIN
) -> PartsRead:
    return new_stage(checkpoint, 2, 4, kernels, dtype).load(checkpoint, parts=parts)


@pytest.mark.parametrize("other", ["dtype", "kernels", "fingerprint"])
def test_parts_of_another_kind_are_not_used(other: str, checkpoints: dict[str, Checkpoint]) -> None:
    checkpoint, parts = checkpoints["llama"], LoadedParts()
    skip_unless_possible(PACKED_SDPA, checkpoint.config)
    read_again(checkpoint, parts)
    assert read_again(checkpoint, parts).num_bytes == 0
    everything = bytes_of(checkpoint, names_of(checkpoint, 2, 4))
    match other:
        case "dtype":
            assert read_again(checkpoint, parts, dtype=DType.F32).num_bytes == everything
        case "kernels":
            assert read_again(checkpoint, parts, kernels=PACKED_SDPA).num_bytes == everything
        case "fingerprint":
            assert read_again(checkpoints["tied"], parts).kept_layers == ()


@pytest.mark.parametrize("how", ["rewritten in place", "replaced", "copied"])
def test_weights_of_other_files_with_the_same_fingerprint_are_not_used(how: str, tmp_path: Path) -> None:
    """Also if fingerprints are equal because the differing values are not sampled."""
    directory = make_checkpoint(tmp_path / "model", "llama", num_layers=LAYERS)
    checkpoint, parts = Checkpoint.open(directory), LoadedParts()
    read_again(checkpoint, parts, dtype=DType.F32)
    file = directory / "model.safetensors"
    times = file.stat()
    name = "model.layers.2.mlp.gate_proj.weight"
    free = byte_outside_of_samples(name, checkpoint.tensors[name])
    changed = tmp_path / "changed.safetensors"
    shutil.copyfile(file, changed)
    flip_byte(changed, free)
    if how == "copied":
        directory = tmp_path / "copy"
        directory.mkdir()
        (directory / "config.json").write_bytes((tmp_path / "model" / "config.json").read_bytes())
    if how == "rewritten in place":
        file.write_bytes(changed.read_bytes())
    else:
        changed.replace(directory / "model.safetensors")
    os.utime(directory / "model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    now = Checkpoint.open(directory)
    assert now.fingerprint == checkpoint.fingerprint
    assert read_again(now, parts, dtype=DType.F32).kept_layers == ()


class Ended(Exception):
    """The load was cancelled."""


def test_a_load_that_ends_early_leaves_whole_parts_that_the_next_one_uses(
    checkpoints: dict[str, Checkpoint],
) -> None:
    checkpoint, parts = checkpoints["llama"], LoadedParts()
    new_stage(checkpoint, 0, 3, PLAIN).load(checkpoint, parts=parts)
    layer_bytes = bytes_of(checkpoint, names_of(checkpoint, 3, 4))
    reading = Reading()

    def end_within_the_third_layer() -> None:
        if reading.num_bytes > 2.5 * layer_bytes:
            raise Ended

    reading.then = end_within_the_third_layer
    with pytest.raises(Ended):
        new_stage(checkpoint, 2, 7, PLAIN).load(checkpoint, parts=parts, progress=reading)
    assert set(parts.layers) == {2, 3, 4}
    assert parts.embeddings is None
    stage, fresh = (new_stage(checkpoint, 3, 6, PLAIN) for _ in range(2))
    assert stage.load(checkpoint, parts=parts).read_layers == (5,)
    fresh.load(checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(outputs(stage), outputs(fresh), strict=True))
