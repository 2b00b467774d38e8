"""Unpacks quantised matrices tile by tile: computes in float32, as the formats' own libraries do.

A tile is a range of rows, and of columns, of the matrix [out, in]. Formats that are stored [in, out] are read
in ranges of columns, which are contiguous in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from checkpoint import BadHeader, DType
from checkpoint.dtypes import BlockDType, PackedDType, StoredDType
from checkpoint.files import parse_json_object
from checkpoint.quantization import (
    NF4_BLOCK,
    NF4_NESTED_BLOCK,
    WORD_BITS,
    Awq,
    Blocks,
    Fp4,
    Fp4Layout,
    Gptq,
    Nf4,
    PackedInts,
    PackedMatrix,
    Scaled,
    StoredPart,
)
from stage_worker.model.blocks import block_values

STORED_TORCH_DTYPES: dict[StoredDType, torch.dtype] = {
    DType.BF16: torch.bfloat16,
    DType.F16: torch.float16,
    DType.F32: torch.float32,
    PackedDType.F8_E4M3: torch.float8_e4m3fn,
    PackedDType.F8_E8M0: torch.float8_e8m0fnu,
    PackedDType.I8: torch.int8,
    PackedDType.U8: torch.uint8,
    PackedDType.I32: torch.int32,
    PackedDType.I64: torch.int64,
    **dict.fromkeys(BlockDType, torch.uint8),
}

ReadElements = Callable[[StoredPart, int, int], Tensor]
"""Elements [begin, end) of a stored tensor, in one dimension; bytes of blocks."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows [row_begin, row_end) and columns [column_begin, column_end)."""

    row_begin: int
    row_end: int
    column_begin: int
    column_end: int

    @property
    def num_rows(self) -> int:
        return self.row_end - self.row_begin

    @property
    def num_columns(self) -> int:
        return self.column_end - self.column_begin

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.num_rows * self.num_columns


def tiles(matrix: PackedMatrix, row_begin: int, row_end: int, *, max_elements: int) -> Iterator[Tile]:
    """Yield the tiles of rows [row_begin, row_end), in file order, each of about `max_elements` or fewer."""
    columns = matrix.shape[-1]
    if not is_stored_by_row(matrix):
        step = max(max_elements // (row_end - row_begin) // WORD_BITS, 1) * WORD_BITS
        for begin in range(0, columns, step):
            yield Tile(row_begin, row_end, begin, min(begin + step, columns))
    else:
        step = max(max_elements // columns, 1)
        for begin in range(row_begin, row_end, step):
            yield Tile(begin, min(begin + step, row_end), 0, columns)


def unpack(matrix: PackedMatrix, tile: Tile, read: ReadElements) -> Tensor:
    """Return the weights of a tile of `tiles`, float32 [rows, columns].

    Raises BadHeader for stored values that contradict the format.
    """
    return _UNPACKERS[type(matrix.scheme)](matrix, matrix.scheme, tile, read)


def _scaled(matrix: PackedMatrix, scheme: Scaled, tile: Tile, read: ReadElements) -> Tensor:
    rows, columns = tile.num_rows, tile.num_columns
    values = (
        read(StoredPart.WEIGHT, tile.row_begin * columns, tile.row_end * columns).float().view(rows, columns)
    )
    if not scheme.is_symmetric:
        values -= _grid(StoredPart.ZERO_POINT, scheme.block, tile, read)
    return values.mul_(_grid(StoredPart.SCALE, scheme.block, tile, read))


def _grid(part: StoredPart, block: tuple[int, int], tile: Tile, read: ReadElements) -> Tensor:
    """Spread one number per block [rows, columns] over the elements of a tile of whole rows."""
    height, width = block
    num_columns = _num_blocks(tile.num_columns, width)
    if height == 0:
        first, index = 0, torch.zeros(tile.num_rows, dtype=torch.int64)
    else:
        first = tile.row_begin // height
        index = torch.arange(tile.row_begin, tile.row_end) // height - first
    last = first + int(index[-1]) + 1
    numbers = read(part, first * num_columns, last * num_columns).float().view(-1, num_columns)
    return _spread(numbers[index], width, tile.num_columns)


def _num_blocks(size: int, block: int) -> int:
    return 1 if block == 0 else -(-size // block)


def _spread(numbers: Tensor, size: int, columns: int) -> Tensor:
    """Repeat each column of `numbers` [rows, n] `size` times; 0 means all columns."""
    if numbers.shape[1] == 1:
        return numbers
    return numbers.repeat_interleave(size, dim=1)[:, :columns]


def _packed_ints(matrix: PackedMatrix, scheme: PackedInts, tile: Tile, read: ReadElements) -> Tensor:
    rows, columns = tile.num_rows, tile.num_columns
    num_words = -(-columns * scheme.bits // WORD_BITS)
    words = read(StoredPart.WEIGHT, tile.row_begin * num_words, tile.row_end * num_words).view(
        rows, num_words
    )
    values = _codes(words, scheme.bits)[:, :columns].float()
    groups = _num_blocks(columns, scheme.group)
    scales = read(StoredPart.SCALE, tile.row_begin * groups, tile.row_end * groups).float().view(rows, groups)
    spread = _column_spread(matrix, scheme, groups, read)
    if scheme.is_symmetric:
        values -= 1 << (scheme.bits - 1)
    else:
        values -= spread(_zero_points(scheme, tile, groups, read))
    return values.mul_(spread(scales))


def _column_spread(
    matrix: PackedMatrix, scheme: PackedInts, groups: int, read: ReadElements
) -> Callable[[Tensor], Tensor]:
    """Return a function that spreads numbers [rows, groups] over columns [rows, columns]."""
    columns = matrix.shape[-1]
    if scheme.has_group_index:
        index = _group_index(matrix, read(StoredPart.GROUP_INDEX, 0, columns), groups)
        if index is not None:
            return lambda numbers: numbers[:, index]
    return lambda numbers: _spread(numbers, scheme.group, columns)


def _zero_points(scheme: PackedInts, tile: Tile, groups: int, read: ReadElements) -> Tensor:
    """Codes [rows, groups], which are packed along rows."""
    per_word = WORD_BITS // scheme.bits
    first, last = tile.row_begin // per_word, -(-tile.row_end // per_word)
    words = read(StoredPart.ZERO_POINT, first * groups, last * groups).view(-1, groups)
    codes = _codes(_transposed(words), scheme.bits).t()
    begin = tile.row_begin - first * per_word
    return codes[begin : begin + tile.num_rows].float()


def _group_index(matrix: PackedMatrix, index: Tensor, groups: int) -> Tensor | None:
    """Checked groups of columns; None if all are -1, which means groups in order."""
    low, high = int(index.min()), int(index.max())
    if low == high == -1:
        return None
    if low < 0 or high >= groups:
        name = matrix.parts[StoredPart.GROUP_INDEX].name
        raise BadHeader(f"tensor {name} has groups from {low} to {high}, the limits are 0 and {groups - 1}")
    return index.long()


def _transposed(words: Tensor) -> Tensor:
    """A copy; `contiguous` would keep the strides of a single column."""
    return words.t().clone(memory_format=torch.contiguous_format)


def _codes(words: Tensor, bits: int) -> Tensor:
    """Numbers of `bits` bits in the integers [..., n], lowest bits first, as uint8 [..., n * k]."""
    octets = words.view(torch.uint8)
    return octets if bits == 8 else _nibbles(octets)


def _nibbles(octets: Tensor) -> Tensor:
    """The 4-bit numbers of bytes [..., n], low bits first, as uint8 [..., 2 * n]."""
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StoredGroups:
    """Scales float32, or uint8 of E8M0, and zero points uint8 (None: 8) [groups, rows] of rows of 4 bits."""

    scales: Tensor
    zeros: Tensor | None


def nibble_codes(matrix: PackedMatrix, tile: Tile, read: ReadElements) -> Tensor:
    """Codes uint8 [rows, columns] of a tile of `tiles`, of a format of 4-bit integers or floats."""
    *_, height, columns = matrix.shape
    rows = slice(tile.row_begin, tile.row_end)
    match matrix.scheme:
        case Fp4():
            octets = read(StoredPart.WEIGHT, tile.row_begin * columns // 2, tile.row_end * columns // 2)
            return _nibbles(octets.view(tile.num_rows, -1))
        case PackedInts():
            num_words = -(-columns // _PER_WORD)
            words = read(StoredPart.WEIGHT, tile.row_begin * num_words, tile.row_end * num_words)
            return _nibbles(words.view(torch.uint8)).view(tile.num_rows, -1)[:, :columns]
        case Gptq():
            first, last = tile.column_begin // _PER_WORD, tile.column_end // _PER_WORD
            words = read(StoredPart.WEIGHT, first * height, last * height).view(-1, height)
            return _codes(_transposed(words[:, rows]), 4)
        case Awq():
            num_words = height // _PER_WORD
            words = read(StoredPart.WEIGHT, tile.column_begin * num_words, tile.column_end * num_words)
            return _awq_codes(words.view(-1, num_words), rows).t()
    raise AssertionError(f"codes of {matrix.scheme.label}")


def is_stored_by_row(matrix: PackedMatrix) -> bool:
    """Whether `tiles` are whole rows, and not all rows of some columns."""
    return not isinstance(matrix.scheme, Gptq | Awq)


def stored_groups(matrix: PackedMatrix, tile: Tile, read: ReadElements) -> StoredGroups:
    """What whole rows of 4-bit integers or floats have beside their codes: of a tile if the matrix
    `is_stored_by_row`, or of all rows.

    Raises ValueError for scales of floats that are not numbers.
    """
    scheme, columns = matrix.scheme, matrix.shape[-1]
    if isinstance(scheme, Fp4):
        return StoredGroups(scales=_held_fp4_scales(matrix, scheme, tile, read).t(), zeros=None)
    assert isinstance(scheme, PackedInts | Gptq | Awq), "groups of another format"
    groups = _num_blocks(columns, scheme.group)
    if isinstance(scheme, PackedInts):
        scales = read(StoredPart.SCALE, tile.row_begin * groups, tile.row_end * groups).float()
        zeros = None
        if not scheme.is_symmetric:
            zeros = _zero_points(scheme, tile, groups, read).t().to(torch.uint8)
        return StoredGroups(scales=scales.view(tile.num_rows, groups).t(), zeros=zeros)
    height = tile.num_rows
    assert height == num_rows(matrix), "some rows of a matrix that is stored by columns"
    words = read(StoredPart.ZERO_POINT, 0, -1).view(groups, -1)
    if isinstance(scheme, Gptq):
        zeros = _codes(words, 4) + scheme.zero_offset
    else:
        zeros = _awq_codes(words, slice(0, height))
    return StoredGroups(scales=read(StoredPart.SCALE, 0, -1).float().view(groups, height), zeros=zeros)


def stored_index(matrix: PackedMatrix, read: ReadElements) -> Tensor | None:
    """The checked groups of columns, int64 [columns]; None if in order. Raises BadHeader."""
    if StoredPart.GROUP_INDEX not in matrix.parts:
        return None
    scheme, columns = matrix.scheme, matrix.shape[-1]
    assert isinstance(scheme, PackedInts | Gptq), "groups of another format"
    index = read(StoredPart.GROUP_INDEX, 0, columns)
    return _group_index(matrix, index, _num_blocks(columns, scheme.group))


def _held_fp4_scales(matrix: PackedMatrix, scheme: Fp4, tile: Tile, read: ReadElements) -> Tensor:
    """Scales of the rows of a tile, [rows, groups]: uint8 exponents of MXFP4, float32 of NVFP4."""
    groups = matrix.shape[-1] // scheme.group
    begin, end = tile.row_begin * groups, tile.row_end * groups
    numbers = _fp4_scales(scheme, begin, end, read)
    if bool(numbers.isnan().any()):
        raise ValueError(f"tensor {matrix.name} has scales that are not numbers")
    if not scheme.is_nv:
        numbers = read(StoredPart.SCALE, begin, end).view(torch.uint8)
    return numbers.view(-1, groups)


_PER_WORD = WORD_BITS // 4

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_VALUES = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
"""Values of 4-bit floats; the highest bit is the sign."""


def _fp4(matrix: PackedMatrix, scheme: Fp4, tile: Tile, read: ReadElements) -> Tensor:
    rows, columns = tile.num_rows, tile.num_columns
    num_octets, groups = columns // 2, columns // scheme.group
    octets = read(StoredPart.WEIGHT, tile.row_begin * num_octets, tile.row_end * num_octets)
    octets = octets.view(rows, num_octets)
    numbers = _fp4_scales(scheme, tile.row_begin * groups, tile.row_end * groups, read).view(rows, groups)
    values = _E2M1_VALUES[_nibbles(octets.view(torch.uint8)).int()]
    return values.mul_(_spread(numbers, scheme.group, columns))


def _fp4_scales(scheme: Fp4, begin: int, end: int, read: ReadElements) -> Tensor:
    """Scales float32 of groups [begin, end)."""
    scales = read(StoredPart.SCALE, begin, end)
    if not scheme.is_nv:
        # bytes are exponents, bias 127
        return scales.view(torch.uint8).view(torch.float8_e8m0fnu).float()
    numbers, last = scales.float(), read(StoredPart.GLOBAL_SCALE, 0, 1)
    return numbers * last if scheme.layout is Fp4Layout.MODELOPT else numbers / last


def _gptq(matrix: PackedMatrix, scheme: Gptq, tile: Tile, read: ReadElements) -> Tensor:
    num_rows, columns = matrix.shape
    per_word, rows = WORD_BITS // scheme.bits, slice(tile.row_begin, tile.row_end)
    first, last = tile.column_begin // per_word, tile.column_end // per_word
    words = read(StoredPart.WEIGHT, first * num_rows, last * num_rows).view(-1, num_rows)
    values = _codes(_transposed(words[:, rows]), scheme.bits).float()
    groups = _num_blocks(columns, scheme.group)
    index = _ordered_groups(tile, scheme.group)
    if scheme.has_group_index:
        given = read(StoredPart.GROUP_INDEX, tile.column_begin, tile.column_end)
        index = index if (groups_of := _group_index(matrix, given, groups)) is None else groups_of
    begin, end = int(index.min()), int(index.max()) + 1
    packed = read(StoredPart.ZERO_POINT, begin * num_rows // per_word, end * num_rows // per_word)
    zeros = _codes(packed.view(end - begin, -1), scheme.bits)[:, rows].t().float() + scheme.zero_offset
    scales = read(StoredPart.SCALE, begin * num_rows, end * num_rows).view(-1, num_rows)[:, rows].t().float()
    index = index - begin
    return values.sub_(zeros[:, index]).mul_(scales[:, index])


def _ordered_groups(tile: Tile, group: int) -> Tensor:
    """The group of each column of a tile."""
    columns = torch.arange(tile.column_begin, tile.column_end)
    return columns // group if group else torch.zeros_like(columns)


_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in a word of each of eight outputs."""


def _awq(matrix: PackedMatrix, scheme: Awq, tile: Tile, read: ReadElements) -> Tensor:
    num_rows = matrix.shape[0]
    rows, num_words = slice(tile.row_begin, tile.row_end), num_rows // 8
    words = read(StoredPart.WEIGHT, tile.column_begin * num_words, tile.column_end * num_words)
    values = _awq_codes(words.view(-1, num_words), rows).float()
    index = _ordered_groups(tile, scheme.group)
    begin, end = int(index[0]), int(index[-1]) + 1
    packed = read(StoredPart.ZERO_POINT, begin * num_words, end * num_words)
    zeros = _awq_codes(packed.view(-1, num_words), rows).float()
    scales = read(StoredPart.SCALE, begin * num_rows, end * num_rows).view(-1, num_rows)[:, rows].float()
    index = index - begin
    return values.sub_(zeros[index]).mul_(scales[index]).t()


def _awq_codes(words: Tensor, rows: slice) -> Tensor:
    """The numbers of some outputs, uint8 [in, rows]."""
    first, last = rows.start // 8, -(-rows.stop // 8)
    codes = _codes(words[:, first:last].contiguous(), 4).view(len(words), -1, 8)
    ordered = codes[..., _AWQ_PLACES].flatten(1)
    return ordered[:, rows.start - first * 8 : rows.stop - first * 8]


def _nf4(matrix: PackedMatrix, scheme: Nf4, tile: Tile, read: ReadElements) -> Tensor:
    """Blocks go over the ends of rows."""
    columns = tile.num_columns
    begin, end = tile.row_begin * columns, tile.row_end * columns
    octets = read(StoredPart.WEIGHT, begin // 2, end // 2)
    codes = torch.stack((octets >> 4, octets & 15), dim=-1).flatten()
    values = read(StoredPart.VALUES, 0, 16)[codes.int()]
    first, last = begin // NF4_BLOCK, -(-end // NF4_BLOCK)
    scales = _nf4_scales(matrix, scheme, first, last, read).repeat_interleave(NF4_BLOCK)
    offset = begin - first * NF4_BLOCK
    return values.mul_(scales[offset : offset + len(values)]).view(tile.num_rows, columns)


def _nf4_scales(matrix: PackedMatrix, scheme: Nf4, first: int, last: int, read: ReadElements) -> Tensor:
    """Scales of blocks [first, last)."""
    state = _nf4_state(matrix, scheme, read)
    scales = read(StoredPart.SCALE, first, last)
    if not scheme.is_nested:
        return scales
    begin, end = first // NF4_NESTED_BLOCK, -(-last // NF4_NESTED_BLOCK)
    nested = read(StoredPart.NESTED_SCALE, begin, end).repeat_interleave(NF4_NESTED_BLOCK)
    offset = first - begin * NF4_NESTED_BLOCK
    values = read(StoredPart.NESTED_VALUES, 0, 256)[scales.int()]
    return values * nested[offset : offset + len(values)] + float(state["nested_offset"])


def _nf4_state(matrix: PackedMatrix, scheme: Nf4, read: ReadElements) -> dict[str, Any]:
    """The JSON beside the matrix, checked against the config. Raises BadHeader."""
    name = matrix.parts[StoredPart.STATE].name
    state: dict[str, Any] = parse_json_object(
        read(StoredPart.STATE, 0, -1).numpy().tobytes(), name, BadHeader
    )
    expected: dict[str, object] = {
        "quant_type": "nf4",
        "blocksize": NF4_BLOCK,
        "shape": list(matrix.shape),
    }
    if scheme.is_nested:
        expected |= {"nested_blocksize": NF4_NESTED_BLOCK}
    for key, value in expected.items():
        if state.get(key) != value:
            raise BadHeader(f"tensor {name} has {key} {state.get(key)!r:.80}, expected {value!r}")
    if scheme.is_nested and not isinstance(state.get("nested_offset"), float | int):
        raise BadHeader(f"tensor {name} has nested_offset {state.get('nested_offset')!r:.80}, not a number")
    return state


def _blocks(matrix: PackedMatrix, scheme: Blocks, tile: Tile, read: ReadElements) -> Tensor:
    dtype = scheme.dtype
    row_bytes = tile.num_columns // dtype.num_elements * dtype.num_bytes
    octets = read(StoredPart.WEIGHT, tile.row_begin * row_bytes, tile.row_end * row_bytes)
    return block_values(dtype, octets.view(-1, dtype.num_bytes)).view(tile.num_rows, tile.num_columns)


_UNPACKERS: dict[type, Callable[[PackedMatrix, Any, Tile, ReadElements], Tensor]] = {
    Scaled: _scaled,
    PackedInts: _packed_ints,
    Fp4: _fp4,
    Gptq: _gptq,
    Awq: _awq,
    Nf4: _nf4,
    Blocks: _blocks,
}


def num_rows(matrix: PackedMatrix) -> int:
    """Rows of `matrix`, with the dimensions before the last one flattened."""
    return prod(matrix.shape[:-1])
