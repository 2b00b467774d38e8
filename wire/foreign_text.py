"""Texts that others wrote: as logs, terminals and errors show them, and whole numbers in them."""

MAX_SHOWN_CHARACTERS = 2000
"""Limit for an error line or a log message; a checkpoint can have names of megabytes."""


def printable_line(text: str) -> str:
    """Return `text` as one line of at most 2,000 characters and its length that cannot control a terminal."""
    # Cut first, too: escapes of a name of megabytes take seconds.
    shown = escaped(text[: MAX_SHOWN_CHARACTERS + 1])
    return shown if len(shown) <= MAX_SHOWN_CHARACTERS else _cut(shown, len(text))


def shortened(text: str) -> str:
    """Return `text`, cut at 2,000 characters; a cut one ends with its length."""
    if len(text) <= MAX_SHOWN_CHARACTERS:
        return text
    return _cut(text, len(text))


def _cut(shown: str, num_characters: int) -> str:
    return f"{shown[:MAX_SHOWN_CHARACTERS]}... ({num_characters} characters)"


def escaped(text: str) -> str:
    """Return `text` as one line of printable characters, of any length.

    Untrusted text can neither begin a new line nor control a terminal.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def parse_digits(text: str, *, limit: int) -> int | None:
    """Return the number that `text` writes in ASCII digits; None for other texts and numbers above `limit`.

    More digits than `limit` has are not converted: Python needs quadratic time, and raises above 4,300.
    """
    if not (text.isascii() and text.isdigit()) or len(text) > len(str(limit)):
        return None
    number = int(text)
    return number if number <= limit else None
