"""Attention over pages in place, by a work list (see `AttentionWork`), and the merge of parts of keys.

Scores, softmax and sums are float32; weights are rounded to the dtype of the queries for the product with
the values, which adds up in float32. Hidden and unwritten keys are never read: pages need no zeros.
Source: Dao et al. 2022, arXiv:2205.14135, algorithm 1, with the parts of Flash-Decoding.
"""

# Constants of kernels are in capitals.
# ruff: noqa: N803
from __future__ import annotations

import functools
import importlib
import logging
from dataclasses import dataclass
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor

from stage_worker.model.attention_work import ITEM_FIELDS, MERGE_FIELDS, MOST_HEADS, AttentionWork
from stage_worker.model.triton_kernels.elements import from_e4m3
from stage_worker.model.triton_kernels.launch import IS_INTERPRETED, PRECISION, Launch, padded

log = logging.getLogger(__name__)

_LOG2E = tl.constexpr(1.4426950408889634)
_HOPPER_ATTENTION = "stage_worker.model.triton_kernels.hopper_attention"


@triton.jit
def load_rows(rows, is_row, FIRST: tl.constexpr, END: tl.constexpr, COLUMNS: tl.constexpr):
    """Elements [rows, COLUMNS] from column FIRST on of rows of END elements; zeros where there are none."""
    columns = FIRST + tl.arange(0, COLUMNS)
    return tl.load(rows[:, None] + columns[None, :], mask=is_row[:, None] & (columns < END)[None, :], other=0)


# fmt: off
@triton.jit
def _page_rows(
    pages, scales, at, is_key, into, FIRST: tl.constexpr, END: tl.constexpr, COLUMNS: tl.constexpr,
    ROW_WIDTH: tl.constexpr, IS_FP8: tl.constexpr,
):
    """`load_rows` of pages at rows `at` int32 (no GPU has 2^31 rows of pages), as `into`."""
    found = load_rows(pages + at.to(tl.int64) * ROW_WIDTH, is_key, FIRST, END, COLUMNS)
    if scales is not None:
        wide = from_e4m3(found) if IS_FP8 else found.to(tl.float32)
        found = (wide * tl.load(scales + at, mask=is_key, other=0.0)[:, None]).to(into)
    return found
# fmt: on


@triton.jit
def _product(left, right, total, WIDENS: tl.constexpr):
    if WIDENS:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit
def _visible(scores, keys, is_key, positions, window):
    """Scores with -inf for hidden keys."""
    is_seen = is_key[None, :] & (keys[None, :] <= positions[:, None])
    if window is not None:
        is_seen = is_seen & (keys[None, :] > positions[:, None] - window)
    return tl.where(is_seen, scores, float("-inf"))


@triton.jit
def _factors(highest, other):
    """The larger of two maxima, and what to multiply sums by that are relative to either."""
    top = tl.maximum(highest, other)
    base = tl.where(top == float("-inf"), 0.0, top)  # nothing was seen yet
    return top, tl.exp2(highest - base), tl.exp2(other - base)


# fmt: off
@triton.jit
def _places(
    table, chosen, keys, is_key, kv_head, NUM_ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr = 1,
):
    """Rows of pages of `keys`, which are places in a choice of units if there is one."""
    if chosen is not None:
        units = tl.load(chosen + keys // UNIT, mask=is_key, other=0)
        keys = units * UNIT + keys % UNIT
    page = tl.load(table + keys // BLOCK_SIZE, mask=is_key, other=0)
    return (page * NUM_ROWS + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE


@triton.jit
def attend_to_range(
    mixed, highest, total, asked, asked_tail, pages, scales, table, chosen, begin, end, positions, kv_head,
    scale, softcap, window, ARE_SEEN: tl.constexpr, NUM_KV: tl.constexpr, KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NUM_PARTS: tl.constexpr, WIDTH: tl.constexpr, ROW_WIDTH: tl.constexpr,
    IS_FP8: tl.constexpr, WIDENS: tl.constexpr, UNIT: tl.constexpr = 1,
):
    """Go on with what `_attend_to_keys` returns. ARE_SEEN: all queries see all keys, a multiple of KEYS."""
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        is_key = keys < end
        at = _places(table, chosen, keys, is_key, kv_head, NUM_PARTS * NUM_KV, BLOCK_SIZE, UNIT)
        found = _page_rows(
            pages, scales, at, is_key, asked.dtype, 0, WIDTH, asked.shape[1], ROW_WIDTH, IS_FP8
        )
        scores = _product(asked, tl.trans(found), tl.zeros([asked.shape[0], KEYS], tl.float32), WIDENS)
        if asked_tail is not None:
            tail = _page_rows(
                pages, scales, at, is_key, asked.dtype, WIDTH, ROW_WIDTH, asked_tail.shape[1], ROW_WIDTH,
                IS_FP8,
            )
            scores = _product(asked_tail, tl.trans(tail), scores, WIDENS)
        # From products to units of log2, by one multiplication unless they are limited before.
        unit = scale * _LOG2E
        if softcap is not None:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * (scores * scale / softcap)) - 1.0)  # tanh
            unit = _LOG2E
        if not ARE_SEEN:
            scores = _visible(scores, keys, is_key, positions, window)
        highest, kept, _ = _factors(highest, tl.max(scores, 1) * unit)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores * unit - base[:, None])
        total = total * kept + tl.sum(weights, 1)
        if NUM_PARTS == 2:
            found = _page_rows(
                pages, scales, at + NUM_KV * BLOCK_SIZE, is_key, asked.dtype, 0, WIDTH, asked.shape[1],
                ROW_WIDTH, IS_FP8,
            )
        mixed = _product(weights.to(asked.dtype), found, mixed * kept[:, None], WIDENS)
    return mixed, highest, total


@triton.jit
def _attend_to_keys(
    asked, asked_tail, pages, scales, table, chosen, begin, end, first, positions, kv_head, scale, softcap,
    window, IS_PROMPT: tl.constexpr, NUM_KV: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    NUM_PARTS: tl.constexpr, WIDTH: tl.constexpr, ROW_WIDTH: tl.constexpr, IS_FP8: tl.constexpr,
    WIDENS: tl.constexpr, UNIT: tl.constexpr = 1,
):
    """Unscaled mixed values [lanes, columns], the highest scores, and the sums of weights.

    Products bound a prompt: its keys before the `first` query, which all queries see, have no masks.
    """
    highest = tl.full([asked.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([asked.shape[0]], tl.float32)
    mixed = tl.zeros([asked.shape[0], asked.shape[1]], tl.float32)
    if IS_PROMPT and window is None:
        num_seen = tl.maximum(tl.minimum(end, first + 1) - begin, 0) // KEYS * KEYS
        mixed, highest, total = attend_to_range(
            mixed, highest, total, asked, asked_tail, pages, scales, table, chosen, begin,
            begin + num_seen, positions, kv_head, scale, softcap, window, True, NUM_KV, KEYS, BLOCK_SIZE,
            NUM_PARTS, WIDTH, ROW_WIDTH, IS_FP8, WIDENS, UNIT,
        )
        begin += num_seen
    return attend_to_range(
        mixed, highest, total, asked, asked_tail, pages, scales, table, chosen, begin, end, positions,
        kv_head, scale, softcap, window, False, NUM_KV, KEYS, BLOCK_SIZE, NUM_PARTS, WIDTH, ROW_WIDTH, IS_FP8,
        WIDENS, UNIT,
    )


# A work list has parts at any offset: other kernels for aligned ones would be compiled while a stage serves.
@triton.jit(do_not_specialize_on_alignment=["table", "items"])
def attend_kernel(
    query, query_stride, pages, scales, table, chosen, items, sinks, output, output_stride,
    mixed_parts, stats, scale, softcap, window,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr,
    NUM_KV: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_PARTS: tl.constexpr,
    WIDTH: tl.constexpr, MAIN: tl.constexpr, ROW_WIDTH: tl.constexpr, TAIL: tl.constexpr,
    IS_FP8: tl.constexpr, WIDENS: tl.constexpr, ITEM_FIELDS: tl.constexpr, TOP_K: tl.constexpr,
    UNIT: tl.constexpr,
):
    """One item and `HEADS` of the `GROUP` heads that share a key: grid [items, NUM_KV * TILES].

    Rows of pages have `WIDTH` elements, padded to `MAIN`, and to `ROW_WIDTH` a tail for scores, padded to
    `TAIL`. Values are the first `WIDTH` of the last part's rows. Keys of single queries are places in their
    rows of `chosen` [queries, TOP_K] of units of UNIT keys. A prompt's last items have most keys: they begin.
    """
    item = items + (tl.num_programs(0) - 1 - tl.program_id(0)) * ITEM_FIELDS
    num_queries, kv_head = tl.load(item + 1), tl.program_id(1) // TILES
    if num_queries == 0:
        return
    lanes = tl.arange(0, QUERIES * HEADS)
    index, in_group = lanes // HEADS, tl.program_id(1) % TILES * HEADS + lanes % HEADS
    is_lane, head = (index < num_queries) & (in_group < GROUP), kv_head * GROUP + in_group
    row = (tl.load(item) + index).to(tl.int64)
    own = query + row * query_stride + head * ROW_WIDTH
    asked = load_rows(own, is_lane, 0, WIDTH, MAIN)
    asked_tail = load_rows(own, is_lane, WIDTH, ROW_WIDTH, TAIL) if TAIL > 0 else None
    if chosen is not None:
        chosen += tl.load(item).to(tl.int64) * TOP_K
    mixed, highest, total = _attend_to_keys(
        asked, asked_tail, pages, scales, table + tl.load(item + 2), chosen, tl.load(item + 3),
        tl.load(item + 4), tl.load(item + 5), tl.load(item + 5) + index, kv_head, scale, softcap, window,
        QUERIES > 1, NUM_KV, KEYS, BLOCK_SIZE, NUM_PARTS, WIDTH, ROW_WIDTH, IS_FP8, WIDENS, UNIT,
    )
    partial = tl.load(item + 6)
    if partial < 0:
        into = output + row * output_stride + head * WIDTH
        write_result(mixed, highest, total, sinks, head, into, is_lane, WIDTH)
    else:
        place = (partial + index).to(tl.int64) * (NUM_KV * GROUP) + head
        write_partial(mixed, highest, total, mixed_parts, stats, place, is_lane, WIDTH)
# fmt: on


@triton.jit
def write_partial(mixed, highest, total, mixed_parts, stats, place, is_row, WIDTH: tl.constexpr):
    _write_rows(mixed_parts + place * WIDTH, mixed, is_row, WIDTH)
    tl.store(stats + place * 2, highest, mask=is_row)
    tl.store(stats + place * 2 + 1, total, mask=is_row)


@triton.jit
def _write_rows(into, found, is_row, WIDTH: tl.constexpr):
    columns = tl.arange(0, found.shape[1])
    mask = is_row[:, None] & (columns < WIDTH)[None, :]
    tl.store(into[:, None] + columns[None, :], found.to(into.dtype.element_ty), mask=mask)


@triton.jit
def write_result(mixed, highest, total, sinks, head, into, is_row, WIDTH: tl.constexpr):
    if sinks is not None:
        sink = tl.load(sinks + head, mask=is_row, other=0.0) * _LOG2E
        _, kept, added = _factors(highest, sink)
        total = total * kept + added
        mixed = mixed * kept[:, None]
    divisor = tl.where(total == 0.0, 1.0, total)
    _write_rows(into, mixed / divisor[:, None], is_row, WIDTH)


# fmt: off
@triton.jit(do_not_specialize_on_alignment=["merges"])
def merge_kernel(
    merges, mixed_parts, stats, sinks, output, output_stride,
    WIDTH: tl.constexpr, MAIN: tl.constexpr, MERGE_FIELDS: tl.constexpr,
):
    """One head of one query: grid [merges, heads]. Parts are added in the order of their keys."""
    merge = merges + tl.program_id(0) * MERGE_FIELDS
    num_parts, head, num_heads = tl.load(merge + 2), tl.program_id(1), tl.num_programs(1)
    if num_parts == 0:
        return
    columns = tl.arange(0, MAIN)
    mixed, total, highest = tl.zeros([MAIN], tl.float32), 0.0, float("-inf")
    if sinks is not None:
        highest, total = tl.load(sinks + head) * _LOG2E, 1.0
    for part in range(num_parts):
        place = (tl.load(merge + 1) + part * tl.load(merge + 3)).to(tl.int64) * num_heads + head
        highest, kept, added = _factors(highest, tl.load(stats + place * 2))
        found = tl.load(mixed_parts + place * WIDTH + columns, mask=columns < WIDTH, other=0.0)
        mixed = mixed * kept + found * added
        total = total * kept + tl.load(stats + place * 2 + 1) * added
    divisor = tl.where(total == 0.0, 1.0, total)
    into = output + tl.load(merge).to(tl.int64) * output_stride + head * WIDTH
    tl.store(into + columns, (mixed / divisor).to(output.dtype.element_ty), mask=columns < WIDTH)
# fmt: on


@dataclass(frozen=True, slots=True)
class KeyTile:
    """Sizes of one program: queries times heads, and keys at a time, loaded `num_stages` ahead."""

    queries: int
    heads: int
    keys: int
    num_warps: int
    num_stages: int = 2


LEAST_ROWS = 16
"""Rows of the smallest tile of a tensor core."""
_TILE_BYTES, _PROMPT_TILE_BYTES = 16 * 1024, 8 * 1024
"""Bytes of the keys, and of the values, of one program at a time; twice as many on Hopper. Beside them,
several queries are in shared memory, of which the smallest GPUs have 99 KiB.
"""


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether `device` is a GPU of compute capability 9, with 227 KiB of shared memory for a program."""
    return not IS_INTERPRETED and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def hopper_attention() -> ModuleType | None:
    """The kernel of prompts on Hopper; None, which is logged once, if Triton's Gluon lacks what it needs."""
    try:
        return importlib.import_module(_HOPPER_ATTENTION)
    except (ImportError, AttributeError) as error:
        log.warning("prompts on Hopper take the slower kernel of other GPUs: %s", error)
        return None


def tile_of(num_queries: int, query: Tensor, pages: Tensor, unit: int = 1) -> KeyTile:
    """Tiles of Hopper were chosen on an H200 for rows of 128 elements, see bench/STUDIES.md: decodes wait for
    loads, and prompts that `hopper_attention` leaves run on one warp group, so that two programs share a
    multiprocessor. Converting wide rows of 8 bits leaves registers for the smallest tile only.
    """
    group, row_width, element_bytes = query.shape[1] // pages.shape[2], query.shape[2], query.element_size()
    heads = LEAST_ROWS if num_queries == 1 else min(padded(group), MOST_HEADS)
    queries = max(padded(num_queries), LEAST_ROWS // heads)
    if element_bytes == 4:
        return KeyTile(queries, heads, LEAST_ROWS, 8)
    has_scales = pages.element_size() == 1
    row_bytes = padded(row_width) * element_bytes
    if is_hopper(query.device) and row_width <= 128 and not has_scales:
        if num_queries == 1:
            return KeyTile(queries, heads, min(128, 2 * _TILE_BYTES // row_bytes), 4, 3)
        return KeyTile(queries, heads, min(64, 2 * _PROMPT_TILE_BYTES // row_bytes), 4, 3)
    tile_bytes = _TILE_BYTES if num_queries == 1 else _PROMPT_TILE_BYTES
    if has_scales and (num_queries > 1 or unit > 1):
        tile_bytes //= 2  # converting takes registers, and so does finding keys of units
    keys = max(LEAST_ROWS, min(64, tile_bytes // row_bytes))
    if num_queries > 1 and has_scales and row_width > 256:
        heads = max(1, LEAST_ROWS // queries)
    return KeyTile(queries, heads, keys, 8 if queries * heads * padded(row_width) >= 64 * 128 else 4)


def _constants(
    query: Tensor, output: Tensor, pages: Tensor, tile: KeyTile, *, is_fp8: bool
) -> dict[str, int | bool]:
    num_heads, row_width = query.shape[1:]
    _, num_parts, kv_heads, block_size, _ = pages.shape
    width, group = output.shape[2], num_heads // kv_heads
    return {
        "QUERIES": tile.queries,
        "HEADS": tile.heads,
        "TILES": -(-group // tile.heads),
        "GROUP": group,
        "NUM_KV": kv_heads,
        "KEYS": tile.keys,
        "BLOCK_SIZE": block_size,
        "NUM_PARTS": num_parts,
        "WIDTH": width,
        "MAIN": padded(width, LEAST_ROWS),
        "ROW_WIDTH": row_width,
        "TAIL": padded(row_width - width, LEAST_ROWS) if row_width > width else 0,
        "IS_FP8": is_fp8,
        "WIDENS": IS_INTERPRETED,
        "ITEM_FIELDS": ITEM_FIELDS,
    }


def attend(
    query: Tensor,
    output: Tensor,
    work: AttentionWork,
    pages: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    page_scales: Tensor | None = None,
    chosen: Tensor | None = None,
    unit: int = 1,
) -> None:
    """Fill the rows of `output` [n, heads, width] that `work` names from `query` [n, heads, row_width].

    `pages` is [num_blocks, parts, kv_heads, block_size, row_width]: keys and values of the same width, or one
    part that is both, of which values are the first `width` elements. `sinks` is float32 [heads].
    `page_scales` [num_blocks, parts, kv_heads, block_size] are those of 8-bit pages. With `chosen` int32
    [n, top_k], keys of the work are places in a query's row there, which has units of `unit` keys.
    """
    mixed, stats = partial_results(work.num_partial, output)
    is_plain = all(option is None for option in (window, softcap, sinks, page_scales, chosen))
    for_hopper = hopper_attention() if is_plain and work.num_queries > 1 and is_hopper(query.device) else None
    given = (query, output, work, pages, mixed, stats, scale)
    others = (window, softcap, sinks, page_scales, chosen, unit)
    if for_hopper is not None and for_hopper.takes(query, output, pages):
        for_hopper.start(*given)
    else:
        _start_items(*given, *others)
    if work.num_partial:
        merge(work.merges, mixed, stats, sinks, output)


def partial_results(num_partial: int, output: Tensor) -> tuple[Tensor, Tensor]:
    """Room for mixed values float32 [num_partial, heads, width], and for highest scores and sums of weights
    float32 [num_partial, heads, 2], of parts of the keys of queries with `output` [n, heads, width].
    """
    _, num_heads, width = output.shape
    mixed, stats = (
        output.new_empty((num_partial, num_heads, size), dtype=torch.float32) for size in (width, 2)
    )
    return mixed, stats


def merge(merges: Tensor, mixed: Tensor, stats: Tensor, sinks: Tensor | None, output: Tensor) -> None:
    """Fill the rows of `output` that `merges` name from parts of their keys, see `AttentionWork`."""
    _, num_heads, width = output.shape
    constants = {"WIDTH": width, "MAIN": padded(width, LEAST_ROWS), "MERGE_FIELDS": MERGE_FIELDS}
    start = Launch(merge_kernel, (len(merges), num_heads), constants)
    start(merges, mixed, stats, sinks, output, output.stride(0))


def _start_items(
    query: Tensor,
    output: Tensor,
    work: AttentionWork,
    pages: Tensor,
    mixed: Tensor,
    stats: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    page_scales: Tensor | None,
    chosen: Tensor | None,
    unit: int,
) -> None:
    """`mixed` and `stats` are of parts of keys, see `hopper_attention.start`."""
    is_fp8 = pages.dtype is torch.float8_e4m3fn
    tile = tile_of(work.num_queries, query, pages, unit)
    constants = _constants(query, output, pages, tile, is_fp8=is_fp8)
    constants["TOP_K"], constants["UNIT"] = 0 if chosen is None else chosen.shape[1], unit
    grid = (len(work.items), pages.shape[2] * constants["TILES"])
    Launch(attend_kernel, grid, constants, tile.num_warps, tile.num_stages)(
        *(query, query.stride(0), pages.view(torch.uint8) if is_fp8 else pages, page_scales),
        *(work.table, chosen, work.items, sinks, output, output.stride(0)),
        *(mixed, stats, scale, softcap, window),
    )
