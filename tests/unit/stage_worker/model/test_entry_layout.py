"""Which entries a step pools, of which tokens, and which its queries see: compared with a plain count."""

from __future__ import annotations

import random

import pytest
import torch

from checkpoint.compressed import Compressor
from stage_worker.model.attention_views import ViewRules
from stage_worker.model.decode_rows import DecodeRows
from stage_worker.model.entry_layout import EntryView, entry_arrays, source_slots
from stage_worker.model.kernels import PRODUCTS
from stage_worker.model.step_layout import StepArrays
from stage_worker.validation import SliceLayout

LENGTHS = [(0, 1), (0, 23), (7, 1), (15, 17), (31, 1), (30, 3)]
"""First position and number of tokens of each slice; those of one token may come as decodes."""


def slices_of(block_size: int) -> list[SliceLayout]:
    free = list(range(400))
    random.Random(block_size).shuffle(free)
    return [
        SliceLayout(
            first_position=first,
            num_tokens=count,
            pages=[free.pop() for _ in range(-(-(first + count) // block_size))],
            num_valid=first + 2 if count > 4 else first,
        )
        for first, count in LENGTHS
    ]


def rules_of(block_size: int, compressor: Compressor) -> ViewRules:
    return ViewRules(
        block_size=block_size,
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernels=PRODUCTS,
        max_keys=1 << 20,
        compressors=(compressor,),
    )


CASES = [
    (block_size, Compressor(ratio=ratio, has_overlap=has_overlap))
    for block_size, ratio, has_overlap in (
        (8, 4, True),
        (4, 4, True),
        (2, 4, True),
        (2, 8, False),
        (16, 8, False),
    )
]


@pytest.mark.parametrize(("block_size", "compressor"), CASES)
def test_entries_are_pooled_where_their_last_token_is_written(
    block_size: int, compressor: Compressor
) -> None:
    slices, ratio = slices_of(block_size), compressor.ratio
    rules = rules_of(block_size, compressor)
    arrays = StepArrays.build(slices, windows=(None,), rules=rules)
    found = arrays.entries[compressor]
    sources = source_slots(DecodeRows.of(()), slices, compressor, block_size)
    assert not arrays.views, "entries have no keys of tokens"
    expected, targets, kept, firsts = [], [], [], []
    for item in slices:
        for position in range(item.first_position, item.end_position):
            if (position + 1) % ratio:
                continue
            tokens = range(position + 1 - compressor.span, position + 1)
            expected.append(
                [item.pages[t // block_size] * block_size + t % block_size if t >= 0 else -1 for t in tokens]
            )
            if position >= item.num_valid:
                kept.append(len(expected) - 1)
                firsts.append(position + 1 - ratio)
                rows = max(1, block_size // ratio)
                page, offset = item.pages[position // block_size], position % block_size
                targets.append(page * rows + offset // ratio * (block_size >= ratio))
    assert sources.tolist() == expected
    assert found.slots.tolist() == targets
    assert found.firsts.tolist() == firsts
    assert kept == (list(range(len(expected))) if found.kept is None else found.kept.tolist())


@pytest.mark.parametrize(("block_size", "compressor"), CASES)
@pytest.mark.parametrize("num_decodes", [0, 1])
def test_queries_see_the_entries_that_have_ended(
    block_size: int, compressor: Compressor, num_decodes: int
) -> None:
    """By the blocks in which they end, in the order of a sequence; a query that sees none has no view."""
    slices, ratio = slices_of(block_size), compressor.ratio
    rows = max(1, block_size // ratio)
    decodes, others = DecodeRows.of(slices[:num_decodes]), slices[num_decodes:]
    rules = rules_of(block_size, compressor)
    arrays = StepArrays.build(others, decodes=decodes, windows=(None,), rules=rules)
    made: list[EntryView] = [view.make(torch.from_numpy) for view in arrays.entries[compressor].views]
    found = {}
    for view in made:
        numbers = (
            range(view.rows.start, view.rows.stop) if isinstance(view.rows, slice) else view.rows.tolist()
        )
        for index, row in enumerate(numbers):
            pages = view.pages[index if len(view.pages) > 1 else 0].tolist()
            count = int(view.counts[index])
            assert view.most >= count
            found[row] = [(pages[e // rows], e % rows) for e in range(count)]
    row, expected = 0, {}
    for item in slices:
        for position in range(item.first_position, item.end_position):
            ends = [(e + 1) * ratio - 1 for e in range((position + 1) // ratio)]
            if ends or (item.num_tokens > 1 and item.end_position >= ratio):
                expected[row] = [(item.pages[p // block_size], p % block_size // ratio) for p in ends]
            row += 1
    assert found == {
        key: places if block_size >= ratio else [(p, 0) for p, _ in places]
        for key, places in expected.items()
    }


def test_a_step_without_entries_pools_nothing() -> None:
    compressor = Compressor(ratio=8)
    item = SliceLayout(first_position=0, num_tokens=7, pages=[3, 4])
    rules = rules_of(4, compressor)
    positions = torch.arange(7).numpy()
    found = entry_arrays(DecodeRows.of(()), [item], positions, positions, compressor, rules)
    assert (found.slots.size, found.kept, found.views) == (0, None, ())
    assert source_slots(DecodeRows.of(()), [item], compressor, 4).shape == (0, 8)
