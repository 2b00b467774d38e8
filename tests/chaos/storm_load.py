"""The load of a storm: a fixed number of streams, each checked against the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from stageline import Client
from tests.faults.streams import Ask, Stream

STUCK_AFTER_S = 240.0


class Outcome(Enum):
    """What came of one request. FAILED: an error of any kind, or no end. WRONG: other tokens than without a
    storm, or a token is missing or came twice.
    """

    DONE = "done"
    FAILED = "failed"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Ended:
    """One request of the storm; times are on the clock of the event loop."""

    number: int
    outcome: Outcome
    problem: str
    started_s: float
    ended_s: float
    arrived_s: tuple[float, ...]

    @property
    def longest_gap(self) -> tuple[float, float]:
        """Begin and end of the longest time between two tokens; both the begin of the request without any."""
        gaps = itertools.pairwise(self.arrived_s)
        return max(gaps, key=lambda gap: gap[1] - gap[0], default=(self.started_s, self.started_s))

    @property
    def pause_s(self) -> float:
        begin_s, end_s = self.longest_gap
        return end_s - begin_s

    @property
    def first_token_s(self) -> float | None:
        """Time to the first token."""
        return self.arrived_s[0] - self.started_s if self.arrived_s else None


class StormLoad:
    """A closed loop: each of `num_streams` streams sends the next request when its last one has ended."""

    def __init__(
        self,
        client: Client,
        asks: Sequence[Ask],
        expected: Callable[[Ask], Sequence[int]],
        *,
        num_streams: int,
    ) -> None:
        self.ended: list[Ended] = []
        self.live: set[Stream] = set()
        self._client = client
        self._asks = itertools.cycle(asks)
        self._numbers = itertools.count()
        self._expected = expected
        self._num_streams = num_streams
        self._is_ending = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep_busy()) for _ in range(self._num_streams)]

    async def finish(self) -> None:
        """Stops sending; waits for running requests."""
        self._is_ending = True
        await asyncio.gather(*self._tasks)

    async def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep_busy(self) -> None:
        while not self._is_ending:
            number, stream = next(self._numbers), Stream(next(self._asks))
            started_s = asyncio.get_running_loop().time()
            self.live.add(stream)
            try:
                outcome, problem = await self._run(stream)
            finally:
                self.live.discard(stream)
            ended_s = asyncio.get_running_loop().time()
            self.ended.append(Ended(number, outcome, problem, started_s, ended_s, tuple(stream.arrived_s)))
            if outcome is not Outcome.DONE:
                # Immediately rejected requests would be sent thousands of times per second.
                await asyncio.sleep(0.1)

    async def _run(self, stream: Stream) -> tuple[Outcome, str]:
        try:
            async with asyncio.timeout(STUCK_AFTER_S):
                await stream.read(self._client)
        except TimeoutError:
            return Outcome.FAILED, f"no end after {STUCK_AFTER_S:g} s, {len(stream.tokens)} tokens so far"
        except AssertionError as error:
            return Outcome.WRONG, str(error)
        expected = self._expected(stream.ask)
        if stream.tokens != list(expected[: len(stream.tokens)]):
            return Outcome.WRONG, stream.problem(expected)
        if stream.error is not None:
            return Outcome.FAILED, f"{type(stream.error).__name__}: {stream.error}"
        problem = stream.problem(expected)
        return (Outcome.WRONG if problem else Outcome.DONE), problem
