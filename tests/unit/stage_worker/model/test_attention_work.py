"""Work lists of paged attention: each visible key of each query is in one item, by the query's position."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from checkpoint.step_sizes import CHUNK_SPLIT, KEY_SPLIT
from stage_worker.model.attention_work import AttentionWork, HostWork, WorkRoom, queries_per_item
from stage_worker.model.decode_rows import DecodeRows
from stage_worker.validation import SliceLayout

BLOCK = 16
SLICES = [(0, 1), (511, 1), (512, 1), (1600, 1), (3, 40), (9000, 64), (9000, 65)]


def layout(first: int, count: int, window: int | None) -> SliceLayout:
    first_block = 0 if window is None else max(0, first - window + 1) // BLOCK
    pages = range(first_block, -(-(first + count) // BLOCK))
    return SliceLayout(first_position=first, num_tokens=count, pages=tuple(pages), first_block=first_block)


def work_of(window: int | None, slices: list[tuple[int, int]] = SLICES) -> AttentionWork:
    work = host_work(window, slices)
    return work.on_device(torch.from_numpy(work.array))


def host_work(window: int | None, slices: list[tuple[int, int]] = SLICES) -> HostWork:
    layouts = [layout(first, count, window) for first, count in slices]
    num_singles = sum(count == 1 for _, count in slices)
    firsts = np.cumsum([0, *(count for _, count in slices)]).tolist()
    return HostWork.of(
        DecodeRows.of(layouts[:num_singles]),
        np.arange(num_singles),
        layouts[num_singles:],
        firsts[num_singles:-1],
        window=window,
        block_size=BLOCK,
        queries_per_item=16,
    )


@pytest.mark.matrix(1)
@pytest.mark.parametrize("window", [None, 1, 600])
def test_every_visible_key_is_read_once(window: int | None) -> None:
    """Pages of `layout` have the numbers of their blocks."""
    work = work_of(window)
    read: Counter[tuple[int, int]] = Counter()
    for row, count, first, begin, end, position, _ in work.items.tolist():
        first_page = int(work.table[first])
        for key in range(begin, end):
            page = int(work.table[first + key // BLOCK])
            assert page == first_page + key // BLOCK
            for query in range(count):
                is_seen = key <= position + query and (window is None or key > position + query - window)
                read[row + query, page * BLOCK + key % BLOCK] += is_seen
    positions = [position for first, count in SLICES for position in range(first, first + count)]
    for row, position in enumerate(positions):
        first_seen = 0 if window is None else max(0, position - window + 1)
        assert all(read[row, key] == 1 for key in range(first_seen, position + 1))
    assert read.total() == sum(
        position + 1 if window is None else min(window, position + 1) for position in positions
    )


def test_keys_are_split_by_position_alone() -> None:
    """Whatever pages were released, and whichever sequences are beside."""
    alone, beside = work_of(600, [(1600, 1)]), work_of(600)
    of_row = beside.items[beside.items[:, 0] == 3]
    assert torch.equal(alone.items[:, 3:6], of_row[:, 3:6])
    first_key = layout(1600, 1, 600).first_block * BLOCK
    ends = [end + first_key for end in of_row[:, 4].tolist()]
    assert ends == [2 * KEY_SPLIT, 3 * KEY_SPLIT, 1601]


def test_merges_have_the_parts_of_a_query_in_order() -> None:
    work = work_of(None)
    written: dict[int, list[tuple[int, int]]] = {}
    for row, count, _, begin, _, _, partial in work.items.tolist():
        if partial >= 0:
            for query in range(count):
                written.setdefault(row + query, []).append((begin, partial + query))
    merged = {
        row: [first + number * step for number in range(count)]
        for row, first, count, step in work.merges.tolist()
    }
    assert merged == {row: [place for _, place in sorted(parts)] for row, parts in written.items()}
    places = sorted(place for parts in merged.values() for place in parts)
    assert places == list(range(work.num_partial))
    assert merged.keys() == {2, 3, *range(44, 108)}  # decodes from KEY_SPLIT on, and the short chunk


def test_long_chunks_are_not_split() -> None:
    items = work_of(None, [(3 * CHUNK_SPLIT, 65)]).items.tolist()
    assert [item[3:5] for item in items] == [
        [0, 3 * CHUNK_SPLIT + min(65, begin + 16)] for begin in range(0, 65, 16)
    ]
    assert all(after[0] - before[0] == 16 for before, after in pairwise(items))


def test_a_table_has_the_pages_up_to_the_last_position_only() -> None:
    """A sequence may hold pages for tokens to come."""
    ahead = SliceLayout(first_position=20, num_tokens=1, pages=(4, 5, 6, 7))
    rows = DecodeRows.of([ahead, layout(3, 1, None)])
    work = HostWork.of(rows, np.arange(2), window=None, block_size=BLOCK, queries_per_item=16)
    assert work.on_device(torch.from_numpy(work.array)).table.tolist() == [4, 5, 0]


def test_work_without_sequences_is_empty() -> None:
    """Torch computes the prompts of a step without decodes."""
    work = HostWork.of(DecodeRows.of(()), np.arange(0), window=None, block_size=BLOCK, queries_per_item=16)
    assert (work.num_items, work.num_merges, work.array.size) == (0, 0, 0)


def exact_room(host: HostWork, work: AttentionWork, num_padding: int) -> WorkRoom:
    return WorkRoom(
        num_items=len(work.items) + num_padding,
        num_merges=len(work.merges),
        num_pages=len(work.table),
        num_partial=host.num_partial,
        num_queries=host.num_queries,
    )


def test_padding_is_behind_each_part_and_has_no_keys() -> None:
    """Items of padding have as many queries as others: 16."""
    host, work = host_work(None), work_of(None)
    exact = exact_room(host, work, 2)
    room = replace(exact, num_items=exact.num_items + 3, num_merges=exact.num_merges + 1)
    room = replace(room, num_pages=exact.num_pages + 7)
    found = host.padded(room, range(200, 220))
    assert found is not None
    padded = found.on_device(torch.from_numpy(found.array))
    for name in ("items", "merges", "table"):
        mine, theirs = getattr(work, name), getattr(padded, name)
        assert torch.equal(theirs[: len(mine)], mine)
    added = padded.items[len(work.items) :].tolist()
    assert [item[:2] + item[3:5] + item[6:] for item in added[:2]] == [
        [200, 16, 0, 0, -1],
        [216, 4, 0, 0, -1],
    ]
    assert not any(map(any, added[2:])) and not bool(padded.merges[len(work.merges) :].any())
    assert (len(padded.table), padded.num_partial) == (room.num_pages, room.num_partial)


@pytest.mark.parametrize("part", ["num_items", "num_merges", "num_pages", "num_partial", "num_queries"])
def test_work_that_has_too_little_room_is_not_padded(part: str) -> None:
    host = host_work(None)
    room = exact_room(host, work_of(None), 2)
    assert host.padded(room, range(20)) is not None
    assert host.padded(replace(room, **{part: getattr(room, part) - 1}), range(20)) is None


@pytest.mark.parametrize(
    ("group", "row_width", "element_bytes", "expected"),
    [
        (1, 128, 2, 128),
        (3, 64, 2, 32),
        (4, 256, 2, 16),
        (8, 128, 2, 16),
        (64, 64, 2, 16),
        (4, 128, 4, 8),
        (8, 576, 4, 1),
    ],
)
def test_queries_of_an_item_fill_the_rows_of_a_tile(
    group: int, row_width: int, element_bytes: int, expected: int
) -> None:
    assert queries_per_item(group, row_width, element_bytes) == expected
