"""Attention to keys of a window and to entries of a compressor, in place, by a work list (`JoinedWork`).

One program goes over its keys and then over its entries in one softmax: highest score, sum of weights and
weighted sum stay in registers in between, and the sinks enter at the end. Nothing is merged unless the list
of a query is split, and then parts of keys and of entries are merged alike. Products, softmax and rounding
are those of `triton_kernels.attention`, of which this kernel is made; weights are relative to the highest
score so far when they are rounded, see `stage_worker.model.compressed_attention`.

Keys and entries differ in their pages, in the table of these, and in what a query sees: keys by position, the
first (position + 1) // RATIO entries, or the places of its choice. Keys may have 8 bits; entries never do.
"""

# Constants of kernels are in capitals.
# ruff: noqa: N803
from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from stage_worker.model.compressed_work import JOINED_FIELDS, JoinedWork, SequencePages
from stage_worker.model.triton_kernels.attention import (
    LEAST_ROWS,
    KeyTile,
    attend_to_range,
    load_rows,
    merge,
    partial_results,
    tile_of,
    write_partial,
    write_result,
)
from stage_worker.model.triton_kernels.launch import IS_INTERPRETED, Launch, padded

_ROWS, _LONG_ROWS = 32, 64
"""Queries times heads of one program with prompts; the latter where tensor cores take so many rows."""


# fmt: off
@triton.jit
def _attend_to_entries(
    mixed, highest, total, asked, entries, table, firsts, chosen, item, positions, scale, KEYS: tl.constexpr,
    ENTRY_BLOCK: tl.constexpr, RATIO: tl.constexpr, WIDTH: tl.constexpr, WIDENS: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """Go on with the softmax of keys; queries are at `positions`."""
    last_entries = (positions + 1) // RATIO - 1
    if chosen is not None:
        chosen += tl.load(item + 8).to(tl.int64) * TOP_K
        last_entries = tl.full(positions.shape, TOP_K, tl.int32)  # places in the choice are all seen
    table += tl.load(firsts + 2 * tl.load(item + 2))
    return attend_to_range(
        mixed, highest, total, asked, None, entries, None, table, chosen, tl.load(item + 6),
        tl.load(item + 7), last_entries, 0, scale, None, None, False, 1, KEYS, ENTRY_BLOCK, 1, WIDTH, WIDTH,
        False, WIDENS,
    )


# A work list has parts at any offset: other kernels for aligned ones would be compiled while a stage serves.
@triton.jit(
    do_not_specialize_on_alignment=["key_table", "key_firsts", "entry_table", "entry_firsts", "items"]
)
def joined_kernel(
    query, query_stride, keys, key_scales, key_table, key_firsts, entries, entry_table, entry_firsts, chosen,
    items, sinks, output, output_stride, mixed_parts, stats, scale, window,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ENTRY_BLOCK: tl.constexpr, RATIO: tl.constexpr, WIDTH: tl.constexpr,
    MAIN: tl.constexpr, IS_FP8: tl.constexpr, WIDENS: tl.constexpr, FIELDS: tl.constexpr, TOP_K: tl.constexpr,
):
    """One item and `HEADS` of the heads, which share all keys: grid [items, tiles of heads].

    Rows have `WIDTH` elements, padded to `MAIN`, and are values, too.
    """
    # The last items of a prompt have the most entries, and begin first.
    item = items + (tl.num_programs(0) - 1 - tl.program_id(0)) * FIELDS
    lanes = tl.arange(0, QUERIES * HEADS)
    index, head = lanes // HEADS, tl.program_id(1) * HEADS + lanes % HEADS
    is_lane = (index < tl.load(item + 1)) & (head < NUM_HEADS)
    row, positions = (tl.load(item) + index).to(tl.int64), tl.load(item + 3) + index
    asked = load_rows(query + row * query_stride + head * WIDTH, is_lane, 0, WIDTH, MAIN)
    highest = tl.full([QUERIES * HEADS], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * HEADS], tl.float32)
    mixed = tl.zeros([QUERIES * HEADS, MAIN], tl.float32)
    key_firsts += 2 * tl.load(item + 2)
    first_key = tl.load(key_firsts + 1)
    mixed, highest, total = attend_to_range(
        mixed, highest, total, asked, None, keys, key_scales, key_table + tl.load(key_firsts), None,
        tl.load(item + 4) - first_key, tl.load(item + 5) - first_key, positions - first_key, 0, scale, None,
        window, False, 1, KEYS, BLOCK_SIZE, 1, WIDTH, WIDTH, IS_FP8, WIDENS,
    )
    mixed, highest, total = _attend_to_entries(
        mixed, highest, total, asked, entries, entry_table, entry_firsts, chosen, item, positions, scale,
        KEYS, ENTRY_BLOCK, RATIO, WIDTH, WIDENS, TOP_K,
    )
    partial = tl.load(item + 9)
    if partial < 0:
        into = output + row * output_stride + head * WIDTH
        write_result(mixed, highest, total, sinks, head, into, is_lane, WIDTH)
    else:
        place = (partial + index).to(tl.int64) * NUM_HEADS + head
        write_partial(mixed, highest, total, mixed_parts, stats, place, is_lane, WIDTH)
# fmt: on


@functools.cache
def has_long_tiles(device: torch.device) -> bool:
    """Whether tensor cores of `device` multiply tiles of 64 rows in 227 KiB of shared memory: those of
    compute capability 9 and 10.
    """
    if IS_INTERPRETED or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def _tile(work: JoinedWork, query: Tensor, keys: Tensor) -> KeyTile:
    """Programs of a decode are many, so that one sequence fills a GPU. With prompts they have the most heads
    that compile without spills, since each program reads all keys of its queries again.
    """
    tile = tile_of(work.num_queries, query, keys)
    if not work.has_longer or query.element_size() == 4 or keys.element_size() == 1:
        return tile
    if has_long_tiles(query.device):
        num_keys = 16 if work.num_queries == 1 else 32
        return replace(tile, heads=_LONG_ROWS // tile.queries, keys=num_keys, num_warps=8)
    return replace(tile, heads=max(tile.heads, _ROWS // tile.queries), num_warps=8)


def _constants(query: Tensor, tile: KeyTile) -> dict[str, int | bool]:
    num_heads, width = query.shape[1:]
    return {
        "QUERIES": tile.queries,
        "HEADS": tile.heads,
        "NUM_HEADS": num_heads,
        "KEYS": tile.keys,
        "WIDTH": width,
        "MAIN": padded(width, LEAST_ROWS),
        "WIDENS": IS_INTERPRETED,
        "FIELDS": JOINED_FIELDS,
    }


def attend_joined(
    query: Tensor,
    output: Tensor,
    work: JoinedWork,
    keys: Tensor,
    key_pages: SequencePages,
    entries: Tensor,
    entry_pages: SequencePages,
    *,
    ratio: int,
    scale: float,
    window: int,
    sinks: Tensor,
    key_scales: Tensor | None = None,
    chosen: Tensor | None = None,
) -> None:
    """Fill the rows of `output` [n, heads, width] that `work` names from `query` [n, heads, width].

    `keys` are pages [num_blocks, 1, 1, block_size, width], `entries` [num_blocks, rows per block, width];
    both are values, too. `sinks` is float32 [heads], `key_scales` [num_blocks, 1, 1, block_size] are those
    of 8-bit pages. With `chosen` int32 [r, top_k], entries of the work are places in a query's row there.
    """
    tile = _tile(work, query, keys)
    is_fp8 = keys.dtype is torch.float8_e4m3fn
    constants = _constants(query, tile) | {
        "BLOCK_SIZE": keys.shape[3],
        "ENTRY_BLOCK": entries.shape[1],
        "RATIO": ratio,
        "IS_FP8": is_fp8,
        "TOP_K": 0 if chosen is None else chosen.shape[1],
    }
    mixed, stats = partial_results(work.num_partial, output)
    grid = (len(work.items), triton.cdiv(query.shape[1], tile.heads))
    Launch(joined_kernel, grid, constants, tile.num_warps, tile.num_stages)(
        *(query, query.stride(0), keys.view(torch.uint8) if is_fp8 else keys, key_scales),
        *(key_pages.table, key_pages.firsts, entries, entry_pages.table, entry_pages.firsts, chosen),
        *(work.items, sinks, output, output.stride(0), mixed, stats, scale, window),
    )
    if work.num_partial:
        merge(work.merges, mixed, stats, sinks, output)
