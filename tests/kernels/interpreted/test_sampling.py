"""The tokens of the sampling kernels are those of a CPU, and rows are open for a reason only."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from stage_worker.model.triton_kernels import sampling as kernels
from stage_worker.sampling import Sampler
from stage_worker.sampling.random_choice import Draw, argmax_rows, choose_random, uniform_samples
from stage_worker.sampling.step_rows import NOT_FINITE, OPEN
from tests.sampled import STAGE, Row, decode, key, start_record
from wire.sampling import StepSampling
from wire.steps import SliceResult, Step

pytestmark = pytest.mark.kernels

Maker = Callable[[int, int, int], Tensor]
"""Makes scores [rows, vocab_size] with a seed."""
SAMPLINGS: tuple[Mapping[str, float], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.1},
    {"temperature": 100.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 2.0, "top_k": 256},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.6, "top_p": 0.3},
    {"temperature": 3.0, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.3, "top_p": 0.95, "min_p": 0.1},
)
ALWAYS_CERTAIN = [one for one in SAMPLINGS if one["temperature"] < 100.0]
"""But for numbers on an edge: few enough tokens are kept."""


class Batch:
    """Rows with the tokens that a CPU samples from `scores`, which may be masked."""

    def __init__(self, scores: Tensor, draws: Sequence[Draw]) -> None:
        self.scores, self.draws = scores, draws
        self.vocab_size = scores.shape[-1]

    @classmethod
    def drawn(cls, scores: Tensor, seed: int, samplings: Sequence[Mapping[str, float]] = SAMPLINGS) -> Batch:
        numbers = random.Random(seed)
        return cls(
            scores,
            [
                Draw(
                    StepSampling(seed=numbers.randrange(2**64), **numbers.choice(samplings)),  # type: ignore[arg-type]
                    numbers.randrange(4),
                    numbers.randrange(2**20),
                )
                for _ in scores
            ],
        )

    def expected(self) -> Tensor:
        maxima, tokens = argmax_rows(self.scores)
        rows = [row for row, draw in enumerate(self.draws) if draw.is_random]
        if rows:
            tokens[rows] = choose_random(self.scores[rows], maxima[rows], [self.draws[row] for row in rows])
        return tokens

    def found(self, shares: Sequence[float] | None = None) -> Tensor:
        """By kernels; `shares` replace the uniform numbers."""
        samplings = [draw.sampling for draw in self.draws]
        reals = np.array(
            [
                [one.temperature for one in samplings],
                [one.top_p for one in samplings],
                [one.min_p for one in samplings],
                uniform_samples(self.draws) if shares is None else shares,
            ]
        )
        top_k = [min(one.top_k or self.vocab_size, self.vocab_size) for one in samplings]
        is_masked = self.scores.isneginf()
        logits = self.scores.masked_fill(is_masked, 0.0) if bool(is_masked.any()) else self.scores
        return kernels.choose(logits, self.scores, torch.from_numpy(reals), torch.tensor(top_k))

    def open_rows(self) -> list[int]:
        """Rows that are left open; the others have the tokens of a CPU."""
        found, expected = self.found(), self.expected()
        is_open = found == OPEN
        assert found[~is_open].tolist() == expected[~is_open].tolist()
        rows: list[int] = is_open.nonzero()[:, 0].tolist()
        return rows


def peaked(num_rows: int, vocab_size: int, seed: int) -> Tensor:
    """Few tokens have most of the mass, as in a language model."""
    return 4.0 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def tied(num_rows: int, vocab_size: int, seed: int) -> Tensor:
    return (peaked(num_rows, vocab_size, seed) / 3).round() * 0.5


def masked(num_rows: int, vocab_size: int, seed: int) -> Tensor:
    """One token in three is allowed, and the first one."""
    generator = torch.Generator().manual_seed(seed)
    is_masked = torch.rand(num_rows, vocab_size, generator=generator) < 2 / 3
    is_masked[:, 0] = False
    return peaked(num_rows, vocab_size, seed).masked_fill_(is_masked, -math.inf)


def nearly_all_masked(num_rows: int, vocab_size: int, seed: int) -> Tensor:
    scores = torch.full((num_rows, vocab_size), -math.inf)
    scores[:, ::1999] = tied(num_rows, -(-vocab_size // 1999), seed)
    return scores


VOCABS = (1, 2, 7, 64, 257, 1000, 4095, 4096)
WIDE_VOCABS = (4097, 9001)
MAKERS = (peaked, tied, masked, nearly_all_masked)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_tokens_of_narrow_rows(vocab_size: int, make: Maker) -> None:
    """None is open: no number of this seed is on an edge."""
    assert Batch.drawn(make(300, vocab_size, vocab_size), 1).open_rows() == []


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("vocab_size", WIDE_VOCABS)
def test_tokens_of_wide_rows(vocab_size: int, make: Maker) -> None:
    batch = Batch.drawn(make(12, vocab_size, vocab_size), 2)
    samplings = [batch.draws[row].sampling for row in batch.open_rows()]
    # Equals of many tokens exceed the candidates, and hot rows keep many.
    assert all(one.temperature > 1.0 or one.top_p < 1.0 or make is tied for one in samplings)
    assert make is tied or len(samplings) <= 4


def low_third(num_rows: int, vocab_size: int, seed: int) -> Tensor:
    """Most tokens are above the score that the first guess takes for that of 3,072 tokens."""
    scores = peaked(num_rows, vocab_size, seed)
    scores[:, ::3] -= 100.0
    return scores


def high_hundredth(num_rows: int, vocab_size: int, seed: int) -> Tensor:
    """Few tokens are above that score."""
    scores = peaked(num_rows, vocab_size, seed) / 4
    scores[:, ::100] += 100.0
    return scores


@pytest.mark.parametrize("make", [low_third, high_hundredth])
def test_tokens_of_rows_whose_first_guess_fails(make: Maker) -> None:
    samplings = [one for one in SAMPLINGS if one["temperature"] <= 2.0]
    batch = Batch.drawn(make(16, 9001, 6), 4, samplings)
    assert len(batch.open_rows()) <= 2


@pytest.mark.parametrize("vocab_size", [300, 9001])
def test_numbers_at_the_edges_of_tokens_leave_rows_open(vocab_size: int) -> None:
    """Where rounding could decide, and nowhere else."""
    scores = peaked(1, vocab_size, 5).expand(8, -1).contiguous()
    weights = (scores[0].double() - scores[0].max()).exp()
    edges = (weights.cumsum(0) / weights.sum())[torch.topk(weights, 8).indices]
    batch = Batch(scores, [Draw(StepSampling(temperature=1.0), 0, 0)] * 8)
    assert set(batch.found(edges.tolist()).tolist()) == {OPEN}
    for distance in (1e-6, -1e-6):
        shares = edges + distance
        expected = torch.searchsorted(weights.cumsum(0), shares * weights.sum(), right=True)
        assert batch.found(shares.tolist()).tolist() == expected.tolist()


@pytest.mark.parametrize("vocab_size", [300, 9001])
def test_filters_that_end_at_an_edge_leave_rows_open(vocab_size: int) -> None:
    scores = peaked(1, vocab_size, 6)
    weights = (scores[0].double() - scores[0].max()).exp()
    ordered = weights.sort(descending=True).values
    on_edge = (float((ordered.cumsum(0) / ordered.sum())[3]), float(ordered[3]))
    for name, value in zip(("top_p", "min_p"), on_edge, strict=True):
        for factor, is_open in ((1.0, True), (1.0 + 1e-7, False), (1.0 - 1e-7, False)):
            sampling = StepSampling(temperature=1.0, seed=3, **{name: value * factor})  # type: ignore[arg-type]
            assert (Batch(scores, [Draw(sampling, 0, 0)]).open_rows() == [0]) == is_open


# numpy, about a part of NaN
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize("vocab_size", [257, 9001])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_with_values_that_are_not_finite(value: float, vocab_size: int) -> None:
    scores = peaked(9, vocab_size, 7)
    batch = Batch.drawn(scores.clone(), 3, ALWAYS_CERTAIN)
    fine = batch.found()
    scores[::3, vocab_size - 1] = value
    scores[::6] = value
    reals = torch.stack([torch.full((9,), number, dtype=torch.float64) for number in (1.0, 0.9, 0.0, 0.5)])
    for columns in ((None, None), (reals, torch.full((9,), vocab_size))):
        found = kernels.choose(scores, scores, *columns)
        assert (found == NOT_FINITE).nonzero()[:, 0].tolist() == [0, 3, 6]
    batch.scores = torch.where((torch.arange(9) % 3 == 0)[:, None], scores, batch.scores)
    is_fine = torch.arange(9) % 3 != 0
    if value != -math.inf:
        assert batch.found()[is_fine].tolist() == fine[is_fine].tolist()


@pytest.mark.parametrize("vocab_size", [257, 9001])
def test_rows_without_an_allowed_token_are_open(vocab_size: int) -> None:
    batch = Batch.drawn(torch.full((len(SAMPLINGS), vocab_size), -math.inf), 4)
    assert batch.found().tolist() == [OPEN] * len(batch.scores)


@pytest.mark.parametrize("vocab_size", [257, 4999])
def test_rows_whose_hidden_states_are_not_finite(vocab_size: int) -> None:
    """Whatever the head makes of them."""
    scores = peaked(6, vocab_size, 9)
    flags = torch.tensor([0, 1, 0, 0, 1, 0], dtype=torch.int32)
    reals = torch.stack([torch.full((6,), number, dtype=torch.float64) for number in (1.0, 0.9, 0.0, 0.5)])
    for columns in ((None, None), (reals, torch.full((6,), vocab_size))):
        found = kernels.choose(scores, scores, *columns, flags)
        assert ((found == NOT_FINITE) == (flags != 0)).all()


def test_no_rows() -> None:
    assert kernels.choose(torch.empty(0, 300), torch.empty(0, 300), None, None).tolist() == []


def test_logits_need_not_be_finite_as_a_sum() -> None:
    scores = torch.full((1, 300), 3e38)
    scores[0, 5] = 3.3e38
    assert kernels.choose(scores, scores, None, None).tolist() == [5]


EDITED = [
    StepSampling(temperature=0.0, logit_bias=((3, 9.0),)),
    StepSampling(temperature=1.0, repetition_penalty=1.7, frequency_penalty=0.2, top_k=7),
    StepSampling(temperature=1.0, allowed_token_ids=(3, 4, 60), top_k=40, seed=2),
    StepSampling(temperature=1.0, bad_words=((5,), (7, 8)), top_p=0.9, logprobs=2),
    StepSampling(temperature=1.0, allowed_token_ids=(3,), bad_words=((3,),)),
    StepSampling(temperature=0.9, typical_p=0.5, seed=3),
    StepSampling(temperature=0.9, seed=4),
    StepSampling(temperature=0.9, top_p=2.0),
]


@pytest.mark.parametrize("vocab_size", [300, 4999])
def test_steps_by_kernels_have_the_results_of_a_cpu(vocab_size: int) -> None:
    """With edits, log-probabilities, errors, and rows that kernels do not sample."""
    logits = peaked(len(EDITED) + 1, vocab_size, 8)
    logits[-1, 7] = math.nan
    samplings = [*EDITED, StepSampling(temperature=1.0)]

    def started(*, has_kernels: bool) -> Sampler:
        made = Sampler(vocab_size=vocab_size, stage=STAGE, has_kernels=has_kernels)
        for index, sampling in enumerate(samplings):
            made.start(start_record(key(index), Row(sampling=sampling)))
        return made

    parts = [decode(key(index), 7, 8) for index in range(len(samplings))]
    by_cpu, by_kernels = started(has_kernels=False), started(has_kernels=True)
    for _ in range(3):
        expected = by_cpu.choose(parts, logits)
        step = by_kernels.prepare(
            Step.of(tuple(parts), epoch=1, step_id=1, digest=0), device=torch.device("cpu")
        )
        assert step.rows is not None
        assert step.held == {5, 7}
        settled = by_kernels.settle(step, logits, step.rows.choose(logits, None, torch.from_numpy).tolist())
        assert [
            one if isinstance(one, SliceResult) else SliceResult(part.sequence, 0, one)
            for part, one in zip(parts, settled, strict=True)
        ] == list(expected)
