"""Requests that end in every possible way. The way depends only on the seed, the moment does not."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from stageline_rpc.v1 import inference_pb2
from tests.integration.calls import Caller, Reader, Received, StatusCode, message_of
from tests.integration.cluster import RequestCase
from tests.integration.request_cases import SoloRuns, mixed_cases
from wire.ids import id_text

NUM_AT_ONCE = 48
MAX_TOKENS = 16
MAX_CHOICES = 3
SHORT_KEEP_S, LONG_KEEP_S = 0.1, 60.0


@dataclass(frozen=True)
class Trial:
    """One request."""

    case: RequestCase
    num_choices: int
    generator: random.Random

    def request(self, **more: Any) -> inference_pb2.GenerateRequest:
        return message_of(self.case, n=self.num_choices, **more)

    @property
    def request_id(self) -> str:
        return id_text(self.case.request_id)

    async def read_some(self, reader: Reader, *, at_least: int = 0) -> None:
        """Read a few messages, or fewer if the request ends."""
        for _ in range(at_least + self.generator.randrange(10)):
            if await reader.next() is None:
                return


class Storm:
    """`outcomes` counts requests by behaviour and status of their last call, `num_received` those that the
    coordinator has certainly received.
    """

    def __init__(self, address: str, caller: Caller, solo: SoloRuns, *, seed: int) -> None:
        self.outcomes: Counter[tuple[str, StatusCode | None]] = Counter()
        self.num_received = 0
        self._address = address
        self._caller = caller
        self._solo = solo
        self._seed = seed
        self._cases = mixed_cases(16, max_tokens=MAX_TOKENS)

    async def run(self, num_requests: int) -> None:
        """Run until all calls have ended."""
        places = asyncio.Semaphore(NUM_AT_ONCE)
        async with asyncio.TaskGroup() as tasks:
            for index in range(num_requests):
                await places.acquire()
                task = tasks.create_task(self._one(random.Random(self._seed * 1_000_003 + index)))
                task.add_done_callback(lambda _: places.release())

    async def _one(self, generator: random.Random) -> None:
        case = generator.choice(self._cases).again()
        trial = Trial(case, generator.randint(1, MAX_CHOICES), generator)
        (behaviour,) = generator.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))
        reader = await behaviour(self, trial)
        self.outcomes[_name(behaviour), reader.code] += 1
        self.num_received += reader.num_messages > 0 or reader.code is StatusCode.OK
        self._check(trial, reader.received, is_whole=reader.code is StatusCode.OK)

    def _check(self, trial: Trial, received: Received, *, is_whole: bool) -> None:
        """Received tokens are a prefix of the solo run's; all of them for a served request."""
        for index in range(trial.num_choices):
            tokens = received.choices[index].tokens
            expected = self._solo.tokens(trial.case, choice=index)
            assert tokens == (expected if is_whole else expected[: len(tokens)])

    async def _reads_to_the_end(self, trial: Trial) -> Reader:
        reader = self._caller.generate(trial.request())
        assert await reader.end() is StatusCode.OK, reader.details
        return reader

    async def _cancels(self, trial: Trial) -> Reader:
        reader = self._caller.generate(trial.request())
        await trial.read_some(reader)
        answer = await self._caller.cancel(trial.request_id)
        assert answer in (StatusCode.OK, StatusCode.NOT_FOUND)
        ended = await reader.end()
        assert ended is StatusCode.OK or (answer, ended) == (StatusCode.OK, StatusCode.CANCELLED)
        return reader

    async def _ends_its_call(self, trial: Trial) -> Reader:
        reader = self._caller.generate(trial.request())
        await trial.read_some(reader)
        reader.cancel()
        return reader

    async def _closes_its_connection(self, trial: Trial) -> Reader:
        async with Caller(self._address) as caller:
            reader = caller.generate(trial.request())
            await trial.read_some(reader)
        return reader

    async def _has_a_deadline(self, trial: Trial) -> Reader:
        keep_s = trial.generator.choice((None, SHORT_KEEP_S))
        # Some deadlines are far away, so that on a slow machine too not all of them pass.
        timeout_s = trial.generator.choice((trial.generator.uniform(0.0, 1.5), 120.0))
        reader = self._caller.generate(trial.request(keep_s=keep_s), timeout_s=timeout_s)
        assert await reader.end() in (StatusCode.OK, StatusCode.DEADLINE_EXCEEDED)
        return reader

    async def _attaches_again(self, trial: Trial) -> Reader:
        """Some disconnect before they attach, some replace their own call. Concurrent calls may arrive in
        either order, so each must receive a message before the next.
        """
        reader = self._caller.generate(trial.request(keep_s=LONG_KEEP_S))
        await trial.read_some(reader, at_least=1)
        for _ in range(trial.generator.randint(1, 3)):
            leaves_first = trial.generator.random() < 0.5
            if leaves_first:
                reader.cancel()
                await asyncio.sleep(trial.generator.uniform(0.0, 0.05))  # time without a connection
            attached = self._caller.attach(reader.received)
            await trial.read_some(attached, at_least=1)
            if not leaves_first:
                reader.cancel()
            reader = attached
        assert await reader.end() is StatusCode.OK, reader.details
        assert await self._caller.cancel(trial.request_id) is StatusCode.OK
        return reader

    async def _detaches(self, trial: Trial) -> Reader:
        reader = self._caller.generate(trial.request(keep_s=SHORT_KEEP_S))
        await trial.read_some(reader)
        reader.cancel()
        return reader

    async def _cancels_detached(self, trial: Trial) -> Reader:
        reader = self._caller.generate(trial.request(keep_s=LONG_KEEP_S))
        await trial.read_some(reader, at_least=1)
        reader.cancel()
        assert await self._caller.cancel(trial.request_id) is StatusCode.OK
        # A cancelled request is kept like any ended one.
        assert await self._caller.cancel(trial.request_id) in (StatusCode.OK, StatusCode.NOT_FOUND)
        return reader


Behaviour = Callable[[Storm, Trial], Awaitable[Reader]]


def _name(behaviour: Any) -> str:
    return str(behaviour.__name__.strip("_"))


_WEIGHTS: dict[Behaviour, int] = {
    Storm._reads_to_the_end: 6,
    Storm._cancels: 3,
    Storm._ends_its_call: 3,
    Storm._closes_its_connection: 1,
    Storm._has_a_deadline: 3,
    Storm._attaches_again: 4,
    Storm._detaches: 2,
    Storm._cancels_detached: 2,
}

BEHAVIOURS = frozenset(map(_name, _WEIGHTS))
