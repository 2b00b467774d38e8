"""Choice of blocks: the best whole blocks that a query sees, and the tokens after them."""

from __future__ import annotations

import pytest
import torch

from checkpoint.block_indexer import BlockIndexer
from stage_worker.model.block_indexer import mask_of_others
from stage_worker.model.indexer import IndexQueries

PLAN = BlockIndexer(num_heads=2, head_dim=4, block_size=3, top_blocks=2, norm_eps=1e-6)


def queries_of(heads: torch.Tensor) -> IndexQueries:
    return IndexQueries(heads, torch.ones(heads.shape[:2]))


def visible_by_formula(scores: torch.Tensor, position: int) -> set[int]:
    """Tokens that a query with `scores` of all blocks attends to; of equal scores the first one counts."""
    whole = (position + 1) // PLAN.block_size
    best = sorted(range(whole), key=lambda block: (-float(scores[block]), block))[: PLAN.top_blocks]
    chosen = {block * PLAN.block_size + offset for block in best for offset in range(PLAN.block_size)}
    return chosen | set(range(whole * PLAN.block_size, position + 1))


@pytest.mark.parametrize("num_keys", [15, 16, 17])
@pytest.mark.parametrize("is_shared", [True, False])
def test_each_query_sees_its_best_blocks_and_its_last_tokens(num_keys: int, is_shared: bool) -> None:
    """Queries of several sequences have keys of their own. Some scores are equal: zero."""
    torch.manual_seed(num_keys)
    positions = torch.arange(num_keys)
    heads = torch.randn(num_keys, 2, 4)
    keys = torch.randn(1 if is_shared else num_keys, num_keys // 3, 4)
    mask = mask_of_others(PLAN, queries_of(heads), keys, positions, num_keys)
    scores = torch.einsum("nhd,nbd->nhb", heads, keys.expand(num_keys, -1, -1)).relu().sum(1)
    seen_less = 0
    for position, row, own in zip(positions.tolist(), mask, scores, strict=True):
        seen = {token for token in range(position + 1) if row[token] == 0}
        assert seen == visible_by_formula(own, position)
        assert set(row.tolist()) <= {0.0, float("-inf")}
        seen_less += len(seen) <= position
    assert seen_less > num_keys // 3


def test_a_block_that_a_query_sees_in_part_is_not_scored() -> None:
    """Its mean has tokens after the query."""
    keys = torch.ones(1, 4, 4)
    keys[0, 3] = 100.0
    keys[0, 2] = float("nan")  # of pages that hold nothing yet
    heads, positions = torch.ones(1, 2, 4), torch.tensor([7])
    mask = mask_of_others(PLAN, queries_of(heads), keys, positions, 12)
    assert mask[0, :8].tolist() == [0.0] * 8


def test_a_score_that_is_not_a_number_is_chosen() -> None:
    keys = torch.ones(1, 4, 4)
    keys[0, 3] = float("nan")
    mask = mask_of_others(PLAN, queries_of(torch.ones(1, 2, 4)), keys, torch.tensor([12]), 13)
    assert [token for token in range(13) if mask[0, token] == 0] == [0, 1, 2, 9, 10, 11, 12]
