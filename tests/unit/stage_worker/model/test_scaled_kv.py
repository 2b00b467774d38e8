"""Keys and values in 8 bits: compiled functions round as torch does, and attention reads what was written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from checkpoint import Checkpoint
from kvcache.scaled_pages import ScaledPages
from stage_worker.model.decoder_layer import attend
from stage_worker.model.kernels import PLAIN, Kernels
from stage_worker.model.operations import operations
from stage_worker.model.step_layout import LayerKv, StepLayout
from stage_worker.validation import SliceLayout
from tests.checkpoints import make_checkpoint
from tests.scaled_rows import adversarial_rows
from tests.unit.stage_worker.model.kernel_choices import CHOICES, IN_PLACE, skip_unless_possible
from tests.unit.stage_worker.model.test_operations import (
    BLOCK,
    HEADS,
    KV_HEADS,
    attention_by_formula,
    layout,
    mixer_of,
    random,
)

FORMATS = [torch.int8, torch.float8_e4m3fn]
PROMPTS = [(0, 130), (40, 1), (61, 13), (200, 70), (7, 1), (263, 64)]
"""First position and number of queries of each slice: without and with history, and single ones."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(make_checkpoint(tmp_path_factory.mktemp("m"), "llama", num_layers=1, head_dim=32))


def new_pages(head_dim: int, element: torch.dtype, num_layers: int = 1) -> ScaledPages:
    return ScaledPages(
        num_layers=num_layers,
        num_blocks=256,
        block_size=BLOCK,
        num_kv_heads=KV_HEADS,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        device="cpu",
        element=element,
    )


@pytest.mark.parametrize("element", FORMATS)
def test_compiled_writes_equal_torch_bit_by_bit(element: torch.dtype, checkpoint: Checkpoint) -> None:
    skip_unless_possible(IN_PLACE, checkpoint.config)
    slices = [
        SliceLayout(first_position=6, num_tokens=4, pages=(3, 1), num_valid=8),
        SliceLayout(first_position=0, num_tokens=30, pages=(6, 9, 8, 2)),
    ]
    step = layout(checkpoint, IN_PLACE, slices, None)
    num_tokens, num_rows = 34, HEADS + 2 * KV_HEADS
    heads = random(num_tokens, num_rows, 32, dtype=torch.bfloat16)
    fresh = adversarial_rows(num_tokens * 2 * KV_HEADS, 32, torch.bfloat16).view(num_tokens, -1, 32)
    fresh[:, :KV_HEADS].clamp_(-1e30, 1e30)  # rotations of larger keys overflow
    heads[:, HEADS:] = fresh.flip(0)  # the first tokens are not written
    # Compiled functions flush subnormal numbers to zero.
    heads[heads.abs() < 1e-30] = 0.0
    heads[9, HEADS + 1, 3] = float("nan")
    found = []
    for chosen in (operations(IN_PLACE), operations(PLAIN)):
        pages, mine = new_pages(32, element, num_layers=2), heads.clone()
        chosen.rotate_and_write(mine, HEADS, *step.rotary.values(), LayerKv(step, pages, 1))
        found.append((pages.store(1).view(torch.uint8), pages.scales(1), mine))
    (codes, scales, rounded), (plain_codes, plain_scales, plain_rounded) = found
    assert scales is not None and plain_scales is not None
    torch.testing.assert_close(scales, plain_scales, rtol=0, atol=0, equal_nan=True)
    assert int(scales.isnan().sum()) == 1
    is_sound = scales.isfinite()
    assert torch.equal(codes[is_sound], plain_codes[is_sound])
    assert int((scales != 0).sum()) == 32 * 2 * KV_HEADS, "two valid tokens are not written again"
    torch.testing.assert_close(rounded, plain_rounded, rtol=0, atol=1e-38, equal_nan=True)


def sequences(
    head_dim: int, element: torch.dtype
) -> tuple[ScaledPages, list[SliceLayout], list[Tensor], list[Tensor]]:
    """Pages, slices, and the written and the read keys and values of each sequence."""
    blocks = iter(torch.randperm(256, generator=torch.Generator().manual_seed(4)).tolist())
    pages = new_pages(head_dim, element)
    slices, written, read = [], [], []
    for index, (first, count) in enumerate(PROMPTS):
        length = first + count
        table = tuple(next(blocks) for _ in range(-(-length // BLOCK)))
        slices.append(SliceLayout(first_position=first, num_tokens=count, pages=table))
        tokens = random(length, 2 * KV_HEADS, head_dim, dtype=torch.bfloat16, seed=index)
        tokens[:, :KV_HEADS] *= 3
        tokens[length // 2, :KV_HEADS, 1] = 30.0  # an outlier, which takes the precision of its row
        written.append(tokens.clone())
        slots = [table[i // BLOCK] * BLOCK + i % BLOCK for i in range(length)]
        pages.write(0, tokens, torch.tensor(slots))
        read.append(tokens)
    return pages, slices, written, read


def attended(
    checkpoint: Checkpoint,
    kernels: Kernels,
    heads: Tensor,
    pages: ScaledPages,
    step: StepLayout,
    window: int | None,
) -> Tensor:
    output = torch.full((len(heads), HEADS, heads.shape[2]), float("nan"), dtype=torch.bfloat16)
    attend(
        *(heads[:, :HEADS], heads, output),
        operations=operations(kernels),
        mixer=mixer_of(heads.shape[2], window),
        kv=LayerKv(step, pages, 0),
    )
    return output


@pytest.mark.matrix(4)
@pytest.mark.parametrize("element", FORMATS)
@pytest.mark.parametrize(("head_dim", "window"), [(32, None), (64, 11), (128, None), (256, 100)])
@pytest.mark.parametrize("choice", CHOICES)
def test_attention_is_that_over_the_values_that_pages_hold(
    choice: str, head_dim: int, window: int | None, element: torch.dtype, checkpoint: Checkpoint
) -> None:
    kernels = CHOICES[choice]
    skip_unless_possible(kernels, checkpoint.config)
    pages, slices, written, read = sequences(head_dim, element)
    num_tokens = sum(count for _, count in PROMPTS)
    heads = random(num_tokens, HEADS + 2 * KV_HEADS, head_dim, dtype=torch.bfloat16, seed=99)
    heads[:, HEADS:] = torch.cat([x[first:] for x, (first, _) in zip(read, PROMPTS, strict=True)])
    step = layout(checkpoint, kernels, slices, window)
    output = attended(checkpoint, kernels, heads, pages, step, window).double()
    expected = [[], []]
    for (first, count), *both in zip(PROMPTS, read, written, strict=True):
        for position in range(first, first + count):
            query = heads[len(expected[0]), :HEADS]
            begin = max(0, position + 1 - (window or position + 1))
            for found, tokens in zip(expected, both, strict=True):
                seen = tokens[begin : position + 1]
                found.append(attention_by_formula(query, seen[:, :KV_HEADS], seen[:, KV_HEADS:], None))
    of_pages, unrounded = (torch.stack(found) for found in expected)
    error = (output - of_pages).abs()
    assert float(error.max()) < 0.06
    assert float(error.square().mean().sqrt()) < 0.005
    assert float((of_pages - unrounded).square().mean().sqrt()) > 0.006, "the rounding shows"
