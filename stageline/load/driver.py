"""Sends the requests of a plan, each when it is due, and records what comes back."""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TypeAlias

from stageline.errors import ServerError, StagelineError
from stageline.load.plan import PlannedRequest
from stageline.load.record import INTERRUPTED, OK, LoadRun, RequestRecord, Tally
from stageline.output import GenerateOutput

_MOST_AHEAD = 256

Outputs: TypeAlias = AsyncGenerator[GenerateOutput, None]


class Driver:
    """Drives open-loop: a request is sent when it is due, whatever has become of those before.

    `prepare` makes the outputs of a request, and sends nothing before they are read. With `max_concurrency`
    a request that is due waits, in order, while so many run; its latencies count that wait.
    """

    def __init__(
        self, prepare: Callable[[PlannedRequest], Outputs], *, max_concurrency: int | None = None
    ) -> None:
        self._prepare = prepare
        self._slots = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self.tally = Tally()
        self._records: list[RequestRecord] = []
        self._ahead: deque[tuple[PlannedRequest, Outputs]] = deque()
        self._begin_s = time.perf_counter()
        self._sending: asyncio.Task[None] | None = None
        self._is_interrupted = False

    async def run(self, plan: Sequence[PlannedRequest]) -> LoadRun:
        """Once only. Returns when every request has ended, or soon after `interrupt`."""
        self._rest = iter(plan)
        await self._prepare_until(math.inf)
        self._begin_s, cpu_s = time.perf_counter(), time.process_time()
        self._sending = asyncio.create_task(self._send_all(), name="load")
        if self._is_interrupted:
            self._sending.cancel()
        try:
            await self._sending
        except asyncio.CancelledError:
            if not self._is_interrupted:
                raise
        return LoadRun(
            records=tuple(self._records),
            num_planned=len(plan),
            duration_s=self._now_s(),
            cpu_s=time.process_time() - cpu_s,
            is_interrupted=self._is_interrupted,
        )

    def interrupt(self) -> None:
        """Sends nothing more, and cancels what runs."""
        self._is_interrupted = True
        if self._sending is not None:
            self._sending.cancel()

    async def _send_all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while self._ahead:
                planned, outputs = self._ahead.popleft()
                await self._sleep_until(planned.time_s)
                tasks.create_task(self._serve(planned, outputs))
                await self._prepare_until(self._ahead[0][0].time_s if self._ahead else math.inf)

    async def _prepare_until(self, time_s: float) -> None:
        """Prepares requests ahead while none is due: it takes a while, in which nothing is received."""
        while len(self._ahead) < _MOST_AHEAD and (not self._ahead or self._now_s() < time_s):
            planned = next(self._rest, None)
            if planned is None:
                return
            self._ahead.append((planned, self._prepare(planned)))
            await asyncio.sleep(0)

    async def _sleep_until(self, time_s: float) -> None:
        await asyncio.sleep(0)  # where sending is late, receiving must go on all the same
        while self._now_s() < time_s:  # noqa: ASYNC110 - nothing but time is waited for
            await asyncio.sleep(time_s - self._now_s())  # which may end a little early

    async def _serve(self, planned: PlannedRequest, outputs: Outputs) -> None:
        record = RequestRecord(planned=planned)
        self._records.append(record)
        self.tally.num_due += 1
        try:
            async with self._slot(record):
                await self._run(record, outputs)
        except asyncio.CancelledError:
            record.status = INTERRUPTED
            raise
        finally:
            record.ended_s = self._now_s()

    @asynccontextmanager
    async def _slot(self, record: RequestRecord) -> AsyncIterator[None]:
        due_s = self._now_s()
        if self._slots is None:
            record.sent_s = due_s
            yield
            return
        async with self._slots:
            record.sent_s = self._now_s()
            record.slot_wait_s = record.sent_s - due_s
            yield

    async def _run(self, record: RequestRecord, outputs: Outputs) -> None:
        self.tally.num_running += 1
        try:
            await self._receive(record, outputs)
            self.tally.num_completed += 1
        except StagelineError as error:
            record.status, record.error = error.code, error.message
            self.tally.num_failed += 1
        finally:
            self.tally.num_running -= 1

    async def _receive(self, record: RequestRecord, outputs: Outputs) -> None:
        async with aclosing(outputs):
            async for output in outputs:
                self._take(record, output)
        if record.num_tokens != record.planned.output_tokens:
            raise ServerError(
                f"{record.num_tokens} tokens came, of the {record.planned.output_tokens} that were asked for"
            )
        record.status = OK

    def _take(self, record: RequestRecord, output: GenerateOutput) -> None:
        if num_tokens := len(output.token_ids):
            record.message_times_s.append(self._now_s())
            record.message_tokens.append(num_tokens)
            self.tally.output_tokens += num_tokens
        if output.usage is not None:
            record.cached_tokens = output.usage.cached_tokens
            record.restarts = output.usage.restarts

    def _now_s(self) -> float:
        # The clock of a uvloop counts whole milliseconds, and stands while callbacks run.
        return time.perf_counter() - self._begin_s
