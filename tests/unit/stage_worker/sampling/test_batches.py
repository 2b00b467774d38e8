"""A token depends only on its own row, seed, choice and position."""

from dataclasses import replace

import pytest
import torch

from stage_worker.sampling import step_rows
from stage_worker.sampling.random_choice import argmax_rows, row_sums
from tests.sampled import GENERATED, Row, results_of, tokens_of
from tests.unit.stage_worker.sampling.test_random_choice import FILTERS, some_logits
from wire.sampling import StepSampling

ROWS = 120


def mixed_rows() -> list[Row]:
    kinds = [*FILTERS.values(), *(replace(sampling, temperature=0.0) for sampling in FILTERS.values())]
    kinds = [
        replace(sampling, seed=index % 5, logprobs=index % 4 or None) for index, sampling in enumerate(kinds)
    ]
    return [
        Row(
            sampling=kinds[index % len(kinds)],
            prompt=(1, 2, index % 40),
            generated=GENERATED[: index % 11],
            choice=index % 3,
        )
        for index in range(ROWS)
    ]


@pytest.mark.parametrize(("vocab_size", "scale"), [(1000, 1.0), (1000, 0.05), (6001, 0.3)])
def test_a_token_does_not_depend_on_batch_mates(vocab_size: int, scale: float) -> None:
    logits, rows = scale * some_logits(ROWS, vocab_size=vocab_size), mixed_rows()
    together = tokens_of(logits, rows)
    assert together == [tokens_of(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = tokens_of(logits[order], [rows[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_log_probabilities_do_not_depend_on_batch_mates() -> None:
    logits, rows = some_logits(ROWS, vocab_size=1000), mixed_rows()
    together = [result.logprobs for result in results_of(logits, rows)]
    alone = [results_of(logits[i : i + 1], [row])[0].logprobs for i, row in enumerate(rows)]
    assert together == alone


def test_the_size_of_the_blocks_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, rows = some_logits(ROWS, vocab_size=1000), mixed_rows()
    at_once = results_of(logits, rows)
    monkeypatch.setattr(step_rows, "MAX_BLOCK_ELEMENTS", 7000)
    assert results_of(logits, rows) == at_once


def test_the_logits_are_not_changed() -> None:
    logits = some_logits(ROWS, vocab_size=1000)
    before = logits.clone()
    results_of(logits, mixed_rows())
    assert torch.equal(logits, before)


def test_sums_are_the_same_on_one_thread_and_on_two() -> None:
    """torch's own sum of one long row differs."""
    weights = torch.rand((3, 152_064), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    alone = [row_sums(row[None]) for row in weights]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(row_sums(weights), torch.cat(alone))
        assert all(torch.equal(row_sums(row[None]), one) for row, one in zip(weights, alone, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("vocab_size", [1, 7, 64, 1000, 4096, 50257])
def test_the_first_of_several_maxima_is_found(vocab_size: int) -> None:
    scores = (some_logits(20, vocab_size=vocab_size) * 2).round()
    values, ids = argmax_rows(scores)
    assert torch.equal(values, scores.amax(dim=-1))
    assert ids.tolist() == [row.index(max(row)) for row in scores.tolist()]


def test_greedy_is_the_most_likely_token_and_the_lowest_id_among_equals() -> None:
    logits = some_logits(3)
    logits[1] = 0.0
    logits[2, [4, 9]] = 99.0
    greedy = Row(sampling=StepSampling(temperature=0.0))
    assert tokens_of(logits, [greedy] * 3) == [int(logits[0].argmax()), 0, 4]


def test_a_sample_depends_only_on_seed_choice_and_position() -> None:
    logits = torch.zeros((1, 4096))
    row = Row(sampling=StepSampling(temperature=1.0, seed=5), prompt=(1, 2, 3))
    once = tokens_of(logits, [row])
    assert once == tokens_of(logits, [replace(row, prompt=(7, 7), generated=(9,))])
    others = [
        replace(row, sampling=StepSampling(temperature=1.0, seed=6)),
        replace(row, choice=1),
        replace(row, prompt=(1, 2, 3, 4)),
    ]
    assert all(tokens_of(logits, [other]) != once for other in others)


def test_the_largest_seed_and_choice_are_drawn_with() -> None:
    row = Row(sampling=StepSampling(temperature=1.0, seed=2**64 - 1), choice=2**32 - 1)
    assert 0 <= tokens_of(some_logits(1), [row])[0] < 40
