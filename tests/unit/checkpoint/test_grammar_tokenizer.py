"""Error states of a matcher raise one-line errors and persist."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint.grammar_tokenizer import GrammarError, GrammarMatcher, GrammarTokenizer, one_line
from tests.unit.text.trained_tokenizers import byte_level, save_tokenizer

EOS = (2, 3)
A = 68
"""The id of "a"."""


@pytest.fixture
def tokenizer(tmp_path: Path) -> GrammarTokenizer:
    directory = save_tokenizer(tmp_path, byte_level())
    return GrammarTokenizer.open(directory, vocab_size=400, eos_token_ids=EOS)


def allowed(matcher: GrammarMatcher) -> list[int]:
    mask = int.from_bytes(matcher.mask(), "little")
    return [token for token in range(mask.bit_length()) if mask >> token & 1]


def test_a_matcher_accepts_a_text_to_its_end(tokenizer: GrammarTokenizer) -> None:
    matcher = tokenizer.matcher("start: /a{1,2}/")
    assert allowed(matcher) == [A]
    assert not matcher.is_accepting
    matcher.consume([A])
    assert allowed(matcher) == [*EOS, A]
    assert matcher.is_accepting
    matcher.consume([A])
    assert allowed(matcher) == [*EOS]


@pytest.mark.parametrize("token", [A + 1, EOS[0], 399, 2**31])
def test_a_forbidden_token_raises_and_so_do_all_later_tokens(token: int, tokenizer: GrammarTokenizer) -> None:
    matcher = tokenizer.matcher("start: /aa/")
    with pytest.raises(GrammarError) as refused:
        matcher.consume([A, token])
    assert "\n" not in str(refused.value)
    assert "grammar" in str(refused.value) or "out of range" in str(refused.value)
    for _ in range(2):
        with pytest.raises(GrammarError, match="^" + str(refused.value)[:20]):
            matcher.mask()


def test_a_token_after_the_end_of_the_text_raises(tokenizer: GrammarTokenizer) -> None:
    matcher = tokenizer.matcher("start: /a/")
    with pytest.raises(GrammarError):
        matcher.consume([A, EOS[0], A])


def test_a_dead_end_raises_although_the_library_would_end_the_text(tokenizer: GrammarTokenizer) -> None:
    matcher = tokenizer.matcher('start: "a" B\nB: /x/ & /y/')
    matcher.consume([A])
    with pytest.raises(GrammarError, match=r"^the grammar allows no token here$"):
        matcher.mask()


def test_an_unbounded_grammar_is_stopped_by_the_limits(tokenizer: GrammarTokenizer) -> None:
    matcher = tokenizer.matcher("start: /((((a?){100}){100}){100}){100}/")
    with pytest.raises(GrammarError, match="too many"):
        matcher.consume([A] * 10_000)


def test_a_reason_is_reduced_to_one_short_line() -> None:
    diagram = (
        "at 1(8): regex parse error:\n    (\n    ^\nerror: unclosed\n   1 | start: /(/\n              ^\n"
    )
    assert one_line(diagram) == "at 1(8): regex parse error: ( error: unclosed"
    assert len(one_line("x" * 10_000)) < 500
