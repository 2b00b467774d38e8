"""Matrices of 4 and 8 bits as products on a GPU read them: rounded from 16 bits, or as a checkpoint has them.

See `triton_kernels.nibble_products` and `triton_kernels.byte_products`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from checkpoint.dtypes import INT4_GROUP
from checkpoint.held import HeldBytes, HeldNibbles, HeldPlan
from checkpoint.quantization import PackedMatrix, Scaled, StoredPart
from stage_worker.model.quantize import int4_groups, int8_rows
from stage_worker.model.unpack import ReadElements, nibble_codes, stored_groups, tiles

_QUANTIZED_ROWS = 4096
"""Rows whose codes are made or packed at a time."""


@dataclass(slots=True, eq=False, kw_only=True)
class NibbleMatrix:
    """A matrix [rows, columns] of 4-bit codes q: (q - zero) * scale + offset for each row and group.

    Attributes:
        plan: Its sizes.
        codes: uint8 [rows, `plan.row_bytes`]: byte i of a run has column i in its low bits and column
            `plan.half` + i in its high ones.
        scales: [groups, rows], of any dtype.
        zeros: uint8 [groups, rows]; None for 8 everywhere.
        offsets: [groups, rows]; None for 0 everywhere.
        order: int32 [columns], the element of the input for each column; None if in order.
        num_loaded: Rows with codes, while it is loaded.
    """

    plan: HeldNibbles
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    offsets: Tensor | None = None
    order: Tensor | None = None
    num_loaded: int = 0

    @classmethod
    def empty(cls, plan: HeldNibbles, device: torch.device) -> Self:
        """Uninitialised, with float32 scales; `order` comes with the codes."""
        of_groups = (plan.num_groups, plan.rows)
        zeros = torch.empty(of_groups, dtype=torch.uint8, device=device) if plan.has_zeros else None
        return cls(
            plan=plan,
            codes=torch.empty((plan.rows, plan.row_bytes), dtype=torch.uint8, device=device),
            scales=torch.empty(of_groups, dtype=torch.float32, device=device),
            zeros=zeros,
        )

    def by_row(self) -> list[Tensor]:
        """Views whose first dimension are rows: of all that belongs to a row."""
        of_groups = (one for one in (self.scales, self.zeros, self.offsets) if one is not None)
        return [self.codes, *(one.t() for one in of_groups)]

    @classmethod
    def quantized(cls, weight: Tensor) -> Self:
        """Round `weight` [rows, columns] as `--quantize int4` does, see `quantize`."""
        plan = HeldNibbles(rows=weight.shape[0], columns=weight.shape[1], group=INT4_GROUP)
        codes = weight.new_empty(plan.rows, plan.row_bytes, dtype=torch.uint8)
        scales, offsets = (weight.new_empty(plan.num_groups, plan.rows) for _ in range(2))
        for begin in range(0, plan.rows, _QUANTIZED_ROWS):
            rows = slice(begin, begin + _QUANTIZED_ROWS)
            found, scale, offset = int4_groups(weight[rows])
            codes[rows].copy_(packed_nibbles(found, plan.half))
            scales[:, rows].copy_(scale.t())
            offsets[:, rows].copy_(offset.t())
        return cls(plan=plan, codes=codes, scales=scales, offsets=offsets)


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
        """Round `weight` [rows, columns] as `--quantize int8` does, see `quantize`."""
        rows, columns = weight.shape
        plan = HeldBytes(rows=rows, columns=columns, height=1, width=0, is_fp8=False)
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
    """An uninitialised matrix for `load_held`."""
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


def load_held(
    matrix: PackedMatrix, into: HeldRows, read: ReadElements, *, max_elements: int
) -> Iterator[int]:
    """Fill rows from a stored matrix; yields the number of elements read, about `max_elements` at a time.

    Codes of 4 bits take one byte each on the device until all are read.

    Raises:
        BadHeader: Stored values contradict the format.
        ValueError: A weight is not a number, or columns are in an order that no product reads.
    """
    if isinstance(into.matrix, ByteMatrix):
        yield from _load_bytes(matrix, into.matrix, into, read, max_elements)
    else:
        yield from _load_nibbles(matrix, into.matrix, into, read, max_elements)


def _load_bytes(
    matrix: PackedMatrix, held: ByteMatrix, into: HeldRows, read: ReadElements, max_elements: int
) -> Iterator[int]:
    rows, columns = matrix.shape
    for tile in tiles(matrix, 0, rows, max_elements=max_elements):
        elements = read(StoredPart.WEIGHT, tile.row_begin * columns, tile.row_end * columns)
        codes = elements.view(torch.uint8).view(tile.num_rows, columns)
        if held.plan.is_fp8 and bool(((codes & _NAN) == _NAN).any()):
            raise ValueError(f"tensor {matrix.name} has weights that are not numbers")
        held.codes[into.begin + tile.row_begin : into.begin + tile.row_end].copy_(codes)
        yield tile.size
    _load_scales(matrix, held, into, read)


def _load_scales(matrix: PackedMatrix, held: ByteMatrix, into: HeldRows, read: ReadElements) -> None:
    assert isinstance(matrix.scheme, Scaled), "a matrix of another format"
    height, plan = matrix.scheme.block[0], held.plan
    scales = read(StoredPart.SCALE, 0, -1).float().view(-1, plan.num_blocks)
    if plan.height == 1:
        rows = torch.arange(matrix.shape[0])
        scales = scales[rows // height if height else torch.zeros_like(rows)]
    first = into.begin // plan.height
    held.scales[:, first : first + len(scales)].copy_(scales.t())


def _load_nibbles(
    matrix: PackedMatrix, held: NibbleMatrix, into: HeldRows, read: ReadElements, max_elements: int
) -> Iterator[int]:
    rows, columns = matrix.shape
    groups = stored_groups(matrix, read)
    part = slice(into.begin, into.end)
    held.scales[:, part].copy_(groups.scales)
    if held.zeros is not None:
        assert groups.zeros is not None, "zero points of another format"
        held.zeros[:, part].copy_(groups.zeros)
    order = None if groups.index is None else _order(matrix, held, groups.index)
    codes = torch.empty((rows, columns), dtype=torch.uint8, device=held.codes.device)
    for tile in tiles(matrix, 0, rows, max_elements=max_elements):
        window = codes[tile.row_begin : tile.row_end, tile.column_begin : tile.column_end]
        window.copy_(nibble_codes(matrix, tile, read))
        yield tile.size
    _set_order(matrix, held, into, order)
    for begin in range(0, rows, _QUANTIZED_ROWS):
        chunk = codes[begin : begin + _QUANTIZED_ROWS]
        if held.order is not None:
            chunk = chunk[:, held.order.long()]
        first = into.begin + begin
        held.codes[first : first + len(chunk)].copy_(packed_nibbles(chunk, held.plan.half))


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
    if held.num_loaded == 0:
        held.order = None if order is None else order.to(held.codes.device)
    elif (order is None) != (held.order is None) or (
        order is not None and held.order is not None and not torch.equal(order, held.order.cpu())
    ):
        raise ValueError(
            f"tensor {matrix.name} has its columns in another order of groups than those it is multiplied "
            "with, which GPUs do not do with weights as they are stored: start workers with --kernels plain"
        )
    held.num_loaded += into.end - into.begin
