"""Attention to keys and entries in one kernel, in the sizes of DeepSeek V4 Flash, equals that of a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from checkpoint.compressed import Compressor, EntryIndexer
from stage_worker.model.attention_views import HostArray, ViewRules
from stage_worker.model.attention_work import queries_per_item
from stage_worker.model.compressed_work import entry_work, sequence_pages
from stage_worker.model.decode_rows import NO_DECODES, SliceRows
from stage_worker.model.kernels import BY_TRITON, load_triton
from stage_worker.validation import SliceLayout

pytestmark = pytest.mark.gpu

HEADS, WIDTH, WINDOW, BLOCK, TOP_K = 64, 512, 128, 64, 512
DECODES = ((0, 1), (127, 1), (2050, 1), (9000, 1), (140_000, 1))
SLICES = {"decodes": DECODES, "prompts": (*DECODES, (0, 300), (3000, 100), (60_000, 40))}
"""(position of the first query, number of queries)."""
COMPRESSORS = {
    "all": Compressor(ratio=128),
    "chosen": Compressor(
        ratio=4, has_overlap=True, indexer=EntryIndexer(num_heads=64, head_dim=128, num_chosen=TOP_K)
    ),
}


@pytest.fixture
def gpu(prepared: torch.device) -> torch.device:
    if prepared.type == "cpu":
        pytest.skip("Triton kernels need a GPU; `make test-kernels` interprets them")
    return prepared


def random(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Step:
    """Slices with keys and entries in pages in any order, of other numbers in either block group."""

    def __init__(self, phase: str, compressor: Compressor) -> None:
        self.slices, self.compressor = SLICES[phase], compressor
        lengths = [first + count for first, count in self.slices]
        counts = [-(-length // BLOCK) for length in lengths]
        rows_per_block = compressor.rows_per_block(BLOCK)
        self.entries = random(sum(counts), rows_per_block, WIDTH, seed=2)
        self.first_blocks = [max(0, first - WINDOW + 1) // BLOCK for first, _ in self.slices]
        held = [count - first for count, first in zip(counts, self.first_blocks, strict=True)]
        self.keys = random(sum(held), 1, 1, BLOCK, WIDTH, seed=1)
        self.tables = [_tables(own, seed) for seed, own in enumerate((held, counts))]

    def rows(self, *, are_keys: bool) -> SliceRows:
        layouts = [
            SliceLayout(
                first_position=position,
                num_tokens=count,
                pages=pages,
                first_block=first_block if are_keys else 0,
            )
            for (position, count), pages, first_block in zip(
                self.slices, self.tables[0 if are_keys else 1], self.first_blocks, strict=True
            )
        ]
        return SliceRows.of(NO_DECODES, layouts)

    def seen(self, number: int, position: int, chosen: Tensor | None) -> Tensor:
        """Keys and entries float32 [s, WIDTH] that a query of a slice attends to."""
        first_key = self.first_blocks[number] * BLOCK
        keys = self.keys[list(self.tables[0][number])].flatten(0, 3)
        keys = keys[max(0, position - WINDOW + 1) - first_key : position + 1 - first_key]
        step = max(1, self.compressor.ratio // BLOCK)
        entries = self.entries[list(self.tables[1][number][step - 1 :: step])].flatten(0, 1)
        taken = torch.arange((position + 1) // self.compressor.ratio) if chosen is None else chosen
        return torch.cat((keys, entries[taken])).float()


def _tables(counts: list[int], seed: int) -> list[tuple[int, ...]]:
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)).tolist()
    return [tuple(order.pop() for _ in range(count)) for count in counts]


def choices_of(rows: list[int], positions: list[int], ratio: int) -> dict[int, Tensor]:
    """Any TOP_K of the entries that each of `rows` sees, ascending, or all."""
    found = {}
    for row in rows:
        order = torch.randperm((positions[row] + 1) // ratio, generator=torch.Generator().manual_seed(row))
        found[row] = order[:TOP_K].sort().values
    return found


@pytest.mark.parametrize("phase", SLICES)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_queries_attend_to_keys_and_entries(name: str, phase: str, gpu: torch.device) -> None:
    """In bfloat16, to 1 % of the largest; lists of keys and entries have up to three parts."""
    step, compressor = Step(phase, COMPRESSORS[name]), COMPRESSORS[name]
    rules = ViewRules(
        block_size=BLOCK,
        device=gpu,
        dtype=torch.bfloat16,
        kernels=BY_TRITON,
        max_keys=1,
        queries_per_item=queries_per_item(HEADS, WIDTH, 2),
        key_window=WINDOW,
    )

    def place(array: HostArray) -> Tensor:
        return torch.from_numpy(array).to(gpu)

    work = entry_work(step.rows(are_keys=False), compressor, rules).make(place)
    key_pages = sequence_pages(step.rows(are_keys=True), BLOCK).make(place)
    places = [(number, first + i) for number, (first, n) in enumerate(step.slices) for i in range(n)]
    in_order = [
        row
        for group in work.groups
        for row in (range(*group.span) if group.queries is None else group.queries.tolist())
    ]
    picked = choices_of(in_order, [position for _, position in places], compressor.ratio)
    chosen = torch.zeros(max(1, len(in_order)), TOP_K, dtype=torch.int32)
    for number, row in enumerate(in_order):
        chosen[number, : len(picked[row])] = picked[row].int()
    query, sinks = random(len(places), HEADS, WIDTH, seed=3), torch.linspace(-1.0, 3.0, HEADS)
    output = torch.full_like(query, float("nan")).to(gpu)
    keys, entries = step.keys.to(gpu), step.entries.to(gpu)
    for part, choice in ((work.whole, None), (work.chosen, chosen.to(gpu))):
        if len(part.items):
            load_triton("compressed_attention").attend_joined(
                *(query.to(gpu), output, part, keys, key_pages, entries, work.pages),
                ratio=compressor.ratio,
                scale=0.04,
                window=WINDOW,
                sinks=sinks.to(gpu),
                chosen=choice,
            )
    for row, (number, position) in enumerate(places):
        seen = step.seen(number, position, picked.get(row))
        scores = torch.cat((query[row].float() @ seen.T * 0.04, sinks[:, None]), 1)
        expected = scores.softmax(-1)[:, :-1] @ seen
        assert float((output[row].cpu().float() - expected).abs().max() / expected.abs().max()) < 0.01
