"""Kernels of sparse attention compute what the CPU's operators compute: keys in pages bit by bit, scores of
float32 to 1e-5 of the largest, exactly the same choice of the same scores, and attention to a choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from stage_worker.model import choice_work
from stage_worker.model.choice_work import ChoiceGroup, choice_groups
from stage_worker.model.decode_rows import DecodeRows
from stage_worker.model.indexer import IndexQueries, chosen_tokens
from stage_worker.model.rope import rotate_
from stage_worker.model.triton_kernels import choices
from stage_worker.model.triton_kernels.attention import attend
from stage_worker.validation import SliceLayout
from tests.kernels.interpreted.paged import BLOCK, random

pytestmark = pytest.mark.kernels

TOP_K = 20
SLICES = ((0, 1), (18, 1), (19, 1), (20, 1), (63, 1), (64, 1), (129, 1), (200, 1), (0, 35), (50, 17))
"""(position of the first query, number of queries): fewer keys than are chosen, as many, and more, on both
sides of the edges of blocks and of parts of 64 scores, of which three levels are needed.
"""
CHOSEN_UNITS = {1: TOP_K, 4: 5, 128: 1}
"""Units that are chosen, by the tokens of a unit."""
UNIT_SLICES = (*SLICES, (511, 1), (300, 90))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "CHOICE_PART", 64)


def groups_of(
    slices: Sequence[tuple[int, int]] = SLICES, ratio: int = 1
) -> tuple[tuple[ChoiceGroup, ...], list[list[int]]]:
    """Groups, and the pages of each slice, in the reverse order of all. One-token slices come first."""
    slices = sorted(slices, key=lambda item: item[1] > 1)
    counts = [-(-(first + count) // BLOCK) for first, count in slices]
    free = list(range(sum(counts)))
    tables = [[free.pop() for _ in range(count)] for count in counts]
    layouts = [
        SliceLayout(first_position=first, num_tokens=count, pages=table)
        for (first, count), table in zip(slices, tables, strict=True)
    ]
    num_singles = sum(count == 1 for _, count in slices)
    firsts = np.cumsum([0, *(count for _, count in slices)])[:-1]
    found = choice_groups(
        DecodeRows.of(layouts[:num_singles]),
        np.arange(num_singles),
        layouts[num_singles:],
        firsts[num_singles:].tolist(),
        top_k=CHOSEN_UNITS[ratio],
        block_size=BLOCK,
        ratio=ratio,
    )
    return found.make(torch.from_numpy), tables


def in_pages(rows: Sequence[Tensor], tables: Sequence[Sequence[int]]) -> Tensor:
    """Pages [num_blocks, block_size, width] with `rows` [n, width] of each table, else not a number."""
    num_pages = sum(map(len, tables))
    pages = torch.full((num_pages, BLOCK, rows[0].shape[1]), float("nan"), dtype=rows[0].dtype)
    for own, table in zip(rows, tables, strict=True):
        for position, row in enumerate(own):
            pages[table[position // BLOCK], position % BLOCK] = row
    return pages


def queries_of(slices: Sequence[tuple[int, int]] = SLICES) -> list[tuple[int, int]]:
    """Slice and number of visible keys of each query."""
    return [
        (number, first + index + 1) for number, (first, count) in enumerate(slices) for index in range(count)
    ]


@pytest.mark.parametrize("num_heads", [3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scores_equal_those_of_a_cpu(dtype: torch.dtype, num_heads: int) -> None:
    """Of queries that choose; keys that no query sees are not numbers, and are not read."""
    groups, tables = groups_of()
    queries = random(60, num_heads, 24, dtype=dtype)
    weights = random(60, num_heads, seed=1)
    keys = [random(first + count, 24, dtype=dtype, seed=2 + i) for i, (first, count) in enumerate(SLICES)]
    pages, places = in_pages(keys, tables), queries_of()
    rows = 0
    for group in groups:
        scores = choices.score(queries, weights, group, pages)
        for row, (place, num_keys) in enumerate(group.rows.tolist()):
            query = group.span[0] + row
            number, seen = places[query]
            assert seen == num_keys
            rows += 1
            if num_keys <= TOP_K:
                continue
            one = IndexQueries(queries[query : query + 1].float(), weights[query : query + 1])
            expected = one.scores(keys[number][None, :num_keys])[0]
            found = scores[place : place + num_keys]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert rows == len(places)


@pytest.mark.parametrize("ratio", [4, 128])
def test_scores_and_choices_of_units_equal_those_of_a_cpu(ratio: int) -> None:
    """Of entries of as many tokens; scores of integers are exact. Rows that no query sees are not numbers."""
    slices = sorted(UNIT_SLICES, key=lambda item: item[1] > 1)
    groups, tables = groups_of(slices, ratio)
    places, top_k = queries_of(slices), CHOSEN_UNITS[ratio]
    queries, weights = random(len(places), 5, 24).round(), random(len(places), 5, seed=1).round()
    keys = [
        random((first + count) // ratio, 24, seed=2 + i).round() for i, (first, count) in enumerate(slices)
    ]
    step, size = max(1, ratio // BLOCK), max(1, BLOCK // ratio)
    pages = torch.full((sum(map(len, tables)), size, 24), math.nan)
    for own, table in zip(keys, tables, strict=True):
        for number, key in enumerate(own):
            pages[table[number // size * step + step - 1], number % size] = key
    num_chosen = 0
    for group in groups:
        found = choices.choose(choices.score(queries, weights, group, pages, ratio=ratio), group, top_k)
        for row, num_units in enumerate(group.rows[:, 1].tolist()):
            query = group.span[0] + row
            number, seen = places[query]
            assert num_units == seen // ratio
            expected = list(range(num_units))
            if num_units > top_k:
                one = IndexQueries(queries[query : query + 1], weights[query : query + 1])
                scores = one.scores(keys[number][None, :num_units])
                expected, num_chosen = chosen_tokens(scores, top_k, ())[0].tolist(), num_chosen + 1
            assert found[row, : len(expected)].tolist() == expected, (number, num_units)
    assert num_chosen > 90


@pytest.mark.parametrize("kind", ["ties", "equals", "random", "odd"])
def test_a_choice_is_that_of_a_cpu(kind: str) -> None:
    """The first ones of equal scores; what is not a number is highest. Parts have more ties than places."""
    generator = torch.Generator().manual_seed(3)
    groups, _ = groups_of()
    for group in groups:
        scores = torch.randint(-2, 3, (group.num_scores,), generator=generator).float() * 0.5
        if kind == "equals":
            scores.zero_()
        if kind == "random":
            scores = torch.randn(group.num_scores, generator=generator)
        if kind == "odd":
            scores = torch.where(scores == 0.0, -scores, scores)
            for value in (math.nan, math.inf, -math.inf, -math.nan, 1e-42):
                scores[torch.randint(len(scores), (len(scores) // 8,), generator=generator)] = value
        found = choices.choose(scores, group, TOP_K)
        for row, (place, num_keys) in enumerate(group.rows.tolist()):
            own = scores[place : place + num_keys][None].clone()
            expected = list(range(num_keys))
            if num_keys > TOP_K:
                expected = chosen_tokens(own, TOP_K, ())[0].tolist()
            assert found[row, :num_keys].tolist() == expected, (kind, num_keys)


@pytest.mark.parametrize("split", [8, 512])
def test_queries_attend_to_what_they_chose(split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 to 1e-5, whole or in parts; latents of other tokens and sequences are not numbers."""
    monkeypatch.setattr(choice_work, "KEY_SPLIT", split)
    groups, tables = groups_of()
    heads, rank, tail, places = 5, 32, 16, queries_of()
    query = random(len(places), heads, rank + tail)
    for group in groups:
        chosen = torch.zeros(len(group.rows), TOP_K, dtype=torch.int32)
        rows = [torch.full((first + count, rank + tail), float("nan")) for first, count in SLICES]
        picked = []
        for row in range(len(group.rows)):
            number, num_keys = places[group.span[0] + row]
            taken = torch.randperm(num_keys, generator=torch.Generator().manual_seed(number))[:TOP_K]
            taken = taken.sort().values
            chosen[row, : len(taken)] = taken.int()
            rows[number][taken] = random(len(taken), rank + tail, seed=number)
            picked.append((number, taken))
        pages = in_pages(rows, tables)[:, None, None]
        own = query[slice(*group.span)]
        output = torch.empty(len(own), heads, rank)
        attend(own, output, group.attention, pages, scale=0.2, chosen=chosen)
        for row, (number, taken) in enumerate(picked):
            keys = rows[number][taken].double()
            weights = (own[row].double() @ keys.T * 0.2).softmax(-1)
            torch.testing.assert_close(output[row].double(), weights @ keys[:, :rank], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "first"), [(8, 0), (8, 16), (24, 0)])
def test_rotated_keys_are_written_and_queries_replaced(width: int, first: int, dtype: torch.dtype) -> None:
    """Bit by bit; a row without a slot is not written."""
    queries, keys = random(7, 11, 24, dtype=dtype), random(7, 24, dtype=dtype, seed=1)
    cos, sin = (random(7, 1, width, dtype=dtype, seed=seed) for seed in (2, 3))
    slots = torch.tensor([5, 40, -1, 0, 16, 15, 31])
    expected = torch.cat((queries, keys[:, None]), 1)
    rotate_(expected[..., first : first + width], cos, sin)
    for given in (queries, None):
        pages = torch.full((3, BLOCK, 24), float("nan"), dtype=dtype)
        choices.rotate_and_write_keys(given, keys, cos, sin, slots, pages, first=first)
        flat = pages.view(-1, 24)
        is_written = slots >= 0
        assert torch.equal(flat[slots[is_written]], expected[is_written, -1])
        assert int(flat.isnan().any(1).sum()) == len(flat) - 6
    assert torch.equal(queries, expected[:, :-1])
