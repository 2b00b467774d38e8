"""Stop strings over random splits of random texts: what is let out is what looking at one character after the
other lets out, and never a part of the stop string.
"""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.text.stop_strings import StopMatcher
from tests.unit.coordinator.text.stop_reference import Case, cut_one_by_one, num_held_one_by_one

ALPHABET = "ab é😀"
words = st.text(ALPHABET, min_size=1, max_size=6)


@st.composite
def cases(draw: st.DrawFn, *, may_always_stop: bool) -> Case:
    """Stop strings that overlap, repeat themselves and begin alike, and texts made of parts of them."""
    roots = draw(st.lists(words, min_size=1, max_size=3))
    repeated = st.builds(lambda word, times: word * times, st.sampled_from(roots), st.integers(1, 3))
    stops = draw(st.lists(st.one_of(words, repeated, st.builds(str.__add__, repeated, words)), max_size=4))
    parts = st.one_of(
        st.text(ALPHABET, max_size=3), repeated, *([st.sampled_from(stops).flatmap(beginnings)] * bool(stops))
    )
    text = "".join(draw(st.lists(parts, max_size=8)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    ends = [*cuts, len(text)]
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], ends, strict=True)]
    flags = [may_always_stop or draw(st.booleans()) for _ in pieces]
    return Case(stops, list(zip(pieces, flags, strict=True)))


def beginnings(stop: str) -> st.SearchStrategy[str]:
    return st.integers(1, len(stop)).map(lambda length: stop[:length])


def deliver(case: Case) -> tuple[list[str], bool]:
    """What each `push` returns, and the flush; and whether a stop string ended it."""
    matcher = StopMatcher(case.stops)
    returned = []
    for text, may_stop in case.pieces:
        returned.append(matcher.push(text, may_stop=may_stop))
        if matcher.is_stopped:
            break
    return [*returned, matcher.flush()], matcher.is_stopped


@settings(max_examples=1000, deadline=None)
@given(case=st.booleans().flatmap(lambda always: cases(may_always_stop=always)))
def test_what_is_delivered_is_what_looking_at_each_character_delivers(case: Case) -> None:
    expected, end = cut_one_by_one(case)
    returned, is_stopped = deliver(case)
    assert "".join(returned) == expected
    assert is_stopped == (end is not None)


@settings(max_examples=500, deadline=None)
@given(case=cases(may_always_stop=True))
def test_no_stop_string_and_no_part_of_the_one_that_ended_it_ever_gets_out(case: Case) -> None:
    expected, end = cut_one_by_one(case)
    delivered = ""
    for text in deliver(case)[0]:
        delivered += text
        assert not any(stop in delivered for stop in case.stops)
        assert end is None or expected.startswith(delivered)


@settings(max_examples=500, deadline=None)
@given(case=st.booleans().flatmap(lambda always: cases(may_always_stop=always)))
def test_nothing_is_held_back_but_what_may_become_a_stop_string(case: Case) -> None:
    _, end = cut_one_by_one(case)
    matcher, seen, num_delivered = StopMatcher(case.stops), "", 0
    for text, may_stop in case.pieces:
        seen += text
        num_delivered += len(matcher.push(text, may_stop=may_stop))
        if end is not None and len(seen) >= end:
            break
        assert len(seen) - num_delivered == num_held_one_by_one(seen, case.stops)


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["lo w", "world"], "hello world", "hel"),
        (["abc", "b"], "abc", "a"),
        (["bc", "abc"], "abc", ""),
        (["aab"], "aaab", "a"),
        (["\n\n"], "a\nb\n\nc", "a\nb"),
        (["😀é"], "😀😀é", "😀"),
        ([], "abc", "abc"),
    ],
)
def test_the_first_to_be_complete_wins_and_then_the_first_to_begin(
    stops: list[str], text: str, expected: str
) -> None:
    for pieces in ([text], list(text)):
        returned, _ = deliver(Case(stops, [(piece, True) for piece in pieces]))
        assert "".join(returned) == expected


def test_a_stop_string_that_is_let_pass_is_text_and_one_that_overlaps_it_is_found() -> None:
    matcher = StopMatcher(["aa"])
    assert matcher.push("aa", may_stop=False) == "a"
    assert matcher.push("a") == ""
    assert matcher.is_stopped
    assert matcher.flush() == ""


def test_one_that_was_let_pass_inside_what_is_held_back_is_not_found_later() -> None:
    matcher = StopMatcher(["b", "abc"])
    assert matcher.push("ab", may_stop=False) == ""
    assert matcher.push("x") == "abx"
    assert not matcher.is_stopped


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        StopMatcher(["a", ""])


@pytest.mark.parametrize("text", ["a", "ab"])
def test_a_character_costs_the_same_however_much_is_held_back_and_came_before(text: str) -> None:
    """16 stop strings of 1,024 characters that the text goes along with again and again, in vain."""
    stops = [text * (900 // len(text)) + "c" * number + "d" * (124 - number) for number in range(16)]
    matcher = StopMatcher(stops)
    started = time.process_time()
    for _ in range(20_000):
        matcher.push(text)
    for _ in range(20):
        matcher.push(stops[0][:-1])
        matcher.push("e")
    assert time.process_time() - started < 5
