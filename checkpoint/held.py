"""Sizes of matrices that a stage on a GPU holds in 4 or 8 bits, and which of a quantised checkpoint's can be.

`stage_worker.model.held_matrices` has their tensors, Triton kernels multiply by them as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOAT_BYTES = 4
"""Scales of stored formats are float32 in memory, whatever the file has: exact for each of them."""
_ORDER_BYTES = 4
LEAST_GROUP = 16
"""Columns of the smallest product of a tensor core: groups and blocks must be multiples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldNibbles:
    """4 bits a weight: groups of `group` columns of a row share a scale (0: all columns), and a zero point
    of one byte if it `has_zeros`. With `has_order`, columns are sorted by their groups.
    """

    rows: int
    columns: int
    group: int
    has_zeros: bool = False
    has_order: bool = False

    def __post_init__(self) -> None:
        assert self.group % LEAST_GROUP == 0, "products of parts of tiles"

    @property
    def half(self) -> int:
        """Columns in the low bits of a run of bytes, whose high bits have as many more; of one group."""
        return 64 if self.group % 64 == 0 else 32 if self.group % 32 == 0 else LEAST_GROUP

    @property
    def num_groups(self) -> int:
        return -(-self.columns // self.group) if self.group else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of the codes of a row, in whole runs."""
        return -(-self.columns // (2 * self.half)) * self.half

    @property
    def num_bytes(self) -> int:
        """Size in memory with float32 scales."""
        of_group = FLOAT_BYTES + self.has_zeros
        order = self.columns * _ORDER_BYTES if self.has_order else 0
        return self.rows * (self.row_bytes + self.num_groups * of_group) + order


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """One byte a weight, fp8 (E4M3) or int8: blocks of `height` rows and `width` columns share a scale; a
    `width` of 0 has all columns.
    """

    rows: int
    columns: int
    height: int
    width: int
    is_fp8: bool

    def __post_init__(self) -> None:
        assert self.width % LEAST_GROUP == 0, "products of parts of tiles"
        assert self.height >= 1

    @property
    def num_blocks(self) -> int:
        """Blocks of a row."""
        return -(-self.columns // self.width) if self.width else 1

    @property
    def num_row_blocks(self) -> int:
        """Blocks of a column."""
        return -(-self.rows // self.height)

    @property
    def num_bytes(self) -> int:
        """Size in memory with float32 scales."""
        return self.rows * self.columns + self.num_blocks * self.num_row_blocks * FLOAT_BYTES


HeldPlan = HeldNibbles | HeldBytes
