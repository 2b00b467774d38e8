"""The sample at one (seed, choice, position) is independent of its neighbours.

Black-box: with equally likely tokens, the sampled token gives the leading digits of its uniform number.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch

from stage_worker.sampling import Sampler
from tests.unit.stage_worker.sampling.draw_statistics import Counts, pairs_p_value
from wire.ids import RequestId, SequenceKey
from wire.sampling import StepSampling
from wire.steps import Decode, Prefill, SliceResult, StartRecord, StepSlice

VOCAB = 16
UNRELATED = 1e-4
RELATED = 1e-12
NUM_SEEDS, NUM_CHOICES, NUM_POSITIONS = 12, 8, 192


def sampled_counts(seeds: Sequence[int], *, num_choices: int, num_positions: int) -> Counts:
    """Tokens [seed, choice, position] of requests decoded together after a prompt of one token."""
    sampler = Sampler(vocab_size=VOCAB, stage=0)
    slices = []
    for number, seed in enumerate(seeds):
        for choice in range(num_choices):
            sequence = SequenceKey(RequestId(number.to_bytes(16)), choice)
            sampler.start(StartRecord(sequence, 0, 1, (0,), StepSampling(temperature=1.0, seed=seed)))
            slices.append(StepSlice(sequence, 0, (0,), Prefill(0, 1, 1)))
    logits = torch.zeros((len(slices), VOCAB))
    steps = []
    for position in range(1, num_positions + 1):
        steps.append([_token(result) for result in sampler.choose(slices, logits)])
        slices = [
            StepSlice(part.sequence, 0, (token,), Decode(position))
            for part, token in zip(slices, steps[-1], strict=True)
        ]
    return np.array(steps, dtype=np.int64).T.reshape(len(seeds), num_choices, num_positions)


def _token(result: SliceResult) -> int:
    assert isinstance(result.outcome, int), result.outcome
    return result.outcome


@cache
def neighbours() -> Counts:
    return sampled_counts(range(NUM_SEEDS), num_choices=NUM_CHOICES, num_positions=NUM_POSITIONS)


def shifted(values: Counts, by: tuple[int, int, int]) -> tuple[Counts, Counts]:
    """Pairs of values `by` apart along the three axes, including negative distances."""
    here = tuple(
        slice(max(-step, 0), size - max(step, 0)) for step, size in zip(by, values.shape, strict=True)
    )
    there = tuple(
        slice(max(step, 0), size - max(-step, 0)) for step, size in zip(by, values.shape, strict=True)
    )
    return values[here], values[there]


@pytest.mark.parametrize(
    "by",
    [
        *((0, 0, lag) for lag in (1, 2, 3, 8, 64)),
        *((0, lag, 0) for lag in (1, 2, 4)),
        *((lag, 0, 0) for lag in (1, 2, 4)),
        # The same sum: a function of it gives both one sample.
        *((1, -1, 0), (1, 0, -1), (0, 1, -1), (1, 1, -2)),
        (1, 1, 1),
    ],
    ids=lambda by: "seed{:+}-choice{:+}-position{:+}".format(*by),
)
def test_draws_of_neighbours_are_unrelated(by: tuple[int, int, int]) -> None:
    assert pairs_p_value(*shifted(neighbours(), by), VOCAB) > UNRELATED


@pytest.mark.parametrize(
    "bits", [(0, 1, 2, 3), (16, 31, 32, 33), (48, 61, 62, 63)], ids=["low", "middle", "high"]
)
def test_draws_of_seeds_that_differ_in_one_bit_are_unrelated(bits: tuple[int, ...]) -> None:
    base = np.random.default_rng(bits).integers(0, 2**64, 8, dtype=np.uint64).tolist()
    of_base = sampled_counts(base, num_choices=2, num_positions=128)
    for bit in bits:
        of_others = sampled_counts([seed ^ (1 << bit) for seed in base], num_choices=2, num_positions=128)
        assert pairs_p_value(of_base, of_others, VOCAB) > UNRELATED, bit


def test_the_order_of_seed_choice_and_position_matters() -> None:
    values = neighbours()
    size = min(values.shape)
    cube = values[:size, :size, :size]
    for axes in ((1, 0, 2), (0, 2, 1), (2, 1, 0)):
        differs = cube != cube.transpose(axes)
        distinct = differs.size - size**2  # on a diagonal both are the same sample
        assert abs(int(differs.sum()) / distinct - (1 - 1 / VOCAB)) < 0.06


def test_a_relation_would_be_noticed() -> None:
    """Numbers in equal steps are uniform but dependent; so is a repeated sample."""
    counter = np.arange(NUM_SEEDS * NUM_CHOICES * NUM_POSITIONS).reshape(neighbours().shape)
    rotating = (counter * 0.6180339887498949 % 1.0 * VOCAB).astype(np.int64)
    assert pairs_p_value(*shifted(rotating, (0, 0, 1)), VOCAB) < RELATED
    assert pairs_p_value(neighbours(), neighbours(), VOCAB) < RELATED
