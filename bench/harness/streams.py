"""Token arrivals of several streams, and the window in which all of them decode. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Stream:
    """One request: sending and arrival of each token, in seconds of one clock."""

    sent_s: float
    arrivals_s: list[float] = field(default_factory=list)

    @property
    def first_token_s(self) -> float:
        """From sending to the first token."""
        return self.arrivals_s[0] - self.sent_s

    def gaps_s(self, begin_s: float, end_s: float) -> list[float]:
        """Gaps between consecutive tokens in [begin_s, end_s]."""
        inside = [arrival_s for arrival_s in self.arrivals_s if begin_s <= arrival_s <= end_s]
        return [after - before for before, after in pairwise(inside)]


@dataclass(frozen=True, slots=True)
class Window:
    """All streams decode from `begin_s` to `end_s`."""

    begin_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.begin_s


def decode_window(streams: Sequence[Stream], num_tokens: int) -> Window | None:
    """Window from the last first token until each stream has `num_tokens` more; None before.

    Streams continue beyond the window, so it contains only decodes of all of them.
    """
    if not all(stream.arrivals_s for stream in streams):
        return None
    begin_s = max(stream.arrivals_s[0] for stream in streams)
    after = [[arrival_s for arrival_s in stream.arrivals_s if arrival_s > begin_s] for stream in streams]
    if min(map(len, after)) < num_tokens:
        return None
    return Window(begin_s, max(arrivals_s[num_tokens - 1] for arrivals_s in after))


def decode_rate(streams: Sequence[Stream], window: Window) -> float:
    """Tokens per second of all streams in the window.

    The sum of each stream's rate from its first to its last token in the window: tokens of one step arrive
    together, so a count over a fixed time would be wrong by up to one step.
    """
    return sum(_own_rate(stream, window) for stream in streams)


def _own_rate(stream: Stream, window: Window) -> float:
    inside = [arrival_s for arrival_s in stream.arrivals_s if window.begin_s <= arrival_s <= window.end_s]
    if len(inside) < 3 or inside[-1] == inside[0]:
        raise ValueError(f"{len(inside)} tokens of a stream in {window.duration_s:.3f} s, needed are 3")
    return (len(inside) - 1) / (inside[-1] - inside[0])


def prefill_rate(streams: Sequence[Stream], prompt_tokens: int) -> float:
    """Prompt tokens per second, from the first sending to the last first token."""
    begin_s = min(stream.sent_s for stream in streams)
    end_s = max(stream.arrivals_s[0] for stream in streams)
    return len(streams) * prompt_tokens / (end_s - begin_s)
