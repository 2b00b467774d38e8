"""A burst of requests at once: rates of its parts, and the bound of the whole. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.harness.streams import Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """One round of `num_requests` requests with `prompt_tokens` and `new_tokens` each.

    `prefill_s` is the time of the same prompts with one new token, `first_token_s` the last first token of
    the burst, `all_s` the time of the whole burst: all from the first sending.
    """

    num_requests: int
    prompt_tokens: int
    new_tokens: int
    prefill_s: float
    first_token_s: float
    all_s: float

    @classmethod
    def of(cls, prefill: Sequence[Stream], burst: Sequence[Stream], *, prompt_tokens: int) -> Burst:
        """Raises ValueError if requests differ in number or length, or prefill has more than one token."""
        lengths = {len(stream.arrivals_s) for stream in burst}
        if len(prefill) != len(burst) or len(lengths) != 1 or 0 in lengths:
            raise ValueError(f"{len(prefill)} prompts, {len(burst)} requests with {sorted(lengths)} tokens")
        if any(len(stream.arrivals_s) != 1 for stream in prefill):
            raise ValueError("a prompt of the prefill has more than one new token")
        return cls(
            num_requests=len(burst),
            prompt_tokens=prompt_tokens,
            new_tokens=lengths.pop(),
            prefill_s=_until(prefill, 0),
            first_token_s=_until(burst, 0),
            all_s=_until(burst, -1),
        )

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second without decode."""
        return self.num_requests * self.prompt_tokens / self.prefill_s

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first ones, over the time that the burst takes longer than prefill."""
        return self.num_requests * (self.new_tokens - 1) / (self.all_s - self.prefill_s)

    @property
    def all_rate(self) -> float:
        """New tokens per second of the whole burst."""
        return self.num_requests * self.new_tokens / self.all_s

    def bound_rate(self, steady_decode_rate: float) -> float:
        """`all_rate` of prefill alone, followed by the other tokens at `steady_decode_rate`."""
        decode_s = self.num_requests * (self.new_tokens - 1) / steady_decode_rate
        return self.num_requests * self.new_tokens / (self.prefill_s + decode_s)


def _until(streams: Sequence[Stream], token: int) -> float:
    """Seconds from the first sending until the last stream's token of this index."""
    return max(stream.arrivals_s[token] for stream in streams) - min(stream.sent_s for stream in streams)
