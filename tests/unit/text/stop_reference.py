"""Reference implementation of stop strings: slow, one character at a time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """Stop strings, and a text in pieces, each with whether a stop string may be completed in it."""

    stops: list[str]
    pieces: list[tuple[str, bool]]

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    @property
    def may_stop(self) -> list[bool]:
        """One per character."""
        return [may_stop for text, may_stop in self.pieces for _ in text]


def cut_one_by_one(case: Case) -> tuple[str, int | None]:
    """The text before the stop string, and the number of characters at its completion."""
    for end in range(1, len(case.text) + 1):
        lengths = [len(stop) for stop in case.stops if case.text[:end].endswith(stop)]
        if lengths and case.may_stop[end - 1]:
            return case.text[: end - max(lengths)], end
    return case.text, None


def num_held_one_by_one(text: str, stops: list[str]) -> int:
    """Length of the longest suffix of the text that is a proper prefix of a stop string."""
    held = [length for stop in stops for length in range(1, len(stop)) if text.endswith(stop[:length])]
    return max(held, default=0)
