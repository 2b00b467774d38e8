"""Calls that send their single message slowly: gRPC buffers a message until it is complete."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil

from wire.errors import Overloaded

log = logging.getLogger(__name__)

Message = TypeVar("Message")

MAX_PER_HOST = 8
MAX_READS = 16
MAX_GROWTH_BYTES = 128 * 2**20
"""Growth of the process since a read began that ends the reads beyond both limits."""
MAX_READS_GROWTH_BYTES = 384 * 2**20
"""Growth that ends all reads: 16 more messages of 16 MiB.

Few reads can take more memory than their messages. gRPC keeps the buffer of the socket behind each frame of a
message, and a frame of 24 bytes may come with kilobytes of other frames.
"""
CALL_BYTES = 30_000
"""Memory of an open call in a server before any message."""
GRACE_S = 0.1
"""A read that takes longer is long; a shorter one holds only the bytes that arrive in this time."""
TIMEOUT_S = 30.0
SAMPLE_S = 0.05
TRIM_S = 0.2
"""Delay from the end of reads to the return of their memory; gRPC has freed it by then."""
_RETRY_AFTER_S = 1.0


def _resident_bytes() -> int:
    """Memory of this process, without mapped files if the system counts them separately."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))


@dataclass(frozen=True, slots=True)
class _Size:
    """Memory and open calls of the process at one time."""

    resident_bytes: int
    num_calls: int


class _ProcessSize:
    """Measures the growth of the process, without the memory of its open calls."""

    def __init__(self, resident: Callable[[], int]) -> None:
        self._resident = resident
        self._resident_bytes = 0
        self.num_calls = 0
        self.now()

    def last(self) -> _Size:
        """Current calls with the last measured memory."""
        return _Size(self._resident_bytes, self.num_calls)

    def now(self) -> _Size:
        """Measure; without free file descriptors, keep the last measured memory."""
        try:
            self._resident_bytes = self._resident()
        except (OSError, psutil.Error) as error:
            log.debug("cannot measure the memory of this process: %s", error)
        return self.last()

    def trim(self) -> None:
        """Return freed memory to the system, so that the next growth is counted from below it."""
        with contextlib.suppress(AttributeError):  # glibc alone has it
            ctypes.CDLL(None).malloc_trim(0)

    def growth_since(self, before: _Size) -> int:
        now = self.now()
        new_calls = max(0, now.num_calls - before.num_calls)
        return now.resident_bytes - before.resident_bytes - CALL_BYTES * new_calls


class MessageReads:
    """Ends long reads when the process grows with them: first reads beyond the limits, then all.

    gRPC does not report a message before it is complete, so the size of the process is measured instead.
    Many small messages of slow clients do not change it, and continue.
    """

    def __init__(
        self,
        *,
        max_per_host: int = MAX_PER_HOST,
        max_reads: int = MAX_READS,
        max_growth_bytes: int = MAX_GROWTH_BYTES,
        max_reads_growth_bytes: int = MAX_READS_GROWTH_BYTES,
        grace_s: float = GRACE_S,
        timeout_s: float = TIMEOUT_S,
        resident: Callable[[], int] = _resident_bytes,
    ) -> None:
        """Beyond `max_growth_bytes` a host keeps `max_per_host` long reads, and all hosts `max_reads`."""
        self._max_per_host, self._max_reads = max_per_host, max_reads
        self._max_growth, self._max_reads_growth = max_growth_bytes, max_reads_growth_bytes
        self._grace_s, self._timeout_s = grace_s, timeout_s
        self._size = _ProcessSize(resident)
        self._reads: dict[_LongRead, None] = {}  # the oldest first
        self._sampler: asyncio.TimerHandle | None = None
        self._trimmer: asyncio.TimerHandle | None = None

    def begin_call(self) -> None:
        """Count an open call of the server, of `CALL_BYTES`."""
        self._size.num_calls += 1

    def end_call(self) -> None:
        """An open call has ended."""
        self._size.num_calls -= 1

    async def read(self, host: str, receive: Callable[[], Awaitable[Message]]) -> Message:
        """Return the message of a call of `host` that `receive` waits for.

        Raises Overloaded for one that takes too long; `receive` then goes on until the call ends.
        """
        message = begin_receive(receive)
        await asyncio.wait((message,), timeout=self._grace_s)
        return message.result() if message.done() else await self._read_long(host, message)

    async def _read_long(self, host: str, message: asyncio.Future[Message]) -> Message:
        if self._sampler is None:
            self._sample_later()
        # Beside others it is at most as old as a sample.
        read = _LongRead(host, self._size.last() if self._reads else self._size.now())
        self._reads[read] = None
        either = (message, read.refusal)
        try:
            await asyncio.wait(either, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._reads.pop(read, None)
        if message.done():
            return message.result()
        problem = f"the call's message is incomplete, after {read.age_s:.3g} s"
        if read.refusal.done():
            problem += f": {read.refusal.result()}"
        raise Overloaded(problem, retry_after_s=_RETRY_AFTER_S)

    def _sample_later(self) -> None:
        self._sampler = asyncio.get_running_loop().call_later(SAMPLE_S, self._sample)

    def _sample(self) -> None:
        self._sampler = None
        if (oldest := next(iter(self._reads), None)) is None:
            return
        growth = self._size.growth_since(oldest.before)
        if growth > self._max_growth:
            facts = f"the server's memory grew by {growth >> 20} MiB since"
            limit = self._max_reads_growth
            too_much = f"{facts}, the limit of all such messages is {limit >> 20} MiB"
            ended = dict.fromkeys(self._reads, too_much) if growth > limit else self._surplus(facts)
            for read, problem in ended.items():
                del self._reads[read]
                read.refusal.set_result(problem)
            if ended and not self._trimmer:
                self._trimmer = asyncio.get_running_loop().call_later(TRIM_S, self._trim)
        self._sample_later()

    def _trim(self) -> None:
        self._trimmer = None
        asyncio.get_running_loop().run_in_executor(None, self._size.trim)

    def _surplus(self, facts: str) -> dict[_LongRead, str]:
        """Reads beyond the limit of their host, then reads beyond the limit of all hosts, with the reason.

        Per host the newest reads stay; over all hosts, each host keeps as many as there is room for.
        """
        surplus: dict[_LongRead, str] = {}
        num_of_host = Counter(read.host for read in self._reads)
        places = Counter[str]()
        within: list[tuple[int, _LongRead]] = []
        for read in reversed(self._reads):
            place, limit = places[read.host], self._max_per_host
            places[read.host] += 1
            if place < limit:
                within.append((place, read))
            else:
                surplus[read] = (
                    f"{facts}, and host {read.host} has {num_of_host[read.host]} such messages, "
                    f"the limit is {limit}"
                )
        within.sort(key=lambda found: found[0])
        problem = f"{facts}, and the server has {len(within)} such messages, the limit is {self._max_reads}"
        return surplus | {read: problem for _, read in within[self._max_reads :]}


class _LongRead:
    """A message that is incomplete after the grace."""

    __slots__ = ("_began_s", "_loop", "before", "host", "refusal")

    def __init__(self, host: str, before: _Size) -> None:
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self.host, self.before = host, before
        self.refusal: asyncio.Future[str] = self._loop.create_future()

    @property
    def age_s(self) -> float:
        return self._loop.time() - self._began_s


def begin_receive(receive: Callable[[], Awaitable[Message]]) -> asyncio.Future[Message]:
    """Begin to receive a message; its receiver may stop waiting before the end.

    It is not to be cancelled: gRPC's operation goes on until the call ends, and writes into objects that a
    cancelled one may have freed.
    """
    message = asyncio.ensure_future(_received(receive))
    message.add_done_callback(_retrieve)
    return message


async def receive_within(receive: Callable[[], Awaitable[Message]], timeout_s: float) -> Message:
    """Receive a message. Raises TimeoutError: the caller then ends the call, which ends the receive."""
    message = begin_receive(receive)
    await asyncio.wait((message,), timeout=timeout_s)
    if not message.done():
        raise TimeoutError
    return message.result()


async def _received(receive: Callable[[], Awaitable[Message]]) -> Message:
    return await receive()


def _retrieve(message: asyncio.Future[Any]) -> None:
    if not message.cancelled():
        message.exception()
