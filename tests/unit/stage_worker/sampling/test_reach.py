"""The edge of a given mass is the same whether a row is sorted or added up in bins."""

import pytest
import torch
from torch import Tensor

from stage_worker.sampling import reach as reach_module
from stage_worker.sampling.reach import Edge, reach

WIDTH = 3000


def edge_by_hand(keys: Tensor, masses: Tensor, target: float) -> tuple[float, float, int]:
    """Of one row: key, mass below it and number of equals, one token after the other."""
    order = sorted(range(len(keys)), key=lambda index: float(keys[index]))
    below = reached = 0.0
    for index in order:
        reached += float(masses[index])
        if reached >= target:
            key = float(keys[index])
            below = sum(float(masses[other]) for other in order if float(keys[other]) < key)
            return key, below, sum(float(each) == key for each in keys)
    raise AssertionError("the target is above the whole mass")


def found(edge: Edge, row: int) -> tuple[float, float, int]:
    return float(edge.key[row]), float(edge.mass_below[row]), int(edge.num_equal[row])


@pytest.mark.parametrize("span", [0.01, 10.0, 1e6, 1e-38])
@pytest.mark.parametrize("step", [0.0, 0.01, 0.5], ids=["all-different", "some-equal", "many-equal"])
def test_edges_are_those_of_a_walk_in_the_order_of_the_keys(step: float, span: float) -> None:
    """Wherever the bins lie."""
    generator = torch.Generator().manual_seed(0)
    keys = 3 * torch.rand((4, WIDTH), generator=generator)
    keys = (keys / step).round() * step if step else keys
    keys[:, ::17] = torch.inf
    masses = torch.rand((4, WIDTH), generator=generator, dtype=torch.float64) * torch.isfinite(keys)
    masses[:, ::3] = 0.0
    targets = masses.sum(dim=-1, keepdim=True) * torch.tensor([[0.02], [0.5], [0.9], [0.9999]])
    lowest, spans = keys.amin(dim=-1, keepdim=True), torch.full((4, 1), span, dtype=torch.float64)
    edge = reach(keys, masses, targets, lowest=lowest, span=spans)
    for row in range(4):
        key, below, equals = edge_by_hand(keys[row], masses[row], float(targets[row]))
        assert found(edge, row) == (key, pytest.approx(below), equals)


@pytest.mark.parametrize("sorted_up_to", [10, WIDTH])
def test_a_target_that_rounding_puts_above_the_whole_mass_is_reached_at_the_end(
    sorted_up_to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach_module, "_SORTED_UP_TO", sorted_up_to)
    keys = torch.arange(100.0)[None]
    masses = torch.full((1, 100), 0.1, dtype=torch.float64)
    one = torch.ones((1, 1), dtype=torch.float64)
    edge = reach(keys, masses, masses.cumsum(dim=-1)[:, -1:] * (1 + 1e-15), lowest=0 * one, span=50 * one)
    assert float(edge.key) == 99.0
