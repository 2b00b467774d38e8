"""Matrices of 4 and 8 bits as products on a GPU read them: rounded from 16 bits, or as a checkpoint has them.

See `triton_kernels.nibble_products` and `triton_kernels.byte_products`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import torch
from torch import Tensor

from checkpoint.dtypes import INT4_GROUP
from checkpoint.held import HeldBytes, HeldNibbles, HeldPlan
from checkpoint.quantization import PackedMatrix, Scaled, StoredPart
from stage_worker.model.quantize import int4_groups, int8_rows
from stage_worker.model.unpack import (
    ReadElements,
    Tile,
    is_stored_by_row,
    nibble_codes,
    num_rows,
    stored_groups,
    stored_index,
    tiles,
)
from stage_worker.model.weight_reads import WeightPiece

_QUANTIZED_ROWS = 4096
"""Rows whose codes are made or packed at a time."""


@dataclass(slots=True, eq=False, kw_only=True)
class NibbleMatrix:
    """A matrix [rows, columns] of 4-bit codes q: (q - zero) * scale + offset for each row and group.

    If its plan `is_float`, q is the value of a code of E2M1, and the zero is 0.

    Attributes:
        plan: Its sizes.
        codes: uint8 [rows, `plan.row_bytes`]: byte i of a run has column i in its low bits and column
            `plan.half` + i in its high ones.
        scales: [groups, rows], of any dtype of floats, or uint8 of E8M0 if the plan `has_exponents`.
        zeros: uint8 [groups, rows]; None for 8 everywhere, or for floats.
        offsets: [groups, rows]; None for 0 everywhere.
        order: int32 [experts, columns], the element of the input for each column; None if all are in order.
        ordered: Experts whose order is known, while it is loaded.
    """

    plan: HeldNibbles
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    offsets: Tensor | None = None
    order: Tensor | None = None
    ordered: set[int] = field(default_factory=set)

    @classmethod
    def empty(cls, plan: HeldNibbles, device: torch.device) -> Self:
        """Uninitialised, with scales of float32 or exponents; `order` comes with the codes."""
        of_groups, of_scales = (plan.num_groups, plan.rows), torch.float32
        if plan.has_exponents:
            of_scales = torch.uint8
        zeros = torch.empty(of_groups, dtype=torch.uint8, device=device) if plan.has_zeros else None
        return cls(
            plan=plan,
            codes=torch.empty((plan.rows, plan.row_bytes), dtype=torch.uint8, device=device),
            scales=torch.empty(of_groups, dtype=of_scales, device=device),
            zeros=zeros,
        )

    def by_row(self) -> list[Tensor]:
        """Views whose first dimension are rows: of all that belongs to a row."""
        of_groups = (one for one in (self.scales, self.zeros, self.offsets) if one is not None)
        return [self.codes, *(one.t() for one in of_groups)]

    @classmethod
    def quantized(cls, weight: Tensor) -> Self:
        """Round `weight` [rows, columns], or [experts, rows, columns], as `--quantize int4` does, see
        `quantize`.
        """
        experts, weight = _stacked(weight)
        plan = HeldNibbles(rows=len(weight), columns=weight.shape[1], group=INT4_GROUP, experts=experts)
        codes = weight.new_empty(plan.rows, plan.row_bytes, dtype=torch.uint8)
        scales, offsets = (weight.new_empty(plan.num_groups, plan.rows) for _ in range(2))
        for begin in range(0, plan.rows, _QUANTIZED_ROWS):
            rows = slice(begin, begin + _QUANTIZED_ROWS)
            found, scale, offset = int4_groups(weight[rows])
            codes[rows].copy_(packed_nibbles(found, plan.half))
            scales[:, rows].copy_(scale.t())
            offsets[:, rows].copy_(offset.t())
        return cls(plan=plan, codes=codes, scales=scales, offsets=offsets)


def _stacked(weight: Tensor) -> tuple[int, Tensor]:
    """The number of matrices in `weight`, and all their rows."""
    return (len(weight), weight.flatten(0, 1)) if weight.dim() == 3 else (1, weight)


def packed_nibbles(codes: Tensor, half: int) -> Tensor:
    """Codes uint8 [rows, columns] up to 15 as bytes in runs, see `NibbleMatrix`; padded with zeros."""
    rows, columns = codes.shape
    missing = -columns % (2 * half)
    if missing:
        codes = torch.cat((codes, codes.new_zeros(rows, missing)), dim=1)
    low, high = codes.view(rows, -1, 2, half).unbind(2)
    return (low | (high << 4)).flatten(1)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ByteMatrix:
    """A matrix [rows, columns] of one byte a weight: a value times the scale of its block.

    Attributes:
        plan: Its sizes.
        codes: uint8 [rows, columns]: bytes of float8_e4m3fn without NaN if `plan.is_fp8`, else of int8.
        scales: [blocks of a row, blocks of a column], of any dtype.
    """

    plan: HeldBytes
    codes: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, plan: HeldBytes, device: torch.device) -> Self:
        """Uninitialised, with float32 scales."""
        of_blocks = (plan.num_blocks, plan.num_row_blocks)
        return cls(
            plan=plan,
            codes=torch.empty((plan.rows, plan.columns), dtype=torch.uint8, device=device),
            scales=torch.empty(of_blocks, dtype=torch.float32, device=device),
        )

    def by_row(self) -> list[Tensor]:
        """Views whose first dimension are rows: of all that belongs to a row."""
        assert self.plan.height == 1, "rows share scales"
        return [self.codes, self.scales.t()]

    @classmethod
    def quantized(cls, weight: Tensor) -> Self:
        """As `NibbleMatrix.quantized`, for `--quantize int8`."""
        experts, weight = _stacked(weight)
        rows, columns = weight.shape
        plan = HeldBytes(rows=rows, columns=columns, height=1, width=0, is_fp8=False, experts=experts)
        codes = weight.new_empty(rows, columns, dtype=torch.uint8)
        scales = weight.new_empty(1, rows)
        for begin in range(0, rows, _QUANTIZED_ROWS):
            part = slice(begin, begin + _QUANTIZED_ROWS)
            found, scale = int8_rows(weight[part])
            codes[part].copy_(found.view(torch.uint8))
            scales[0, part].copy_(scale)
        return cls(plan=plan, codes=codes, scales=scales)


HeldMatrix = NibbleMatrix | ByteMatrix


def empty_matrix(plan: HeldPlan, device: torch.device) -> HeldMatrix:
    """An uninitialised matrix for `held_load`."""
    if isinstance(plan, HeldNibbles):
        return NibbleMatrix.empty(plan, device)
    return ByteMatrix.empty(plan, device)


@dataclass(frozen=True, slots=True, eq=False)
class HeldRows:
    """Rows [begin, end) of a matrix: one tensor of a checkpoint."""

    matrix: HeldMatrix
    begin: int
    end: int


_NAN = 0x7F
"""The bits of a NaN of fp8 without its sign."""
_CHECKED = 1 << 16
"""Elements that are checked at a time: larger temporaries would stay with the thread of a reader."""

ReadInto = Callable[[StoredPart, int, Tensor], None]
"""Fill memory, uint8 and contiguous, with the bytes of elements from the given one on."""


class HeldLoad(ABC):
    """Load of rows of a matrix: `pieces` are filled on the host, then `finish` ends it on the device."""

    has_end: bool = False
    """Whether `finish` does anything; else the pieces of other loads may follow at once."""

    @abstractmethod
    def pieces(self) -> Iterator[WeightPiece]:
        """Pieces of about `max_elements`. Making and filling one raises like `held_load`."""

    def finish(self) -> None:  # noqa: B027  # most loads are done with their pieces
        """Call when all pieces are copied. Raises like `held_load`."""


def held_load(
    matrix: PackedMatrix,
    into: HeldRows,
    read: ReadElements,
    read_into: ReadInto,
    bytes_of: Callable[[int], int],
    *,
    max_elements: int,
) -> HeldLoad:
    """The load of rows from a stored matrix. `bytes_of` is the share of the file of so many more elements.

    4-bit codes of a matrix that is stored by columns take one byte each on the device until all are read.

    Raises:
        BadHeader: Stored values contradict the format.
        ValueError: A weight is not a number, or columns are in an order that no product reads.
    """
    if isinstance(into.matrix, ByteMatrix):
        return _ByteLoad(matrix, into.matrix, into, read, read_into, bytes_of, max_elements)
    load = _RowLoad if is_stored_by_row(matrix) else _ColumnLoad
    return load(matrix, into.matrix, into, read, bytes_of, max_elements)


@dataclass(frozen=True, slots=True, eq=False)
class _ByteLoad(HeldLoad):
    """Bytes are read into their place; the readers look for NaN."""

    matrix: PackedMatrix
    held: ByteMatrix
    into: HeldRows
    read: ReadElements
    read_into: ReadInto
    bytes_of: Callable[[int], int]
    max_elements: int

    def pieces(self) -> Iterator[WeightPiece]:
        rows, columns = self.matrix.shape
        for tile in tiles(self.matrix, 0, rows, max_elements=self.max_elements):
            target = self.held.codes[self.into.begin + tile.row_begin : self.into.begin + tile.row_end]
            fill = partial(self._fill_codes, tile.row_begin * columns)
            yield WeightPiece(target, fill, self.bytes_of(tile.size))
        scales = self._scales()
        first = self.into.begin // self.held.plan.height
        yield _small_piece(self.held.scales[:, first : first + scales.shape[1]], scales)

    def _fill_codes(self, begin: int, memory: Tensor) -> None:
        self.read_into(StoredPart.WEIGHT, begin, memory)
        if not self.held.plan.is_fp8:
            return
        if any(bool(((part & _NAN) == _NAN).any()) for part in torch.split(memory.view(-1), _CHECKED)):
            raise ValueError(f"tensor {self.matrix.name} has weights that are not numbers")

    def _scales(self) -> Tensor:
        """Float32 [blocks of a row, blocks of a column]."""
        assert isinstance(self.matrix.scheme, Scaled), "a matrix of another format"
        height, plan = self.matrix.scheme.block[0], self.held.plan
        scales = self.read(StoredPart.SCALE, 0, -1).float().view(-1, plan.num_blocks)
        if plan.height == 1:
            rows = torch.arange(self.matrix.shape[0])
            scales = scales[rows // height if height else torch.zeros_like(rows)]
        return scales.t()


class _NibbleLoad(HeldLoad):
    """A load of codes of 4 bits, which are packed in the order of the columns."""

    def __init__(
        self,
        matrix: PackedMatrix,
        held: NibbleMatrix,
        into: HeldRows,
        read: ReadElements,
        bytes_of: Callable[[int], int],
        max_elements: int,
    ) -> None:
        self._matrix, self._held, self._into = matrix, held, into
        self._half, self._device = held.plan.half, held.codes.device
        self._read, self._bytes_of = read, bytes_of
        index = stored_index(matrix, read)
        self._order = None if index is None else _order(matrix, held, index)
        _set_order(matrix, held, into, self._order)
        self._tiles = tuple(tiles(matrix, 0, num_rows(matrix), max_elements=max_elements))

    def _group_pieces(self, tile: Tile) -> Iterator[WeightPiece]:
        """Scales and zero points of the rows of a tile."""
        held, groups = self._held, stored_groups(self._matrix, tile, self._read)
        rows = slice(self._into.begin + tile.row_begin, self._into.begin + tile.row_end)
        yield _small_piece(held.scales[:, rows], groups.scales)
        if held.zeros is not None:
            assert groups.zeros is not None, "zero points of another format"
            yield _small_piece(held.zeros[:, rows], groups.zeros)


class _RowLoad(_NibbleLoad):
    """Codes of whole rows are packed for products on the host."""

    def pieces(self) -> Iterator[WeightPiece]:
        for tile in self._tiles:
            yield from self._group_pieces(tile)
            window = self._held.codes[self._into.begin + tile.row_begin : self._into.begin + tile.row_end]
            yield WeightPiece(
                window, partial(self._fill_codes, tile), self._bytes_of(tile.size), is_unpacked=True
            )

    def _fill_codes(self, tile: Tile, memory: Tensor) -> None:
        codes = nibble_codes(self._matrix, tile, self._read)
        if self._order is not None:
            codes = codes[:, self._order.long()]
        memory.copy_(packed_nibbles(codes, self._half))


class _ColumnLoad(_NibbleLoad):
    """Codes are unpacked to one byte each on the host, and packed for products on the device."""

    has_end = True

    def __init__(
        self,
        matrix: PackedMatrix,
        held: NibbleMatrix,
        into: HeldRows,
        read: ReadElements,
        bytes_of: Callable[[int], int],
        max_elements: int,
    ) -> None:
        """Memory for codes is allocated here, before uploads are fenced, see `WeightReads.copy`."""
        super().__init__(matrix, held, into, read, bytes_of, max_elements)
        self._codes = torch.empty(tuple(matrix.shape), dtype=torch.uint8, device=self._device)

    def pieces(self) -> Iterator[WeightPiece]:
        height, width = self._codes.shape
        yield from self._group_pieces(Tile(0, height, 0, width))
        for tile in self._tiles:
            window = self._codes[:, tile.column_begin : tile.column_end]
            fill = partial(self._fill_codes, tile)
            yield WeightPiece(window, fill, self._bytes_of(tile.size), is_unpacked=True)

    def _fill_codes(self, tile: Tile, memory: Tensor) -> None:
        memory.copy_(nibble_codes(self._matrix, tile, self._read))

    def finish(self) -> None:
        held, order = self._held, self._order
        if order is not None:
            order = order.long().to(self._device)
        for begin in range(0, len(self._codes), _QUANTIZED_ROWS):
            chunk = self._codes[begin : begin + _QUANTIZED_ROWS]
            if order is not None:
                chunk = chunk[:, order]
            first = self._into.begin + begin
            held.codes[first : first + len(chunk)].copy_(packed_nibbles(chunk, self._half))


def _small_piece(target: Tensor, values: Tensor) -> WeightPiece:
    """A piece whose `values` are known, and whose bytes in the file count with the codes."""

    def fill(memory: Tensor) -> None:
        memory.copy_(values)

    return WeightPiece(target, fill, 0, is_unpacked=True)


def _order(matrix: PackedMatrix, held: NibbleMatrix, index: Tensor) -> Tensor | None:
    """Columns sorted by their groups `index` int64 [columns]; None if they are. Raises ValueError."""
    plan = held.plan
    width = plan.group or plan.columns
    if not torch.equal(index.bincount(minlength=plan.num_groups), _group_sizes(plan.columns, width)):
        raise ValueError(
            f"tensor {matrix.name} has groups of other sizes than {width} columns, which GPUs do not "
            "multiply by as they are stored: start workers with --kernels plain"
        )
    order = index.argsort(stable=True).int()
    return None if torch.equal(order.long(), torch.arange(plan.columns)) else order


def _group_sizes(columns: int, width: int) -> Tensor:
    return (torch.arange(columns) // width).bincount()


def _set_order(matrix: PackedMatrix, held: NibbleMatrix, into: HeldRows, order: Tensor | None) -> None:
    """Tensors of one stack have one input, so they must have one order. Raises ValueError."""
    plan = held.plan
    first, last = (row * plan.experts // plan.rows for row in (into.begin, into.end - 1))
    if order is not None and held.order is None:
        in_order = torch.arange(plan.columns, dtype=torch.int32, device=held.codes.device)
        held.order = in_order.repeat(plan.experts, 1)
    for expert in range(first, last + 1):
        if expert not in held.ordered:
            held.ordered.add(expert)
            if order is not None and held.order is not None:
                held.order[expert] = order.to(held.order.device)
        elif not _has_order(held, expert, order):
            raise ValueError(
                f"tensor {matrix.name} has its columns in another order of groups than those it is multiplied"
                " with, which GPUs do not do with weights as they are stored: start workers with --kernels"
                " plain"
            )


def _has_order(held: NibbleMatrix, expert: int, order: Tensor | None) -> bool:
    if held.order is None:
        return order is None
    expected = torch.arange(held.plan.columns, dtype=torch.int32) if order is None else order
    return torch.equal(held.order[expert].cpu(), expected)
