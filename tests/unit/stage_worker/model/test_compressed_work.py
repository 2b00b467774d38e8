"""Work of compressed attention: each query has its keys, entries and pages, in parts that are merged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from checkpoint.compressed import Compressor, EntryIndexer
from checkpoint.step_sizes import KEY_SPLIT
from stage_worker.model import attention_work
from stage_worker.model.attention_views import ViewRules
from stage_worker.model.compressed_work import (
    EntryWork,
    JoinedWork,
    SequencePages,
    entry_work,
    sequence_pages,
)
from stage_worker.model.decode_rows import NO_DECODES, DecodeRows, SliceRows
from stage_worker.model.kernels import BY_TRITON, PRODUCTS
from stage_worker.model.step_layout import StepArrays
from stage_worker.validation import SliceLayout
from tests.step_layouts import placed_on

CPU = torch.device("cpu")
WINDOW, BLOCK = 128, 16
PLAIN = Compressor(ratio=128)
CHOOSING = Compressor(
    ratio=4, has_overlap=True, indexer=EntryIndexer(num_heads=4, head_dim=16, num_chosen=100)
)
SLICES = [(0, 1), (40, 70), (399, 1), (7000, 1), (0, 3), (2900, 30), (90, 1)]
"""(position of the first query, number of queries)."""


def layouts(slices: Sequence[tuple[int, int]], first: int) -> list[SliceLayout]:
    """The page of block b of slice i is `first` + 1,000 * i + b."""
    return [
        SliceLayout(
            first_position=position,
            num_tokens=count,
            pages=tuple(range(first + 1000 * number, first + 1000 * number - (-(position + count) // BLOCK))),
        )
        for number, (position, count) in enumerate(slices)
    ]


RULES = ViewRules(
    block_size=BLOCK,
    device=CPU,
    dtype=torch.bfloat16,
    kernels=BY_TRITON,
    max_keys=1,
    queries_per_item=4,
    compressors=(PLAIN, CHOOSING),
    key_window=WINDOW,
)


def work_of(compressor: Compressor, slices: Sequence[tuple[int, int]] = SLICES) -> EntryWork:
    rows = SliceRows.of(NO_DECODES, layouts(slices, 0))
    return entry_work(rows, compressor, RULES).make(torch.from_numpy)


def queries_of(slices: Sequence[tuple[int, int]] = SLICES) -> list[tuple[int, int]]:
    """Slice and position of each row."""
    return [(number, first + i) for number, (first, count) in enumerate(slices) for i in range(count)]


def numbers_of(slices: Sequence[tuple[int, int]] = SLICES) -> list[int]:
    """The slices in the order of their numbers in a work list."""
    return sorted(range(len(slices)), key=lambda number: slices[number][1] > 1)


Seen = dict[int, list[tuple[set[int], set[int]]]]
"""Keys and entries of each part of the list of each row."""


def seen_by(work: JoinedWork, ratio: int, *, is_choice: bool = False) -> Seen:
    """As the kernel reads the items; each row is in one part, or in those that a merge joins."""
    found: Seen = defaultdict(list)
    partials: dict[int, tuple[int, tuple[set[int], set[int]]]] = {}
    for item in work.items.tolist():
        first, count, _, position, *ranges, _, partial = item
        assert 1 <= count <= work.num_queries
        for index in range(count):
            own = position + index
            keys = {key for key in range(*ranges[:2]) if own - WINDOW < key <= own}
            entries = {entry for entry in range(*ranges[2:]) if is_choice or entry < (own + 1) // ratio}
            if partial < 0:
                found[first + index].append((keys, entries))
            else:
                partials[partial + index] = first + index, (keys, entries)
    assert sorted(partials) == list(range(work.num_partial))
    for row, begin, num_parts, distance in work.merges.tolist():
        assert num_parts > 1 and row not in found
        for number in range(num_parts):
            of_row, part = partials.pop(begin + number * distance)
            assert of_row == row
            found[row].append(part)
    assert not partials
    return found


def check(found: Seen, rows: Sequence[int], num_entries: Sequence[int]) -> None:
    """Each row sees the keys of its window and its first entries, each once."""
    assert set(found) == set(rows)
    positions = [position for _, position in queries_of()]
    for row, number in zip(rows, num_entries, strict=True):
        parts = found[row]
        keys = set(range(max(0, positions[row] - WINDOW + 1), positions[row] + 1))
        assert set().union(*(part[0] for part in parts)) == keys
        assert set().union(*(part[1] for part in parts)) == set(range(number))
        assert sum(len(part[0]) + len(part[1]) for part in parts) == len(keys) + number


def test_each_query_sees_its_window_and_all_entries_before_it() -> None:
    work = work_of(PLAIN)
    rows = range(len(queries_of()))
    check(seen_by(work.whole, 128), rows, [(position + 1) // 128 for _, position in queries_of()])
    assert not len(work.chosen.items) and not work.groups
    assert work.whole.num_queries == RULES.queries_per_item and work.whole.has_longer


def test_queries_that_choose_have_places_in_the_choices_of_all_groups() -> None:
    """One-token slices choose together, since one of them sees more than 100 entries; longer slices apart."""
    work = work_of(CHOOSING)
    places = queries_of()
    choosing = [row for row, (number, _) in enumerate(places) if number in (0, 2, 3, 5, 6)]
    in_order = sorted(choosing, key=lambda row: SLICES[places[row][0]][1] > 1)
    counts = [min(100, (position + 1) // 4) for _, position in places]
    check(seen_by(work.chosen, 4, is_choice=True), choosing, [counts[row] for row in choosing])
    others = sorted(set(range(len(places))) - set(choosing))
    check(seen_by(work.whole, 4), others, [counts[row] for row in others])
    of_groups = [
        row
        for group in work.groups
        for row in (range(*group.span) if group.queries is None else group.queries.tolist())
    ]
    assert of_groups == in_order
    assert all(in_order[item[8]] == item[0] for item in work.chosen.items.tolist())
    assert not any(len(group.attention.items) for group in work.groups)
    assert work.chosen.num_queries == 1 and work.chosen.has_longer


@pytest.mark.parametrize("compressor", [PLAIN, CHOOSING])
def test_items_name_their_sequences_whose_pages_each_group_has(compressor: Compressor) -> None:
    """Entries of 128 tokens are in every eighth block."""
    step = max(1, compressor.ratio // BLOCK)
    work = work_of(compressor)
    order, places = numbers_of(), queries_of()
    for part in (work.whole, work.chosen):
        for item in part.items.tolist():
            number, position = places[item[0]]
            assert (order[item[2]], item[3]) == (number, position)
    for sequence, number in enumerate(order):
        place, first = work.pages.firsts[sequence].tolist()
        num_pages = (-(-sum(SLICES[number]) // BLOCK)) // step
        expected = [1000 * number + block * step + step - 1 for block in range(num_pages)]
        assert first == 0 and work.pages.table[place : place + num_pages].tolist() == expected


def test_pages_of_keys_begin_with_the_first_block_that_is_held() -> None:
    """In the order of numbers in work lists, of decodes and slices."""
    item = SliceLayout(first_position=500, num_tokens=20, pages=(7, 8, 9, 10, 11, 12), first_block=27)
    single = SliceLayout(first_position=40, num_tokens=1, pages=(5, 3), first_block=1)
    decodes = DecodeRows(
        np.array([33]), np.array([[4, 6, 0, 0]]), first_blocks=np.array([1]), num_pages=np.array([2])
    )
    pages = sequence_pages(SliceRows.of(decodes, [item, single]), BLOCK).make(torch.from_numpy)
    assert pages.firsts.tolist() == [[0, 16], [2, 16], [4, 432]]
    assert pages.table.tolist() == [4, 6, 5, 3, 7, 8, 9, 10, 11, 12]


def test_lists_of_decodes_are_split_where_places_are_multiples() -> None:
    """Keys and entries 0 to 383 in the first part, as in a step of the sequence alone."""
    found = seen_by(work_of(replace(PLAIN, ratio=4)).whole, 4)
    rows = [row for row, (number, _) in enumerate(queries_of()) if number == 3]
    parts = found[rows[0]]
    assert [len(keys) + len(entries) for keys, entries in parts] == [KEY_SPLIT] * 3 + [342]
    assert (len(parts[0][0]), len(parts[1][0])) == (WINDOW, 0)
    alone = seen_by(work_of(replace(PLAIN, ratio=4), [SLICES[3]]).whole, 4)
    assert alone[0] == parts


def test_a_step_of_decodes_has_items_of_one_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_work, "KEY_SPLIT", 64)
    work = work_of(PLAIN, [(700, 1), (3, 1)])
    assert work.whole.num_queries == 1 and not work.whole.has_longer
    found = seen_by(work.whole, 128)
    assert [len(found[row]) for row in (0, 1)] == [3, 1]


def test_a_layout_has_work_beside_entries_and_pages_beside_keys() -> None:
    """Torch's operators have views instead."""
    slices = layouts(SLICES, 0)
    place = placed_on(CPU)
    for kernels, has_work in ((BY_TRITON, True), (PRODUCTS, False)):
        rules = replace(RULES, kernels=kernels)
        entries = StepArrays.build(slices, windows={None}, rules=rules).layout({}, place)
        keys = StepArrays.build(slices, windows={WINDOW}, rules=rules).layout({}, place)
        assert entries.key_pages is None and (keys.key_pages is not None) is has_work
        for step in entries.entries.values():
            assert (step.work is not None) is has_work and bool(step.views) is not has_work
        assert isinstance(keys.key_pages, SequencePages | None)
    assert set(keys.sources) == {PLAIN, CHOOSING} and not keys.entries
