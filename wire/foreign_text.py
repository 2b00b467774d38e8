"""Texts that others wrote, as logs, terminals and error messages show them."""

MAX_SHOWN_CHARACTERS = 2000
"""Limit for an error line or a log message; a checkpoint can have names of megabytes."""


def printable_line(text: str) -> str:
    """Return `text` as one line of at most 2,000 characters and its length that cannot control a terminal."""
    return escaped(shortened(text))


def shortened(text: str) -> str:
    """Return `text`, cut at 2,000 characters; a cut one ends with its length."""
    if len(text) <= MAX_SHOWN_CHARACTERS:
        return text
    return f"{text[:MAX_SHOWN_CHARACTERS]}... ({len(text)} characters)"


def escaped(text: str) -> str:
    """Return `text` as one line of printable characters, of any length.

    Untrusted text can neither begin a new line nor control a terminal.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()
