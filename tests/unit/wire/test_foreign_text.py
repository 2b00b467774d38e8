"""Texts of others neither control a terminal nor fill it; numbers in them are bounded."""

import pytest

from wire.errors import InvalidRequest, status_of
from wire.exit_codes import error_line
from wire.foreign_text import MAX_SHOWN_CHARACTERS, parse_digits, printable_line


@pytest.mark.parametrize(
    "text", ["\x1b[2J", "a\nb", "\r", "\x9b31m", "\x07", "\u202e", "\ud83d", "\x1b]0;title\x07" * 3]
)
def test_a_line_has_printable_characters_only(text: str) -> None:
    line = printable_line(text)
    assert line.isprintable() and line.isascii()
    assert line == text.encode("unicode_escape").decode()


def test_printable_text_is_unchanged() -> None:
    assert printable_line("Zürich 東京 'a\\n'") == "Zürich 東京 'a\\n'"


def test_a_long_text_is_cut_and_says_its_length() -> None:
    limit = MAX_SHOWN_CHARACTERS
    assert printable_line("x" * limit) == "x" * limit
    assert printable_line("x" * 3_000_000) == "x" * limit + "... (3000000 characters)"


def test_the_error_line_and_an_error_of_a_call_show_names_of_others_so() -> None:
    name = "\x1b[2Jname" + "x" * 10_000
    line = error_line("BAD_HEADER", f"tensor {name}")
    assert line.startswith("stageline: error[BAD_HEADER]: tensor \\x1b[2Jname") and len(line) < 2100
    _, text = status_of(InvalidRequest(f"model {name}"))
    assert text.startswith("model \\x1b[2Jname") and len(text) < 2100


def test_the_error_line_has_lines_of_a_log_and_none_that_a_text_imitates() -> None:
    line = error_line("FAILED", "model a\n  | b", ["first\x1b[2J", "last"])
    assert line.splitlines() == [
        "stageline: error[FAILED]: model a\\n  | b",
        "  | first\\x1b[2J",
        "  | last",
    ]


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("7", 7), ("007", 7), ("255", 255)])
def test_digits_are_a_number_up_to_the_limit(text: str, number: int) -> None:
    assert parse_digits(text, limit=255) == number


@pytest.mark.parametrize("text", ["", "256", "0255", "-1", "+1", "1_0", " 1", "1.0", "٣", "²", "9" * 5000])
def test_other_texts_are_none(text: str) -> None:
    assert parse_digits(text, limit=255) is None


@pytest.mark.parametrize("character", ["\x1b", "\U000e0001", "\u202e", "a"])
def test_escapes_count_for_the_limit_of_a_line(character: str) -> None:
    line = printable_line(character * 3000)
    assert line.endswith("... (3000 characters)")
    assert len(line) == MAX_SHOWN_CHARACTERS + len("... (3000 characters)")
