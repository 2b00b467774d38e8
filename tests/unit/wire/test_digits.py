"""Numbers in texts of others are bounded before they are converted."""

import pytest

from wire.digits import parse_digits


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("7", 7), ("007", 7), ("255", 255)])
def test_digits_are_a_number_up_to_the_limit(text: str, number: int) -> None:
    assert parse_digits(text, limit=255) == number


@pytest.mark.parametrize("text", ["", "256", "0255", "-1", "+1", "1_0", " 1", "1.0", "٣", "²", "9" * 5000])
def test_other_texts_are_none(text: str) -> None:
    assert parse_digits(text, limit=255) is None
