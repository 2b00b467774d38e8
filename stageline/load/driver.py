"""Sends the requests of a plan when they are due and records the outputs."""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from stageline.client.client import Client
from stageline.client.errors import ServerError, StagelineError
from stageline.client.output import GenerateOutput
from stageline.load.plan import Arrivals, LoadSpec, PlannedRequest, Prompts, check_fits, make_plan
from stageline.load.results import INTERRUPTED, OK, Limits, LoadRun, MeasuredRequest, Tally
from stageline_rpc.v1 import inference_pb2
from wire.ids import id_text, new_request_id

_MOST_AHEAD = 256

Outputs: TypeAlias = AsyncGenerator[GenerateOutput, None]


class Driver:
    """Open-loop driver: sends each request when it is due, independent of earlier ones.

    `prepare` creates a request's output iterator, and sends nothing before it is read. With
    `max_concurrency`, due requests wait in order for a free slot; latencies include that wait.
    """

    def __init__(
        self, prepare: Callable[[PlannedRequest], Outputs], *, max_concurrency: int | None = None
    ) -> None:
        self._prepare = prepare
        self._slots = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self.tally = Tally()
        self._records: list[MeasuredRequest] = []
        self._ahead: deque[tuple[PlannedRequest, Outputs]] = deque()
        self._begin_s = time.perf_counter()
        self._sending: asyncio.Task[None] | None = None
        self._is_interrupted = False

    async def run(self, plan: Sequence[PlannedRequest]) -> LoadRun:
        """Run once; returns when every request has ended, or soon after `interrupt`."""
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
        """Stop sending, and cancel running requests."""
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
        """Prepare requests in advance while none is due, since preparation blocks the event loop."""
        while len(self._ahead) < _MOST_AHEAD and (not self._ahead or self._now_s() < time_s):
            planned = next(self._rest, None)
            if planned is None:
                return
            self._ahead.append((planned, self._prepare(planned)))
            await asyncio.sleep(0)

    async def _sleep_until(self, time_s: float) -> None:
        await asyncio.sleep(0)  # receiving must continue even if sending is late
        while self._now_s() < time_s:  # noqa: ASYNC110 - waits for time only
            await asyncio.sleep(time_s - self._now_s())  # a timer may fire slightly early

    async def _serve(self, planned: PlannedRequest, outputs: Outputs) -> None:
        record = MeasuredRequest(planned=planned)
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
    async def _slot(self, record: MeasuredRequest) -> AsyncIterator[None]:
        due_s = self._now_s()
        if self._slots is None:
            record.sent_s = due_s
            yield
            return
        async with self._slots:
            record.sent_s = self._now_s()
            record.slot_wait_s = record.sent_s - due_s
            yield

    async def _run(self, record: MeasuredRequest, outputs: Outputs) -> None:
        self.tally.num_running += 1
        try:
            await self._receive(record, outputs)
            self.tally.num_completed += 1
        except StagelineError as error:
            record.status, record.reason, record.error = error.code, error.reason, error.message
            self.tally.num_failed += 1
        finally:
            self.tally.num_running -= 1

    async def _receive(self, record: MeasuredRequest, outputs: Outputs) -> None:
        async with aclosing(outputs):
            async for output in outputs:
                self._take(record, output)
        if record.num_tokens != record.planned.output_tokens:
            raise ServerError(f"received {record.num_tokens} tokens, expected {record.planned.output_tokens}")
        record.status = OK

    def _take(self, record: MeasuredRequest, output: GenerateOutput) -> None:
        if num_tokens := len(output.token_ids):
            record.message_times_s.append(self._now_s())
            record.message_tokens.append(num_tokens)
            self.tally.output_tokens += num_tokens
        if output.usage is not None:
            record.cached_tokens = output.usage.cached_tokens
            record.restarts = output.usage.restarts

    def _now_s(self) -> float:
        # uvloop's clock has millisecond resolution, and does not advance during callbacks.
        return time.perf_counter() - self._begin_s


_NUM_SEEDS = 2**64


class Target:
    """Creates the requests of one run.

    Outputs have exactly the planned lengths, because end-of-sequence ids are ignored. A cache salt per run
    prevents cache hits between runs with the same seed.
    """

    def __init__(
        self, client: Client, spec: LoadSpec, *, vocab_size: int, temperature: float, timeout_s: float
    ) -> None:
        self._client = client
        self._prompts = Prompts(spec, vocab_size)
        self._seed = spec.seed
        self._temperature = temperature
        self._timeout_s = timeout_s
        self._cache_salt = id_text(new_request_id())

    def prepare(self, request: PlannedRequest) -> Outputs:
        """The outputs of a request, which is sent at the first read."""
        return self._client.generate(
            self._prompts.token_ids(request),
            max_tokens=request.output_tokens,
            ignore_eos=True,
            temperature=self._temperature,
            seed=(self._seed + request.index) % _NUM_SEEDS,
            cache_salt=self._cache_salt,
            timeout_s=self._timeout_s,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig:
    """A load, its target cluster, and limits for good requests. Raises ValueError."""

    coordinator: str
    spec: LoadSpec
    limits: Limits
    tls_dir: Path | None = None
    max_concurrency: int | None = None
    num_warmups: int = 0
    temperature: float = 0.0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"maximum concurrency is {self.max_concurrency}, must be at least 1")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"a temperature of {self.temperature:g} is not at least 0 and finite")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"a timeout of {self.timeout_s:g} s is not above 0 and finite")


class WarmupFailed(Exception):
    """A warm-up request failed; the text has the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedLoad:
    """A load, with a connection to its cluster."""

    config: LoadConfig
    model: inference_pb2.GetModelResponse
    client: Client

    def check_fits(self, plan: Sequence[PlannedRequest]) -> None:
        """Raises ValueError if a planned or warm-up request exceeds the model's maximum length."""
        for requests in (plan, make_plan(_warmup_spec(self.config)) if self.config.num_warmups else ()):
            check_fits(requests, self.model.max_sequence_tokens)

    async def warm_up(self) -> None:
        """Send the warm-up requests concurrently, with a cache of their own. Raises WarmupFailed."""
        if not self.config.num_warmups:
            return
        spec = _warmup_spec(self.config)
        records = (await self._driver(spec).run(make_plan(spec))).records
        failed = [record for record in records if record.has_failed]
        if failed:
            why = f"{failed[0].status}: {failed[0].error}"
            raise WarmupFailed(f"{len(failed)} of {len(records)} warm-up requests failed: {why}")

    def driver(self) -> Driver:
        return self._driver(self.config.spec)

    def _driver(self, spec: LoadSpec) -> Driver:
        target = Target(
            self.client,
            spec,
            vocab_size=self.model.vocab_size,
            temperature=self.config.temperature,
            timeout_s=self.config.timeout_s,
        )
        return Driver(target.prepare, max_concurrency=self.config.max_concurrency)


@asynccontextmanager
async def prepared(config: LoadConfig) -> AsyncIterator[PreparedLoad]:
    """Connect and read the model's limits."""
    async with Client(config.coordinator, tls_dir=config.tls_dir) as client:
        yield PreparedLoad(config=config, model=await client.model(), client=client)


def _warmup_spec(config: LoadConfig) -> LoadSpec:
    return replace(
        config.spec,
        arrivals=Arrivals(rate_per_s=math.inf),
        num_requests=config.num_warmups,
        duration_s=None,
    )
