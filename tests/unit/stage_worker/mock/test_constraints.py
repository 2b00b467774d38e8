"""Which tokens a mock may sample under what was asked of it."""

from __future__ import annotations

from stage_worker.mock.constraints import MockConstraints
from tests.unit.coordinator.scheduling.pipeline_model import key_of
from wire.steps import StartRecord, StepSampling

VOCAB_SIZE = 20
EOS = (0, 7)


def constraints(
    sampling: StepSampling, tokens: tuple[int, ...] = (1, 2), *, num_prompt_tokens: int | None = None
) -> MockConstraints:
    num_prompt = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
    record = StartRecord(key_of(0), 0, num_prompt, tokens, sampling)
    return MockConstraints(record, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)


def reachable(sampling: StepSampling) -> set[int | None]:
    made = constraints(sampling)
    return {made.choose(first) for first in range(VOCAB_SIZE)}


def test_what_asks_nothing_of_tokens_has_no_constraints() -> None:
    assert not MockConstraints.are_in(StepSampling(temperature=1.0, top_p=0.5, min_tokens=3))
    assert MockConstraints.are_in(StepSampling(min_tokens=3, min_tokens_hold_back=(5,)))


def test_only_allowed_tokens_are_sampled_and_each_can_be() -> None:
    assert reachable(StepSampling(allowed_token_ids=(3, 9, 15))) == {3, 9, 15}


def test_the_next_allowed_token_in_order_is_sampled() -> None:
    made = constraints(StepSampling(allowed_token_ids=(3, 9, 15)))
    assert [made.choose(first) for first in (0, 3, 4, 15, 16)] == [3, 3, 9, 15, 3]


def test_tokens_that_end_come_last_and_are_sampled_where_nothing_else_is_allowed() -> None:
    assert reachable(StepSampling(allowed_token_ids=(0, 3, 7))) == {3}
    assert reachable(StepSampling(allowed_token_ids=(0, 7))) == {0, 7}


def test_the_highest_bias_wins_and_a_negative_one_comes_after_none() -> None:
    assert reachable(StepSampling(logit_bias=((4, 1.0), (5, 2.0), (6, 2.0)))) == {5, 6}
    every_other = tuple((token, -1.0) for token in range(0, VOCAB_SIZE, 2))
    assert reachable(StepSampling(logit_bias=every_other)) == set(range(1, VOCAB_SIZE, 2)) - {7}
    both = StepSampling(allowed_token_ids=(2, 3), logit_bias=((2, -100.0), (9, 100.0)))
    assert reachable(both) == {3}
    assert reachable(StepSampling(allowed_token_ids=(2,), logit_bias=((2, -100.0),))) == {2}
    assert reachable(StepSampling(logit_bias=((0, 5.0),))) == {0}
    assert reachable(StepSampling(logit_bias=((4, 0.0),))) == set(range(VOCAB_SIZE)) - set(EOS)


def test_a_bad_word_bans_its_last_token_after_the_others_only() -> None:
    made = constraints(StepSampling(allowed_token_ids=(4, 5), bad_words=((1, 2, 4), (5, 4))))
    assert made.choose(4) == 5
    made.add(3)
    assert made.choose(4) == 4
    made.add(5)
    assert made.choose(4) == 5
    assert reachable(StepSampling(bad_words=((4,),))) == set(range(VOCAB_SIZE)) - {0, 4, 7}


def test_a_bad_word_longer_than_the_history_bans_nothing() -> None:
    made = constraints(StepSampling(allowed_token_ids=(4, 5), bad_words=((9, 1, 2, 4),)))
    assert made.choose(4) == 4


def test_stop_tokens_are_held_back_before_min_tokens() -> None:
    sampling = StepSampling(min_tokens=2, min_tokens_hold_back=(4,), allowed_token_ids=(4, 5))
    made = constraints(sampling)
    assert made.choose(4) == 5
    made.add(5)
    assert made.choose(4) == 5
    made.add(5)
    assert made.choose(4) == 4
    assert constraints(sampling, (1, 2, 5, 5), num_prompt_tokens=2).choose(4) == 4


def test_nothing_is_sampled_where_nothing_is_allowed() -> None:
    assert reachable(StepSampling(allowed_token_ids=(4,), bad_words=((4,),))) == {None}
