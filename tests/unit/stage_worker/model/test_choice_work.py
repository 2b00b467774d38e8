"""Work of sparse attention: each query that chooses is in one group, with its own tokens and pages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from checkpoint.step_sizes import CHOICE_QUERIES, CHOICE_ROWS
from stage_worker.model import choice_work
from stage_worker.model.attention_views import ViewRules
from stage_worker.model.attention_work import Int32s, QueryBlocks
from stage_worker.model.choice_work import ChoiceGroup, choice_groups, split_places
from stage_worker.model.decode_rows import NO_DECODES, Column, DecodeRows
from stage_worker.model.kernels import BY_TRITON, AttentionMethod
from stage_worker.model.step_layout import StepArrays
from stage_worker.model.window_views import AttentionViews
from stage_worker.validation import SliceLayout
from tests.step_layouts import placed_on

BLOCK, TOP_K = 16, 100
CHOSEN_UNITS = {1: TOP_K, 4: 25, 128: 4}
"""Units that are chosen, by the tokens of a unit."""
CPU = torch.device("cpu")
SLICES = [(0, 1), (99, 1), (100, 1), (700, 1), (0, 130), (640, 40)]
"""(position of the first query, number of queries)."""


def layouts(slices: list[tuple[int, int]]) -> list[SliceLayout]:
    """The pages of slice i begin at 1000 * i."""
    return [
        SliceLayout(
            first_position=first,
            num_tokens=count,
            pages=tuple(range(1000 * number, 1000 * number - (-(first + count) // BLOCK))),
        )
        for number, (first, count) in enumerate(slices)
    ]


def groups_of(
    slices: list[tuple[int, int]], rows: list[int] | None = None, ratio: int = 1
) -> tuple[ChoiceGroup, ...]:
    """Groups of `slices`, of which one-token slices are in `rows` of the step (None: the first ones)."""
    made = layouts(slices)
    num_singles = sum(count == 1 for _, count in slices)
    firsts = np.cumsum([0, *(count for _, count in slices)])[:-1]
    found = choice_groups(
        DecodeRows.of(made[:num_singles]),
        np.arange(num_singles) if rows is None else np.array(rows),
        made[num_singles:],
        firsts[num_singles:].tolist(),
        top_k=CHOSEN_UNITS[ratio],
        block_size=BLOCK,
        ratio=ratio,
    )
    return found.make(torch.from_numpy)


@pytest.mark.parametrize("ratio", CHOSEN_UNITS)
def test_each_query_has_its_units_its_pages_and_scores_of_its_own(ratio: int) -> None:
    places = [(number, first + i) for number, (first, count) in enumerate(SLICES) for i in range(count)]
    rows, top_k, first_block = [], CHOSEN_UNITS[ratio], max(1, ratio // BLOCK) - 1
    for group in groups_of(SLICES, ratio=ratio):
        written, read = np.zeros(group.num_scores, int), np.zeros(len(group.rows), int)
        for row, count, first_page, begin, end, last, _ in group.attention.items.tolist():
            number, position = places[group.span[0] + row]
            assert (count, last + 1) == (1, min((position + 1) // ratio, top_k))
            assert int(group.table[first_page]) == 1000 * number + first_block
            read[row] += end - begin
        for row, (place, num_units) in enumerate(group.rows.tolist()):
            rows.append(group.span[0] + row)
            assert num_units == (places[rows[-1]][1] + 1) // ratio <= group.longest
            assert read[row] == min(num_units, top_k)
            written[place : place + num_units] += 1
        assert written.max() <= 1
        for first, count, first_page, position, place, stride in group.blocks.tolist():
            number, own = places[first]
            assert own == position
            assert count in (0, *range(1, CHOICE_QUERIES + 1))
            assert count == 0 or int(group.table[first_page]) == 1000 * number + first_block
            assert (count > 0) == any(
                group.rows[first - group.span[0] + index, 1] > top_k for index in range(max(count, 1))
            )
            for index in range(count):
                assert group.rows[first - group.span[0] + index, 0] == place + index * stride
    assert rows == list(range(len(places)))


def test_pages_of_units_of_many_blocks_are_those_of_their_last_tokens() -> None:
    """Of 701, 1 and 680 tokens, in units of 8 blocks."""
    (decodes, prompt) = groups_of([(700, 1), (0, 1), (640, 40)], ratio=128)
    assert decodes.table.tolist() == [*range(7, 40, 8), *range(2007, 2040, 8)]
    assert decodes.blocks[:, 2].tolist() == [0, 5]
    assert prompt.blocks[:, 2].tolist() == [5, 5, 5]


def test_attention_to_a_choice_may_have_another_work_list() -> None:
    """Of each query, whose row counts from the group's first one, and whose position is in tokens."""
    (made,) = layouts([(700, 1)])
    seen = []

    def split(queries: QueryBlocks, num_chosen: Column) -> tuple[Int32s, Int32s, int]:
        seen.append((queries.rows.tolist(), queries.positions.tolist(), num_chosen.tolist()))
        return split_places(queries, num_chosen)

    choice_groups(
        *(DecodeRows.of([made]), np.array([7]), (), ()), top_k=25, block_size=BLOCK, ratio=4, split=split
    )
    assert seen == [([0], [700], [25])]


def test_queries_in_scattered_rows_are_named() -> None:
    (group,) = groups_of([(300, 1), (200, 1)], rows=[0, 7])
    assert group.queries is not None
    assert group.queries.tolist() == [0, 7]
    assert group.blocks[:, 0].tolist() == [0, 7]


@pytest.mark.parametrize("most", [1 << 24, 40_000])
def test_groups_are_bounded_by_queries_and_scores(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_work, "CHOICE_SCORES", most)
    groups = groups_of([(500, 1)] * 150 + [(0, 300), (900, 40)])
    assert [row for group in groups for row in range(*group.span)] == list(range(490))
    assert all(len(group.rows) <= CHOICE_ROWS and group.num_scores <= most for group in groups)


def views_of(slices: list[tuple[int, int]]) -> AttentionViews:
    kernels = replace(BY_TRITON, prefill=AttentionMethod.PRODUCTS)
    rules = ViewRules(
        block_size=BLOCK, device=CPU, dtype=torch.bfloat16, kernels=kernels, max_keys=1 << 20, top_k=TOP_K
    )
    arrays = StepArrays.build(layouts(slices), decodes=NO_DECODES, windows=(None,), rules=rules)
    layout = arrays.layout({}, placed_on(CPU))
    assert len(layout.prefill_rows) == len(layout.views[None].prefills)
    return layout.views[None]


@pytest.mark.parametrize(
    ("slices", "num_decodes", "num_prefills", "num_choosing"),
    [
        ([(0, 1), (99, 1), (0, 100)], 2, 1, 0),
        ([(0, 1), (100, 1), (0, 100)], 0, 1, 2),
        ([(5, 1), (0, 101), (60, 40)], 1, 1, 101),
        ([(100, 1), (0, 101)], 0, 0, 102),
    ],
    ids=["none", "decodes", "a prompt", "both"],
)
def test_slices_choose_if_they_see_more_than_the_choice(
    slices: list[tuple[int, int]], num_decodes: int, num_prefills: int, num_choosing: int
) -> None:
    """Decodes of a step choose together; each longer slice for itself."""
    views = views_of(slices)
    assert (0 if views.work is None else len(views.work.items)) == num_decodes
    assert len(views.prefills) == num_prefills
    assert sum(len(group.rows) for group in views.choices) == num_choosing
