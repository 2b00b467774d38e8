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


def decode_window(streams: Sequence[Stream], num_tokens: int) -> Window | None:
    """From the last first token until each stream has had `num_tokens` more; None while that is not so.

    Streams go on beyond the window, so nothing else than decodes of all of them is in it.
    """
    if not all(stream.arrivals_s for stream in streams):
        return None
    begin_s = max(stream.arrivals_s[0] for stream in streams)
    after = [[each for each in stream.arrivals_s if each > begin_s] for stream in streams]
    if min(map(len, after)) < num_tokens:
        return None
    return Window(begin_s, max(each[num_tokens - 1] for each in after))


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
