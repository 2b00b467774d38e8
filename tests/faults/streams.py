"""Concurrent requests with their outputs over time and their expected outputs."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stageline import Client, StagelineError
from stageline.client.errors import ServerError
from stageline.client.output import FinishReason, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request; greedy without a seed."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None = None


def mixed_asks(
    count: int, *, lengths: tuple[int, int], max_tokens: int, vocab_size: int, seed: int
) -> list[Ask]:
    """Prompts of random tokens with lengths in this inclusive range; every other one is seeded."""
    generator = random.Random(seed)
    return [
        Ask(
            prompt=tuple(generator.randrange(vocab_size) for _ in range(generator.randint(*lengths))),
            max_tokens=max_tokens,
            seed=generator.randrange(2**32) if index % 2 else None,
        )
        for index in range(count)
    ]


@dataclass(eq=False)
class Stream:
    """Output of one request so far; times are on the event loop's clock."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: StagelineError | None = None

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    async def read(self, client: Client, *, cache_salt: str = "", timeout_s: float | None = None) -> None:
        """Reads the request to its end. Keeps a serving error, raises any other."""
        ask, now = self.ask, asyncio.get_running_loop().time
        # Few candidates, because rounding can change the sampled one at each.
        sampling = {} if ask.seed is None else {"temperature": 1.0, "top_k": 8, "seed": ask.seed}
        try:
            async for output in client.generate(
                list(ask.prompt),
                max_tokens=ask.max_tokens,
                cache_salt=cache_salt,
                timeout_s=timeout_s,
                **sampling,  # type: ignore[arg-type]
            ):
                assert output.first_token_index == len(self.tokens), "a token is missing, or came twice"
                self.tokens += output.token_ids
                self.arrived_s += [now()] * len(output.token_ids)
                self.finish_reason, self.usage = output.finish_reason, output.usage
        except StagelineError as error:
            self.error = error

    def problem(self, expected: Sequence[int], *, errors: tuple[type[StagelineError], ...] = ()) -> str:
        """Difference from `expected`, or from a prefix of it with an error of these types; empty if none."""
        shared = list(expected[: len(self.tokens)])
        if self.tokens != shared:
            return f"not the right tokens: {_first_difference(self.tokens, shared)}"
        if self.error is not None:
            is_typed = isinstance(self.error, errors) and type(self.error) is not ServerError
            return "" if is_typed else f"{type(self.error).__name__} after {len(self.tokens)}: {self.error}"
        if len(self.tokens) != len(expected):
            return f"{len(self.tokens)} tokens of {len(expected)}, finish reason {self.finish_reason}"
        return ""


class Streams:
    """All of `asks` at once, from construction on. Prefixes are not shared with requests of another salt."""

    def __init__(self, client: Client, asks: Iterable[Ask], *, cache_salt: str = "") -> None:
        self.all = [Stream(ask) for ask in asks]
        self._tasks = [asyncio.create_task(stream.read(client, cache_salt=cache_salt)) for stream in self.all]

    @property
    def tokens(self) -> list[list[int]]:
        return [stream.tokens for stream in self.all]

    async def all_have(self, num_tokens: int, *, timeout_s: float = 60.0) -> None:
        """Returns when every stream has this many tokens and none has ended yet."""
        async with asyncio.timeout(timeout_s):
            while min(len(stream.tokens) for stream in self.all) < num_tokens:
                await asyncio.sleep(0.002)
                self._raise_if_ended()
        self._raise_if_ended()

    async def some_have(self, count: int, *, timeout_s: float = 60.0) -> None:
        """Waits until `count` streams have a token; with long prompts most of the others are in prefill."""
        async with asyncio.timeout(timeout_s):
            while sum(bool(stream.tokens) for stream in self.all) < count:
                await asyncio.sleep(0.002)
                self._raise_if_ended()

    async def end(self, *, timeout_s: float) -> None:
        """Waits until all have ended, at most `timeout_s`."""
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*self._tasks)

    def problems(
        self, expected: Sequence[Sequence[int]], *, errors: tuple[type[StagelineError], ...] = ()
    ) -> list[str]:
        """Problems of all streams with wrong output."""
        pairs = enumerate(zip(self.all, expected, strict=True))
        found = [(number, stream.problem(tokens, errors=errors)) for number, (stream, tokens) in pairs]
        return [f"stream {number}: {problem}" for number, problem in found if problem]

    def last_arrival_s(self) -> float:
        """Time of the last token."""
        return max(t for stream in self.all for t in stream.arrived_s[-1:])

    def longest_silence_s(self, *, since_s: float) -> float:
        """Longest time without a token of any stream since `since_s`."""
        return longest_silence_s((t for stream in self.all for t in stream.arrived_s), since_s=since_s)

    def _raise_if_ended(self) -> None:
        ended = [stream for stream in self.all if stream.has_ended]
        assert not ended, f"it is too late to disturb anything: {ended[0].error or ended[0].finish_reason}"


def _first_difference(tokens: Sequence[int], expected: Sequence[int]) -> str:
    for place, (token, right) in enumerate(itertools.zip_longest(tokens, expected)):
        if token != right:
            return f"number {place} is {token} in the place of {right}"
    return "none"


def longest_silence_s(arrivals_s: Iterable[float], *, since_s: float) -> float:
    """Longest gap between consecutive arrivals after `since_s`; 0 without any."""
    times = [since_s, *sorted(t for t in arrivals_s if t > since_s)]
    return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)


async def undisturbed(client: Client, asks: Iterable[Ask], *, timeout_s: float = 120.0) -> list[list[int]]:
    """Tokens of these requests without faults."""
    streams = Streams(client, asks, cache_salt="undisturbed")
    await streams.end(timeout_s=timeout_s)
    assert [stream.error for stream in streams.all if stream.error] == []
    assert all(len(set(tokens)) > 8 for tokens in streams.tokens), "a degenerate model proves nothing"
    return streams.tokens
