"""Whole numbers in texts that others wrote."""


def parse_digits(text: str, *, limit: int) -> int | None:
    """Return the number that `text` writes in ASCII digits; None for other texts and numbers above `limit`.

    More digits than `limit` has are not converted: Python needs quadratic time, and raises above 4,300.
    """
    if not (text.isascii() and text.isdigit()) or len(text) > len(str(limit)):
        return None
    number = int(text)
    return number if number <= limit else None
