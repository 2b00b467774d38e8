"""Rounded copies of the self-check's reference, and routes where rounding decides."""

from __future__ import annotations

import pytest
import torch

from stage_worker.loading.reference_copies import (
    CONTRARY,
    EXACT,
    NUM_COPIES,
    ROUNDED,
    is_among,
    relative_changes,
    round_copies,
    roundings_of,
    routed,
)

RANKS = [9.0, 5.0, 4.0, 1.0]


@pytest.mark.parametrize(
    ("rounded", "contrary"),
    [
        ([9.0, 5.0, 4.0, 1.0], [0, 1]),  # nothing is rounded
        ([9.0, 5.0, 4.0, 1.4], [0, 1]),  # too far for twice 0.4
        ([9.0, 5.0, 4.0, 1.6], [0, 2]),  # within twice 0.6
        ([8.4, 5.0, 4.0, 1.0], [0, 2]),
    ],
)
def test_only_the_contrary_copy_takes_another_route(rounded: list[float], contrary: list[int]) -> None:
    copies = routed(torch.tensor([[RANKS], [rounded], [RANKS]]), 2)
    assert [copy.nonzero()[:, 1].tolist() for copy in copies] == [[0, 1], [0, 1], contrary]


def test_another_route_of_the_contrary_copy_is_not_taken_back() -> None:
    copies = routed(torch.tensor([[RANKS], [[9.0, 4.5, 4.0, 1.0]], [[9.0, 4.0, 5.0, 1.0]]]), 2)
    assert copies[CONTRARY].nonzero()[:, 1].tolist() == [0, 2]


def test_ranks_that_are_left_out_are_never_routed() -> None:
    """Those of groups that are not kept, in one copy or in both."""
    ranks = torch.tensor([[[3.0, 2.0, -torch.inf]], [[3.1, 2.0, -torch.inf]], [[3.0, 2.0, -torch.inf]]])
    assert torch.equal(routed(ranks, 2), is_among(ranks, 2))
    ranks[EXACT, 0, 2] = 1.0
    assert torch.equal(routed(ranks, 2), is_among(ranks, 2))


def test_all_are_routed_where_there_are_no_others() -> None:
    assert routed(torch.randn(NUM_COPIES, 5, 3), 3).all()


def test_ties_of_equal_copies_stay() -> None:
    ranks = torch.tensor([1.0, 2.0, 2.0, 2.0]).expand(NUM_COPIES, 3, 4)
    assert torch.equal(routed(ranks, 2), is_among(ranks, 2))


@pytest.mark.parametrize(("dtype", "digits"), [(torch.bfloat16, 8), (torch.float16, 11), (torch.float32, 19)])
def test_copies_are_rounded_at_different_values(dtype: torch.dtype, digits: int) -> None:
    exact = torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 0.5
    copies = round_copies(exact.expand(NUM_COPIES, -1).clone(), dtype)
    assert torch.equal(copies[EXACT], exact)
    for number in (ROUNDED, CONTRARY):
        changes = (copies[number] / exact - 1).abs()
        assert 0.2 * 2**-digits < float(changes.mean())
        assert float(changes.max()) <= 1.01 * 2**-digits
    assert not torch.equal(copies[ROUNDED], copies[CONTRARY])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_that_are_no_numbers_stay(dtype: torch.dtype) -> None:
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    copies = round_copies(values.expand(NUM_COPIES, -1).clone(), dtype)
    for copy in copies:
        assert torch.equal(copy.nan_to_num(1.0), values.nan_to_num(1.0))


def test_changes_are_fractions_of_the_norm_of_each_token() -> None:
    hidden = torch.tensor([[[3.0, 4.0], [0.0, 1.0]], [[3.0, 4.5], [0.0, 1.0]], [[3.0, 4.0], [0.0, 3.0]]])
    changes = relative_changes(hidden)
    assert changes.tolist() == [[pytest.approx(0.1), 0.0], [0.0, pytest.approx(2.0)]]
    roundings = roundings_of(changes)
    assert roundings.typical.tolist() == [pytest.approx(0.1), 0.0]
    assert roundings.highest.tolist() == [pytest.approx(0.1), pytest.approx(2.0)]
