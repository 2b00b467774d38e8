"""Attention of prompts on Hopper: one warp loads pages, and two groups of four warps attend to them.

Each group has half of an item's rows. It multiplies queries with one tile of keys, and the weights of the
tile before with their values, while it computes the softmax of that tile: Shah et al. 2024, arXiv:2407.08608,
section 3. Tiles are read from the last to the first, whole pages by the tensor memory accelerator.

Precision and what is written are those of `attention`. Hidden keys are read here, but have no weight.
"""

# Constants of kernels are in capitals.
# ruff: noqa: N803, N806
from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from stage_worker.model.attention_work import ITEM_FIELDS, MOST_HEADS, AttentionWork
from stage_worker.model.triton_kernels.launch import Launch, padded

NUM_ROWS, NUM_KEYS, WIDTH = 128, 128, 128
"""Queries times heads of an item, keys of a tile, and elements of a head."""
_NUM_STAGES = 2
_SWIZZLED = 64
"""Elements of 2 bytes in a row of shared memory: the tensor memory accelerator interleaves 128 bytes."""
_LEAST_PAGE = 16

_LOG2E = gl.constexpr(1.4426950408889634)
_LOWEST = gl.constexpr(-1.0e30)
"""Of scores, so that weights of hidden keys are 0 before any key was seen."""


# fmt: off
@gluon.jit
def _item(items, ITEM_FIELDS: gl.constexpr):
    """The last items of a prompt have the most keys, and begin first."""
    return items + (gl.num_programs(0) - 1 - gl.program_id(0)) * ITEM_FIELDS


@gluon.jit
def _last_tile(item, KEYS: gl.constexpr):
    """The last tile of an item with any keys, or the first one; the number of its tiles; and its end."""
    end = gl.load(item + 4)
    last = gl.maximum(end - 1, 0) // KEYS
    return last, last - gl.load(item + 3) // KEYS + 1, end


@gluon.jit
def _load_tiles(
    pages, table, items, tiles, NUM_KV: gl.constexpr, TILES: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    KEYS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, ITEM_FIELDS: gl.constexpr,
):
    """Load all tiles of keys and of values, each when its place is free."""
    item, kv_head = _item(items, ITEM_FIELDS), gl.program_id(1) // TILES
    last, num_tiles, end = _last_tile(item, KEYS)
    last_page = gl.maximum(end - 1, 0) // BLOCK_SIZE
    table += gl.load(item + 2)
    keys, values, keys_ready, values_ready, keys_free, values_free = tiles
    NUM_PAGES: gl.constexpr = KEYS // BLOCK_SIZE
    for t in range(num_tiles):
        stage, is_free = t % STAGES, (t // STAGES & 1) ^ 1
        rows = ()
        for i in gl.static_range(NUM_PAGES):
            page = gl.load(table + gl.minimum((last - t) * NUM_PAGES + i, last_page))
            rows += ((page * (2 * NUM_KV) + kv_head) * BLOCK_SIZE,)  # type: ignore[assignment]
        mbarrier.wait(keys_free.index(stage), is_free)
        _load_tile(pages, rows, 0, keys, stage, keys_ready.index(stage), BLOCK_SIZE, KEYS, WIDTH, STAGES)
        mbarrier.wait(values_free.index(stage), is_free)
        _load_tile(
            pages, rows, NUM_KV * BLOCK_SIZE, values, stage, values_ready.index(stage), BLOCK_SIZE, KEYS,
            WIDTH, STAGES,
        )


@gluon.jit
def _load_tile(
    pages, rows, offset, into, stage, is_ready, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr,
    WIDTH: gl.constexpr, STAGES: gl.constexpr,
):
    """Load the rows of pages that begin at `rows` and an `offset`; the left halves of all are first."""
    HALF: gl.constexpr = pages.block_type.shape[1]
    HALVES: gl.constexpr = WIDTH // HALF
    NUM_PAGES: gl.constexpr = KEYS // BLOCK_SIZE
    parts = into._reinterpret(pages.dtype, [STAGES * HALVES * NUM_PAGES, BLOCK_SIZE, HALF], pages.layout)
    mbarrier.expect(is_ready, KEYS * WIDTH * 2)
    for i in gl.static_range(NUM_PAGES):
        for half in gl.static_range(HALVES):
            part = parts.index((stage * HALVES + half) * NUM_PAGES + i)
            tma.async_copy_global_to_shared(pages, [rows[i] + offset, half * HALF], is_ready, part)


@gluon.jit
def _softmax(scores, highest, total, unit):
    """Weights of `scores`, the highest one and the sum of all weights so far, and what earlier ones keep."""
    top = gl.maximum(highest, gl.max(scores, 1) * unit)
    kept = gl.exp2(highest - top)
    weights = gl.exp2(scores * unit - top[:, None])
    return weights, top, total * kept + gl.sum(weights, 1), kept


@gluon.jit
def _visible(scores, first_key, positions, end, SCORES: gl.constexpr):
    keys = first_key + gl.arange(0, scores.shape[1], gl.SliceLayout(0, SCORES))
    is_seen = (keys[None, :] <= positions[:, None]) & (keys < end)[None, :]
    return gl.where(is_seen, scores, float("-inf"))


@gluon.jit
def _clear_values(values, first_key, end, LOADED: gl.constexpr):
    """Zeros for the values behind the last key: memory there may hold NaN. Both groups write the same."""
    keys = first_key + gl.arange(0, values.shape[0], gl.SliceLayout(1, LOADED))
    found = values.load(LOADED)
    values.store(gl.where((keys < end)[:, None], found, gl.zeros_like(found)))
    fence_async_shared()


@gluon.jit
def _attend_to_tile(
    t, last, num_tiles, end, state, asked, tiles, positions, unit, ARE_SEEN: gl.constexpr,
    STAGES: gl.constexpr, SCORES: gl.constexpr, MIXED: gl.constexpr, WEIGHTS: gl.constexpr,
):
    """Scores and weights of tile `t`, which is ready, while those of tile `t` - 1 mix their values."""
    mixed, weights, highest, total = state
    keys, values, keys_ready, values_ready, keys_free, values_free = tiles
    ROWS: gl.constexpr = mixed.shape[0]
    KEYS: gl.constexpr = keys.shape[1]
    stage, before, after = t % STAGES, (t - 1) % STAGES, (t + 1) % STAGES
    empty = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = warpgroup_mma(asked, keys.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True)
    mbarrier.wait(values_ready.index(before), (t - 1) // STAGES & 1)
    mixing = warpgroup_mma(weights, values.index(before), mixed, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(keys_free.index(stage), count=1)
    if not ARE_SEEN:
        scores = _visible(scores, (last - t) * KEYS, positions, end, SCORES)
    found, highest, total, kept = _softmax(scores, highest, total, unit)
    # This loop also keeps the assembler from waiting for the product before the softmax is computed.
    mbarrier.wait(keys_ready.index(after), (t + 1) // STAGES & 1, pred=t + 1 < num_tiles)
    mixed, weights, found = warpgroup_mma_wait(0, deps=(mixing, weights, found))
    mbarrier.arrive(values_free.index(before), count=1)
    mixed = mixed * gl.convert_layout(kept, gl.SliceLayout(1, MIXED))[:, None]
    return mixed, gl.convert_layout(found.to(weights.dtype), WEIGHTS), highest, total


@gluon.jit
def _attend_to_first_tile(
    last, num_tiles, end, asked, tiles, positions, unit, WIDTH: gl.constexpr, LOADED: gl.constexpr,
    SCORES: gl.constexpr, MIXED: gl.constexpr, WEIGHTS: gl.constexpr,
):
    """As `_attend_to_tile`, without weights before."""
    keys, values, keys_ready, values_ready, keys_free, _ = tiles
    ROWS: gl.constexpr = asked.shape[0]
    KEYS: gl.constexpr = keys.shape[1]
    mbarrier.wait(keys_ready.index(0), 0)
    empty = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = warpgroup_mma(asked, keys.index(0).permute((1, 0)), empty, use_acc=False, is_async=True)
    mbarrier.wait(values_ready.index(0), 0)
    _clear_values(values.index(0), last * KEYS, end, LOADED)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(keys_free.index(0), count=1)
    scores = _visible(scores, last * KEYS, positions, end, SCORES)
    highest = gl.full([ROWS], _LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
    found, highest, total, _ = _softmax(scores, highest, gl.zeros_like(highest), unit)
    mbarrier.wait(keys_ready.index(1), 0, pred=num_tiles > 1)
    mixed = gl.zeros([ROWS, WIDTH], gl.float32, MIXED)
    return mixed, gl.convert_layout(found.to(keys.dtype), WEIGHTS), highest, total


@gluon.jit
def _load_queries(
    query, query_stride, row, num_queries, kv_head, first_head, asked, HEADS: gl.constexpr,
    GROUP: gl.constexpr, INDEX: gl.constexpr, LOADED: gl.constexpr,
):
    ROWS: gl.constexpr = asked.shape[0]
    WIDTH: gl.constexpr = asked.shape[1]
    lanes = INDEX * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
    index, in_group = lanes // HEADS, first_head + lanes % HEADS
    is_lane = (index < num_queries) & (in_group < GROUP)
    rows = query + (row + index).to(gl.int64) * query_stride + (kv_head * GROUP + in_group) * WIDTH
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LOADED))
    asked.store(gl.load(rows[:, None] + columns[None, :], mask=is_lane[:, None], other=0.0))
    fence_async_shared()


@gluon.jit
def _attend_to_tiles(
    item, first, asked, tiles, positions, unit, KEYS: gl.constexpr, STAGES: gl.constexpr,
    LOADED: gl.constexpr, SCORES: gl.constexpr, MIXED: gl.constexpr, WEIGHTS: gl.constexpr,
):
    """Unscaled mixed values of the queries from position `first` on, their highest scores, and the sums of
    weights.
    """
    last, num_tiles, end = _last_tile(item, KEYS)
    num_seen = gl.maximum((first + 1) // KEYS + num_tiles - 1 - last, 0)  # tiles that all queries see
    num_masked = gl.maximum(num_tiles - num_seen, 1)
    WIDTH: gl.constexpr = asked.shape[1]
    state = _attend_to_first_tile(
        last, num_tiles, end, asked, tiles, positions, unit, WIDTH, LOADED, SCORES, MIXED, WEIGHTS
    )
    for t in range(1, num_masked):
        state = _attend_to_tile(
            t, last, num_tiles, end, state, asked, tiles, positions, unit, False, STAGES, SCORES, MIXED,
            WEIGHTS,
        )
    for t in range(num_masked, num_tiles):
        state = _attend_to_tile(
            t, last, num_tiles, end, state, asked, tiles, positions, unit, True, STAGES, SCORES, MIXED,
            WEIGHTS,
        )
    mixed, weights, highest, total = state
    before = (num_tiles - 1) % STAGES
    mbarrier.wait(tiles[3].index(before), (num_tiles - 1) // STAGES & 1)
    mixed = warpgroup_mma(weights, tiles[1].index(before), mixed, is_async=True)
    return warpgroup_mma_wait(0, deps=(mixed,)), highest, total


@gluon.jit
def _attend(
    given, HEADS: gl.constexpr, TILES: gl.constexpr, GROUP: gl.constexpr, NUM_KV: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, ITEM_FIELDS: gl.constexpr, INDEX: gl.constexpr,
):
    """Rows of half `INDEX` of an item, by four warps."""
    query, query_stride, items, output, output_stride, mixed_parts, stats, scale, asked_rows, tiles = given
    asked = asked_rows.index(INDEX)
    ROWS: gl.constexpr = asked.shape[0]
    WIDTH: gl.constexpr = asked.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    MIXED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, MIXED, 2)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    item, kv_head = _item(items, ITEM_FIELDS), gl.program_id(1) // TILES
    row, num_queries, first = gl.load(item), gl.load(item + 1), gl.load(item + 5)
    first_head = gl.program_id(1) % TILES * HEADS
    _load_queries(
        query, query_stride, row, num_queries, kv_head, first_head, asked, HEADS, GROUP, INDEX, LOADED
    )
    positions = first + (INDEX * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))) // HEADS
    mixed, highest, total = _attend_to_tiles(
        item, first, asked, tiles, positions, scale * _LOG2E, KEYS, STAGES, LOADED, SCORES, MIXED, WEIGHTS
    )
    _write(
        mixed, highest, total, gl.load(item + 6), output, output_stride, mixed_parts, stats, row, num_queries,
        kv_head, first_head, HEADS, GROUP, NUM_KV, INDEX, MIXED,
    )


@gluon.jit
def _write(
    mixed, highest, total, partial, output, output_stride, mixed_parts, stats, row, num_queries, kv_head,
    first_head, HEADS: gl.constexpr, GROUP: gl.constexpr, NUM_KV: gl.constexpr, INDEX: gl.constexpr,
    MIXED: gl.constexpr,
):
    ROWS: gl.constexpr = mixed.shape[0]
    WIDTH: gl.constexpr = mixed.shape[1]
    lanes = INDEX * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, MIXED))
    index, in_group = lanes // HEADS, first_head + lanes % HEADS
    is_lane, head = (index < num_queries) & (in_group < GROUP), kv_head * GROUP + in_group
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, MIXED))
    total = gl.convert_layout(total, gl.SliceLayout(1, MIXED))
    if partial < 0:
        into = output + (row + index).to(gl.int64) * output_stride + head * WIDTH
        found = (mixed / gl.where(total == 0.0, 1.0, total)[:, None]).to(output.dtype.element_ty)
        gl.store(into[:, None] + columns[None, :], found, mask=is_lane[:, None])
    else:
        place = (partial + index).to(gl.int64) * (NUM_KV * GROUP) + head
        of_part = mixed_parts + place * WIDTH
        gl.store(of_part[:, None] + columns[None, :], mixed, mask=is_lane[:, None])
        gl.store(stats + place * 2, gl.convert_layout(highest, gl.SliceLayout(1, MIXED)), mask=is_lane)
        gl.store(stats + place * 2 + 1, total, mask=is_lane)


@gluon.jit
def _barriers(COUNT: gl.constexpr, STAGES: gl.constexpr):
    found = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(found.index(i), count=COUNT)
    return found


# A work list has parts at any offset, as for `attend_kernel`.
@gluon.jit(do_not_specialize_on_alignment=["table", "items"])
def prompt_kernel(
    query, query_stride, pages, table, items, output, output_stride, mixed_parts, stats, scale,
    ROWS: gl.constexpr, HEADS: gl.constexpr, TILES: gl.constexpr, GROUP: gl.constexpr, NUM_KV: gl.constexpr,
    KEYS: gl.constexpr, BLOCK_SIZE: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    ITEM_FIELDS: gl.constexpr,
):
    """One item and `HEADS` of the `GROUP` heads that share a key: grid [items, NUM_KV * TILES]."""
    if gl.load(_item(items, ITEM_FIELDS) + 1) == 0:
        return
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    asked_rows = gl.allocate_shared_memory(pages.dtype, [2, ROWS // 2, WIDTH], SHARED)
    keys = gl.allocate_shared_memory(pages.dtype, [STAGES, KEYS, WIDTH], SHARED)
    values = gl.allocate_shared_memory(pages.dtype, [STAGES, KEYS, WIDTH], SHARED)
    keys_ready, values_ready = _barriers(1, STAGES), _barriers(1, STAGES)
    keys_free, values_free = _barriers(2, STAGES), _barriers(2, STAGES)
    tiles = (keys, values, keys_ready, values_ready, keys_free, values_free)
    given = (query, query_stride, items, output, output_stride, mixed_parts, stats, scale, asked_rows, tiles)
    gl.warp_specialize(
        [
            (_attend, (given, HEADS, TILES, GROUP, NUM_KV, KEYS, STAGES, ITEM_FIELDS, 0)),
            (_attend, (given, HEADS, TILES, GROUP, NUM_KV, KEYS, STAGES, ITEM_FIELDS, 1)),
            (_load_tiles, (pages, table, items, tiles, NUM_KV, TILES, BLOCK_SIZE, KEYS, WIDTH, STAGES,
                           ITEM_FIELDS)),
        ],
        [4, 1],
        [240, 24],
    )
# fmt: on


def takes(query: Tensor, output: Tensor, pages: Tensor) -> bool:
    """Whether keys and values are in `pages` as `start` reads them, for heads of `WIDTH` elements."""
    _, num_parts, _, block_size, row_width = pages.shape
    has_shape = num_parts == 2 and row_width == output.shape[2] == WIDTH
    has_pages = block_size >= _LEAST_PAGE and NUM_KEYS % block_size == 0
    return has_shape and has_pages and query.dtype == pages.dtype and query.element_size() == 2


def start(
    query: Tensor,
    output: Tensor,
    work: AttentionWork,
    pages: Tensor,
    mixed: Tensor,
    stats: Tensor,
    scale: float,
) -> None:
    """Compute all items of `work`, see `attention.attend`.

    Args:
        mixed: float32 [num_partial, heads, width], unscaled sums of parts of keys.
        stats: float32 [num_partial, heads, 2], their highest scores and sums of weights.
    """
    num_heads, kv_heads, block_size = query.shape[1], pages.shape[2], pages.shape[3]
    group = num_heads // kv_heads
    heads = min(padded(group), MOST_HEADS)
    constants = {
        "ROWS": NUM_ROWS,
        "HEADS": heads,
        "TILES": -(-group // heads),
        "GROUP": group,
        "NUM_KV": kv_heads,
        "KEYS": NUM_KEYS,
        "BLOCK_SIZE": block_size,
        "WIDTH": WIDTH,
        "STAGES": _NUM_STAGES,
        "ITEM_FIELDS": ITEM_FIELDS,
    }
    grid = (len(work.items), kv_heads * constants["TILES"])
    Launch(prompt_kernel, grid, constants)(
        *(query, query.stride(0), _described(pages), work.table, work.items),
        *(output, output.stride(0), mixed, stats, scale),
    )


def _described(pages: Tensor) -> TensorDescriptor:
    """Rows of all pages, of which half a page's row is loaded at once."""
    rows = pages.view(-1, WIDTH)
    layout = gl.NVMMASharedLayout(2 * _SWIZZLED, 16, 2)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [pages.shape[3], _SWIZZLED], layout)
