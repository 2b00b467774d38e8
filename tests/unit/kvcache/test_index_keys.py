"""Keys of indexers are read where they were written, beside the pages that they belong to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcache.pages import IndexKeys, InvalidWrite, KvPages


def make(**changes: Any) -> IndexKeys:
    """Of layers 0 and 2, in 4 blocks of 2 tokens and a spare one."""
    sizes = {"widths": (3, 0, 3), "num_blocks": 4, "block_size": 2, "num_spare": 1} | changes
    return IndexKeys(dtype=torch.float32, device="cpu", **sizes)


def test_keys_are_gathered_by_page_in_the_order_of_tokens() -> None:
    index, keys = make(), torch.arange(12.0).view(4, 3) + 1
    index.write(2, keys, torch.tensor([5, 4, 0, 8]))
    found = index.gather(2, torch.tensor([[2, 0], [4, 2]]))
    zero = torch.zeros(3)
    expected = [[keys[1], keys[0], keys[2], zero], [keys[3], zero, keys[1], keys[0]]]
    assert torch.equal(found, torch.stack([torch.stack(rows) for rows in expected]))
    assert index.gather(0, torch.arange(5)[None]).count_nonzero() == 0


def test_only_chosen_rows_are_stored() -> None:
    index, keys = make(), torch.arange(12.0).view(4, 3) + 1
    index.write(0, keys, torch.tensor([1, 6]), torch.tensor([3, 0]))
    found = index.gather(0, torch.arange(4)[None])[0]
    assert torch.equal(found[[1, 6]], keys[[3, 0]])
    assert found.count_nonzero() == 6


def test_size_and_cleared_pages_are_those_of_the_pages() -> None:
    index = make()
    sizes = {"num_layers": 3, "num_blocks": 4, "block_size": 2, "num_kv_heads": 1, "head_dim": 8}
    pages = KvPages(**sizes, dtype=torch.float32, device="cpu", num_parts=1, num_spare=1, index=index)
    without = KvPages(**sizes, dtype=torch.float32, device="cpu", num_parts=1, num_spare=1)
    assert pages.size_bytes - without.size_bytes == index.size_bytes == 2 * 5 * 2 * 3 * 4
    index.write(0, torch.ones(8, 3), torch.arange(8))
    pages.clear(torch.tensor([1, 3]))
    assert index.gather(0, torch.arange(4)[None])[0, :, 0].tolist() == [1, 1, 0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (torch.zeros(2, 4), r"expected torch.float32 \(2, 3\) on cpu, got torch.float32 \(2, 4\) on cpu"),
        (torch.zeros(3, 3), r"got torch.float32 \(3, 3\)"),
        (torch.zeros(2, 3, dtype=torch.bfloat16), r"got torch.bfloat16 \(2, 3\)"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys: torch.Tensor, message: str) -> None:
    with pytest.raises(InvalidWrite, match=message):
        make().write(0, keys, torch.tensor([0, 1]))


@pytest.mark.parametrize(
    "changes", [{"widths": ()}, {"widths": (0, 0)}, {"widths": (2, 3)}, {"block_size": 0}, {"num_blocks": 0}]
)
def test_sizes_below_one_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        make(**changes)
