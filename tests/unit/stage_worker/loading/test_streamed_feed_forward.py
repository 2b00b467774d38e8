"""Experts in the self-check's reference, where rounding may decide which of them a token has."""

from __future__ import annotations

import pytest
import torch

from stage_worker.loading.streamed_feed_forward import choices, is_among

EXACT = torch.tensor([[9.0, 5.0, 4.0, 1.0]])


def chosen(rounded: list[float]) -> tuple[list[int], list[int]]:
    """The two best by exact ranks, and by rounded ones."""
    exact, other = choices(torch.stack((EXACT, torch.tensor([rounded]))), 2)
    return exact.nonzero()[:, 1].tolist(), other.nonzero()[:, 1].tolist()


@pytest.mark.parametrize(
    ("rounded", "others"),
    [
        ([9.0, 5.0, 4.0, 1.0], [0, 1]),  # nothing is rounded
        ([9.0, 5.0, 4.0, 1.4], [0, 1]),  # too far for twice 0.4
        ([9.0, 5.0, 4.0, 1.6], [0, 2]),  # within twice 0.6
        ([8.6, 4.7, 4.0, 1.0], [0, 2]),  # 0.7 is within twice 0.4
        ([9.0, 4.2, 4.3, 1.0], [0, 2]),  # chosen otherwise already: not back
    ],
)
def test_a_near_choice_is_made_otherwise_in_the_rounded_copy(rounded: list[float], others: list[int]) -> None:
    assert chosen(rounded) == ([0, 1], others)


def test_ranks_that_are_left_out_are_never_chosen() -> None:
    """Those of groups that are not kept, in one copy or in both."""
    ranks = torch.tensor([[[3.0, 2.0, -torch.inf]], [[3.1, 2.0, -torch.inf]]])
    assert torch.equal(choices(ranks, 2), is_among(ranks, 2))
    ranks[0, 0, 2] = 1.0
    assert torch.equal(choices(ranks, 2), is_among(ranks, 2))


def test_all_are_chosen_where_there_are_no_others() -> None:
    assert choices(torch.randn(2, 5, 3), 3).all()


def test_ties_of_exact_copies_stay() -> None:
    """In float32 both copies are the same."""
    ranks = torch.tensor([1.0, 2.0, 2.0, 2.0]).expand(2, 3, 4)
    assert torch.equal(choices(ranks, 2), is_among(ranks, 2))
