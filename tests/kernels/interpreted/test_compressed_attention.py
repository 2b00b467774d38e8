"""The kernel of compressed attention computes one softmax over keys in the window, entries and sinks.

float32 to 1e-5 of values around 1, bfloat16 to its rounding; keys and entries that a query does not see are
not numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from checkpoint.compressed import Compressor, EntryIndexer
from kvcache.scaled_pages import scaled_rows, unscaled_rows
from stage_worker.model import attention_work
from stage_worker.model.attention_views import OnHost, ViewRules
from stage_worker.model.compressed_work import EntryWork, SequencePages, entry_work, sequence_pages
from stage_worker.model.decode_rows import NO_DECODES, SliceRows
from stage_worker.model.kernels import BY_TRITON
from stage_worker.model.triton_kernels.compressed_attention import attend_joined
from stage_worker.validation import SliceLayout
from tests.kernels.interpreted.paged import random

pytestmark = pytest.mark.kernels

T = TypeVar("T")

HEADS, WIDTH, WINDOW, TOP_K = 11, 24, 9, 5
SLICES = ((0, 1), (2, 1), (3, 1), (63, 1), (20, 13), (90, 1), (0, 7), (200, 1), (125, 10))
"""(position of the first query, number of queries): without an entry, with the first one, and with many."""


@dataclass(frozen=True, kw_only=True)
class Case:
    ratio: int = 4
    block_size: int = 16
    top_k: int | None = None
    slices: Sequence[tuple[int, int]] = SLICES
    dtype: torch.dtype = torch.float32
    queries_per_item: int = 4
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))

    @property
    def compressor(self) -> Compressor:
        indexer = None
        if self.top_k is not None:
            indexer = EntryIndexer(num_heads=4, head_dim=16, num_chosen=self.top_k)
        return Compressor(ratio=self.ratio, indexer=indexer)


class Step:
    """Keys and entries of the sequences of a case, in pages of other numbers in either block group."""

    def __init__(self, case: Case) -> None:
        self.case = case
        lengths = [first + count for first, count in case.slices]
        rows_per_block = case.compressor.rows_per_block(case.block_size)
        self.keys = [random(n, WIDTH, dtype=case.dtype, seed=10 + i) for i, n in enumerate(lengths)]
        self.entries = [
            random(n // case.ratio, WIDTH, dtype=case.dtype, seed=50 + i) for i, n in enumerate(lengths)
        ]
        num_blocks = sum(-(-n // case.block_size) for n in lengths)
        nan = float("nan")
        self.key_pages = torch.full((num_blocks, 1, 1, case.block_size, WIDTH), nan, dtype=case.dtype)
        self.entry_pages = torch.full((num_blocks, rows_per_block, WIDTH), nan, dtype=case.dtype)
        self._written(lengths)

    def _written(self, lengths: Sequence[int]) -> None:
        """Layouts of the slices: of keys, whose blocks before the window are released, and of entries."""
        case, size = self.case, self.case.block_size
        self.of_keys: list[SliceLayout] = []
        self.of_entries: list[SliceLayout] = []
        free = [case.rng.permutation(len(self.key_pages)).tolist() for _ in range(2)]
        for number, ((first, count), length) in enumerate(zip(case.slices, lengths, strict=True)):
            tables = [[own.pop() for _ in range(-(-length // size))] for own in free]
            begin = max(0, first - WINDOW + 1) // size
            for position in range(begin * size, length):
                self.key_pages[tables[0][position // size], 0, 0, position % size] = self.keys[number][
                    position
                ]
            for entry, row in enumerate(self.entries[number]):
                last = (entry + 1) * case.ratio - 1
                self.entry_pages[tables[1][last // size], entry % self.entry_pages.shape[1]] = row
            for found, pages, block in ((self.of_keys, tables[0], begin), (self.of_entries, tables[1], 0)):
                layout = SliceLayout(
                    first_position=first, num_tokens=count, pages=pages[block:], first_block=block
                )
                found.append(layout)

    def work(self) -> tuple[EntryWork, SequencePages]:
        case = self.case
        rules = ViewRules(
            block_size=case.block_size,
            device=torch.device("cpu"),
            dtype=case.dtype,
            kernels=BY_TRITON,
            max_keys=1,
            queries_per_item=case.queries_per_item,
            key_window=WINDOW,
        )
        found = entry_work(SliceRows.of(NO_DECODES, self.of_entries), case.compressor, rules)
        keys = sequence_pages(SliceRows.of(NO_DECODES, self.of_keys), case.block_size)
        return made(found), made(keys)


def made(given: OnHost[T]) -> T:
    return given.make(torch.from_numpy)


def queries_of(case: Case) -> list[tuple[int, int]]:
    """Slice and position of each row of the step."""
    return [
        (number, first + index) for number, (first, count) in enumerate(case.slices) for index in range(count)
    ]


def choices_of(case: Case, work: EntryWork) -> tuple[Tensor, dict[int, list[int]]]:
    """Ascending entries of each query that chooses, by its row in the step, in the order of groups."""
    places, picked, rows = queries_of(case), {}, []
    for group in work.groups:
        own = range(*group.span) if group.queries is None else group.queries.tolist()
        for row in own:
            num_seen = (places[row][1] + 1) // case.ratio
            taken = sorted(case.rng.permutation(num_seen)[: case.top_k].tolist())
            picked[row] = taken
            rows.append(taken + [10_000] * ((case.top_k or 0) - len(taken)))
    return torch.tensor(rows, dtype=torch.int32), picked


def expected_of(step: Step, query: Tensor, sinks: Tensor, picked: dict[int, list[int]]) -> Tensor:
    """float64 [rows, heads, width], by the formula."""
    case, found = step.case, []
    for row, (number, position) in enumerate(queries_of(case)):
        entries = step.entries[number][: (position + 1) // case.ratio]
        if row in picked:
            entries = entries[picked[row]]
        keys = step.keys[number][max(0, position - WINDOW + 1) : position + 1]
        rows = torch.cat((keys, entries)).double()
        scores = torch.cat((query[row].double() @ rows.T * 0.3, sinks.double()[:, None]), 1)
        found.append(scores.softmax(1)[:, :-1] @ rows)
    return torch.stack(found)


def computed(step: Step, **options: Tensor) -> tuple[Tensor, Tensor]:
    """What the kernel returns, and what it should."""
    case = step.case
    work, key_pages = step.work()
    query = random(len(queries_of(case)), HEADS, WIDTH, dtype=case.dtype, seed=1)
    sinks, output = random(HEADS, seed=2), torch.full_like(query, float("nan"))
    chosen, picked = choices_of(case, work) if work.groups else (None, {})
    for part, choice in ((work.whole, None), (work.chosen, chosen)):
        attend_joined(
            *(query, output, part, options.get("keys", step.key_pages), key_pages),
            *(step.entry_pages, work.pages),
            ratio=case.ratio,
            scale=0.3,
            window=WINDOW,
            sinks=sinks,
            key_scales=options.get("scales"),
            chosen=choice,
        )
    return output, expected_of(step, query, sinks, picked)


@pytest.mark.parametrize("top_k", [None, TOP_K])
@pytest.mark.parametrize(("ratio", "block_size"), [(4, 16), (4, 4), (8, 2), (32, 16), (3, 1), (16, 16)])
def test_keys_and_entries_are_one_softmax(ratio: int, block_size: int, top_k: int | None) -> None:
    """Entries in blocks of several, and of one every few blocks."""
    found, expected = computed(Step(Case(ratio=ratio, block_size=block_size, top_k=top_k)))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("top_k", [None, TOP_K])
@pytest.mark.parametrize("split", [5, 12])
def test_parts_of_a_list_are_merged(split: int, top_k: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of keys alone, of entries alone, and of both."""
    monkeypatch.setattr(attention_work, "KEY_SPLIT", split)
    monkeypatch.setattr(attention_work, "CHUNK_SPLIT", split + 1)
    monkeypatch.setattr(attention_work, "SHORT_CHUNK", 9)
    step = Step(Case(top_k=top_k))
    work, _ = step.work()
    assert (work.whole if top_k is None else work.chosen).num_partial
    found, expected = computed(step)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_queries_of_16_bits(dtype: torch.dtype) -> None:
    found, expected = computed(Step(Case(top_k=TOP_K, dtype=dtype, queries_per_item=2)))
    torch.testing.assert_close(
        found.double(), expected, rtol=0, atol=3e-2 if dtype is torch.bfloat16 else 4e-3
    )


@pytest.mark.parametrize("element", [torch.float8_e4m3fn, torch.int8])
def test_keys_of_8_bits(element: torch.dtype) -> None:
    """Of the window; entries are in the run dtype."""
    step = Step(Case(top_k=TOP_K, ratio=8))
    elements, scales = scaled_rows(step.key_pages.nan_to_num(), element)
    step.keys = [unscaled_rows(*scaled_rows(rows, element), element, torch.float32) for rows in step.keys]
    found, expected = computed(step, keys=elements.view(element), scales=scales[..., 0])
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
