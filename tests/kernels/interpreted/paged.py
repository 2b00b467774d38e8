"""Sequences with random keys and values in pages that are NaN elsewhere, and attention by its formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stage_worker.model.attention_work import AttentionWork, HostWork, queries_per_item
from stage_worker.model.decode_rows import DecodeRows
from stage_worker.validation import SliceLayout

BLOCK = 16


@dataclass(frozen=True, kw_only=True)
class Shape:
    """`width` is that of values, `tail` more elements of keys only, which makes pages of one part."""

    heads: int = 4
    kv_heads: int = 2
    width: int = 64
    tail: int = 0

    @property
    def row_width(self) -> int:
        return self.width + self.tail


@dataclass(frozen=True, kw_only=True)
class Given:
    """(position of the first query, number of queries) of each slice; one-token slices come first."""

    shape: Shape
    slices: Sequence[tuple[int, int]]
    dtype: torch.dtype
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    seed: int = 0


def random(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Paged:
    """Tensors of a `Given`: queries, pages and work; pages before the window of a sequence are released."""

    def __init__(self, given: Given) -> None:
        self.given = given
        shape = given.shape
        self.num_tokens = sum(count for _, count in given.slices)
        lengths = [first + count for first, count in given.slices]
        self.query = random(self.num_tokens, shape.heads, shape.row_width, dtype=given.dtype, seed=given.seed)
        parts = 1 if shape.tail else 2
        self.rows = [
            random(length, parts, shape.kv_heads, shape.row_width, dtype=given.dtype, seed=given.seed + 1 + i)
            for i, length in enumerate(lengths)
        ]
        self._first_blocks = [
            0 if given.window is None else max(0, first - given.window + 1) // BLOCK
            for first, _ in given.slices
        ]
        counts = [-(-length // BLOCK) for length in lengths]
        order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(given.seed)).tolist()
        self.pages = torch.full(
            (len(order), parts, shape.kv_heads, BLOCK, shape.row_width), float("nan"), dtype=given.dtype
        )
        self._tables = []
        for rows, count, first_block in zip(self.rows, counts, self._first_blocks, strict=True):
            table = [order.pop() for _ in range(count)]
            for position in range(first_block * BLOCK, len(rows)):
                self.pages[table[position // BLOCK], :, :, position % BLOCK] = rows[position]
            self._tables.append(table[first_block:])

    def work(self) -> AttentionWork:
        work = self.host_work()
        return work.on_device(torch.from_numpy(work.array))

    def host_work(self) -> HostWork:
        shape = self.given.shape
        layouts = [
            SliceLayout(first_position=first, num_tokens=count, pages=table, first_block=first_block)
            for (first, count), table, first_block in zip(
                self.given.slices, self._tables, self._first_blocks, strict=True
            )
        ]
        num_singles = sum(count == 1 for _, count in self.given.slices)
        firsts = np.cumsum([0, *(count for _, count in self.given.slices)])[:-1]
        return HostWork.of(
            DecodeRows.of(layouts[:num_singles]),
            np.arange(num_singles),
            layouts[num_singles:],
            firsts[num_singles:].tolist(),
            window=self.given.window,
            block_size=BLOCK,
            queries_per_item=queries_per_item(
                shape.heads // shape.kv_heads, shape.row_width, self.given.dtype.itemsize
            ),
        )

    def expected(self) -> Tensor:
        """float64 [tokens, heads, width]."""
        found = [
            self._of_query(rows, position)
            for (first, count), rows in zip(self.given.slices, self.rows, strict=True)
            for position in range(first, first + count)
        ]
        queries = iter(self.query.double())
        return torch.stack([attend(next(queries)) for attend in found])

    def _of_query(self, rows: Tensor, position: int):
        given, shape = self.given, self.given.shape
        first = 0 if given.window is None else max(0, position - given.window + 1)
        seen = rows[first : position + 1].double().repeat_interleave(shape.heads // shape.kv_heads, dim=2)

        def attend(query: Tensor) -> Tensor:
            scores = torch.einsum("hd,shd->hs", query, seen[:, 0]) * shape.row_width**-0.5
            if given.softcap is not None:
                scores = given.softcap * (scores / given.softcap).tanh()
            sinks = torch.full((shape.heads,), -torch.inf) if given.sinks is None else given.sinks
            weights = torch.cat((scores, sinks.double()[:, None]), dim=1).softmax(dim=1)[:, :-1]
            return torch.einsum("hs,shd->hd", weights, seen[:, -1, :, : shape.width])

        return attend
