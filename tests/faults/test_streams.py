"""Wrong streams are distinguished from right ones."""

from __future__ import annotations

import pytest

from stageline import StagelineError, StepFailed, Unavailable
from stageline.client.errors import ServerError
from stageline.client.output import FinishReason
from tests.faults.streams import Ask, Stream, longest_silence_s, mixed_asks

EXPECTED = [5, 6, 7, 8]
ERRORS = (Unavailable, StepFailed)


def _stream(tokens: list[int], *, error: StagelineError | None = None) -> Stream:
    stream = Stream(Ask(prompt=(1,), max_tokens=4), tokens=tokens, error=error)
    stream.finish_reason = None if error else FinishReason.LENGTH
    return stream


def test_exactly_the_expected_tokens_are_no_problem() -> None:
    assert _stream([5, 6, 7, 8]).problem(EXPECTED) == ""


def test_a_part_is_no_problem_when_a_typed_error_ended_it() -> None:
    assert _stream([5, 6], error=Unavailable("gone")).problem(EXPECTED, errors=ERRORS) == ""


@pytest.mark.parametrize(
    "stream",
    [
        _stream([5, 6, 9, 8]),
        _stream([5, 6, 7]),
        _stream([5, 6, 7, 8, 9]),
        _stream([5, 9], error=Unavailable("gone")),
        _stream([5, 6, 7, 8], error=ServerError("internal")),
        _stream([5], error=ServerError("internal")),
    ],
    ids=["wrong", "short", "long", "wrong-before-error", "internal-at-end", "internal"],
)
def test_everything_else_is_a_problem(stream: Stream) -> None:
    assert stream.problem(EXPECTED, errors=ERRORS) != ""


def test_an_error_is_a_problem_where_none_is_allowed() -> None:
    assert _stream([5, 6], error=StepFailed("step")).problem(EXPECTED) != ""


def test_requests_are_a_function_of_the_seed_and_every_other_one_is_seeded() -> None:
    makes = [mixed_asks(6, lengths=(2, 9), max_tokens=3, vocab_size=50, seed=seed) for seed in (1, 1, 2)]
    assert makes[0] == makes[1] != makes[2]
    assert [ask.seed is None for ask in makes[0]] == [True, False] * 3
    assert all(2 <= len(ask.prompt) <= 9 for ask in makes[0])


def test_the_longest_silence_begins_with_the_disturbance() -> None:
    assert longest_silence_s([1.0, 2.0, 5.5, 6.0], since_s=3.0) == 2.5
    assert longest_silence_s([1.0, 4.0, 4.1], since_s=3.0) == 1.0
    assert longest_silence_s([1.0], since_s=3.0) == 0.0
