"""A constant load: each ended request is replaced by the next; every output is checked."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from stageline import Client, StagelineError
from tests.faults.streams import Ask, Stream, longest_silence_s

MAX_ARRIVALS = 20_000
"""Older ones are forgotten."""

Expected = Callable[[Ask], Sequence[int]]


class ConstantLoad:
    """Keeps `num_streams` requests of `asks` running while entered; waits for running ones on exit. Requests
    longer than `timeout_s` count as stuck.

    `errors` are those that a request may end with. `problems` describes every other end.
    """

    def __init__(
        self,
        client: Client,
        asks: Sequence[Ask],
        expected: Expected,
        *,
        num_streams: int,
        timeout_s: float = 90.0,
        errors: tuple[type[StagelineError], ...] = (),
    ) -> None:
        self.num_finished = 0
        self.num_tokens = 0
        self.ended_with: Counter[str] = Counter()
        self.problems: list[str] = []
        self._client = client
        self._asks = asks
        self._expected = expected
        self._num_streams = num_streams
        self._timeout_s = timeout_s
        self._errors = errors
        self._num_started = 0
        self._is_ending = False
        self._arrivals_s: list[float] = []
        self._live: set[Stream] = set()

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._keep_busy()) for _ in range(self._num_streams)]
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_ending = True
        if exception is not None:
            for task in self._tasks:
                task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for result in results:
            if exception is None and isinstance(result, BaseException):
                raise result

    async def next_token(self, *, timeout_s: float) -> None:
        """Waits for a new token. Raises TimeoutError."""
        since_s = asyncio.get_running_loop().time()
        async with asyncio.timeout(timeout_s):
            while self._last_arrival_s() <= since_s:
                await asyncio.sleep(0.005)

    def longest_silence_s(self, *, since_s: float) -> float:
        """The longest time without a token of any stream from `since_s` on."""
        live = (t for stream in self._live for t in stream.arrived_s)
        return longest_silence_s([*self._arrivals_s, *live], since_s=since_s)

    async def _keep_busy(self) -> None:
        while not self._is_ending:
            number = self._num_started
            self._num_started += 1
            stream = Stream(self._asks[number % len(self._asks)])
            self._live.add(stream)
            try:
                await self._run(stream, number)
            finally:
                self._live.discard(stream)
                self._arrivals_s = sorted([*self._arrivals_s, *stream.arrived_s])[-MAX_ARRIVALS:]

    async def _run(self, stream: Stream, number: int) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await stream.read(self._client)
        except TimeoutError:
            got = f"{len(stream.tokens)} tokens of {stream.ask.max_tokens}"
            self.problems.append(f"request {number} is stuck: {got} after {self._timeout_s:g} s")
            return
        except AssertionError as error:
            self.problems.append(f"request {number}: {error}")
            return
        if problem := stream.problem(self._expected(stream.ask), errors=self._errors):
            self.problems.append(f"request {number}: {problem}")
        elif stream.error is not None:
            self.ended_with[type(stream.error).__name__] += 1
            # Requests that are rejected at once would be sent thousands of times a second.
            await asyncio.sleep(0.1)
        else:
            self.num_finished += 1
            self.num_tokens += len(stream.tokens)

    def _last_arrival_s(self) -> float:
        lists = [self._arrivals_s[-1:], *(stream.arrived_s[-1:] for stream in self._live)]
        return max((t for times in lists for t in times), default=0.0)
