"""Rows beside pages: layers have numbers and widths of their own."""

from __future__ import annotations

import pytest
import torch

from kvcache.layer_rows import LayerRows


def new_rows() -> LayerRows:
    return LayerRows({1: (4, 3), 5: (1, 2)}, num_blocks=6, dtype=torch.bfloat16, device="cpu", num_spare=1)


def test_rows_are_found_by_slot_and_by_page() -> None:
    rows = new_rows()
    written = torch.arange(9).view(3, 3).bfloat16()
    rows.write(1, written, torch.tensor([4, 23, 0]))  # row 0 of block 1, row 3 of block 5, row 0 of block 0
    assert torch.equal(rows.at(1, torch.tensor([[23, 4]])), written[[1, 0]][None])
    gathered = rows.gather(1, torch.tensor([[5, 0], [1, 2]]))
    assert gathered.shape == (2, 8, 3)
    assert torch.equal(gathered[0, [3, 4]], written[1:])
    assert torch.equal(gathered[1, 0], written[0])
    assert int(gathered.count_nonzero()) == 8


def test_layers_do_not_share_rows_and_are_cleared_together() -> None:
    rows = new_rows()
    assert (rows.rows_per_block(1), rows.rows_per_block(5)) == (4, 1)
    rows.fill(7.0, torch.arange(6))
    rows.clear(torch.tensor([2, 3]))
    for layer in (1, 5):
        by_block = rows.gather(layer, torch.arange(6)[:, None]).flatten(1)
        assert [bool(block.any()) for block in by_block] == [True, True, False, False, True, True]


def test_spare_blocks_count_as_memory() -> None:
    assert new_rows().size_bytes == 2 * 7 * (4 * 3 + 1 * 2)


@pytest.mark.parametrize("shapes", [{}, {0: (0, 4)}, {0: (4, 0)}])
def test_rows_of_nothing_are_refused(shapes: dict[int, tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        LayerRows(shapes, num_blocks=2, dtype=torch.float32, device="cpu")
