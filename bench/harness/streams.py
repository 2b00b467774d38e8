"""When the tokens of several streams came, and the part of it in which all of them decode. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Stream:
    """One request: when it was sent, and the arrival of each token, in seconds of one clock."""

    sent_s: float
    arrivals_s: list[float] = field(default_factory=list)

    @property
    def first_token_s(self) -> float:
        """From sending to the first token."""
        return self.arrivals_s[0] - self.sent_s

    def gaps_s(self, begin_s: float, end_s: float) -> list[float]:
        """Time between neighbouring tokens that both came in [begin_s, end_s]."""
        inside = [each for each in self.arrivals_s if begin_s <= each <= end_s]
        return [after - before for before, after in pairwise(inside)]


@dataclass(frozen=True, slots=True)
class Window:
    """From `begin_s` to `end_s` all streams were in decode."""

    begin_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.begin_s


def decode_window(streams: Sequence[Stream]) -> Window:
    """From the last first token to the first last token. Raises ValueError when they do not overlap."""
    begin_s = max(stream.arrivals_s[0] for stream in streams)
    end_s = min(stream.arrivals_s[-1] for stream in streams)
    if end_s <= begin_s:
        raise ValueError(f"the last stream began {begin_s - end_s:.3f} s after the first one had ended")
    return Window(begin_s, end_s)


def decode_rate(streams: Sequence[Stream], window: Window) -> float:
    """Tokens per second of all streams together in the window.

    A sum of each stream's own rate, from its first to its last token in the window: tokens of one step arrive
    in a bunch, and a count over a fixed time would be wrong by up to one bunch.
    """
    return sum(_own_rate(stream, window) for stream in streams)


def _own_rate(stream: Stream, window: Window) -> float:
    inside = [each for each in stream.arrivals_s if window.begin_s <= each <= window.end_s]
    if len(inside) < 3 or inside[-1] == inside[0]:
        raise ValueError(f"{len(inside)} tokens of a stream in {window.duration_s:.3f} s, needed are 3")
    return (len(inside) - 1) / (inside[-1] - inside[0])


def prefill_rate(streams: Sequence[Stream], prompt_tokens: int) -> float:
    """Prompt tokens per second, from the first request's sending to the last first token."""
    begin_s = min(stream.sent_s for stream in streams)
    end_s = max(stream.arrivals_s[0] for stream in streams)
    return len(streams) * prompt_tokens / (end_s - begin_s)
