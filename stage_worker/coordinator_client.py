"""Cluster membership of this worker: one `MembershipService.Join` stream, reconnected with backoff."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from stage_worker.policy import WORKER_POLICY
from stage_worker.readiness import Readiness
from stage_worker.stage_manager import StageManager
from stageline_rpc.internal.v1 import join_pb2, join_pb2_grpc
from wire.clock import ClusterClock, Exchange, wall_clock_us
from wire.condition import Condition
from wire.transport import PLAIN, Transport
from wire.unreachable import SILENT, unreachable_cause

log = logging.getLogger(__name__)


LOADING_BEATS = 4
"""Heartbeats per interval in a load: a tokenizer's tables hold the GIL for most of a second."""

# Retrying does not help: worker and coordinator are incompatible, or the server is not a coordinator.
_FATAL = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
)

Call = grpc.aio.StreamStreamCall[join_pb2.JoinRequest, join_pb2.JoinResponse]


class JoinRefused(Exception):
    """The coordinator rejected this worker permanently."""


class CoordinatorSilent(Exception):
    """The coordinator sent nothing for a whole lease."""


@dataclass(frozen=True, slots=True)
class _Left:
    """The coordinator ordered this worker to leave."""

    reason: str
    exit_process: bool


class CoordinatorClient:
    """Joins and rejoins until dismissed. A lost connection ends the epoch but keeps the loaded stage."""

    def __init__(
        self,
        *,
        coordinator: str,
        new_hello: Callable[[], join_pb2.WorkerHello],
        heartbeat: Callable[[], join_pb2.Heartbeat],
        stage: StageManager,
        clock: ClusterClock,
        transport: Transport = PLAIN,
    ) -> None:
        """`new_hello` and `heartbeat` are called for each connection and heartbeat."""
        self._readiness = Readiness()
        self._coordinator, self._transport = coordinator, transport
        self._new_hello = new_hello
        self._heartbeat = heartbeat
        self._stage = stage
        self._clock = clock
        self._backoff_s = WORKER_POLICY.first_rejoin_delay_s
        self._logged_outage = ""
        self._naming: asyncio.Task[None] | None = None
        self._rejoin_secret = b""
        self._connection: _Connection | None = None
        self._is_leaving = False
        self.leave_timeout_s = WORKER_POLICY.loading_timeout_s
        """Maximum wait for the coordinator's Leave after `ask_to_leave`."""

    def condition(self) -> Condition:
        """Whether the worker is of use to its cluster. Called from any thread."""
        return self._readiness.condition()

    def ask_to_leave(self) -> bool:
        """Ask the coordinator to drain this worker, which ends `run`. Returns False without a connection."""
        self.stop_dialling()
        if self._connection is None:
            return False
        self._connection.send(join_pb2.JoinRequest(drain_requested=join_pb2.DrainRequested()))
        return True

    def stop_dialling(self) -> None:
        """Make `run` return when the current connection has ended."""
        self._is_leaving = True
        self._readiness.leave()

    async def run(self) -> None:
        """Join, and rejoin, until the coordinator orders the process to exit. Raises JoinRefused."""
        try:
            await self._join_until_left()
        finally:
            if self._naming is not None:
                self._naming.cancel()

    async def _join_until_left(self) -> None:
        while True:
            try:
                left = await self._join_once()
            except (grpc.aio.AioRpcError, TimeoutError, CoordinatorSilent) as error:
                self._log_outage(error)
            else:
                log.info("leaving the cluster: %s", left.reason)
                if left.exit_process:
                    return
                self._backoff_s = WORKER_POLICY.max_rejoin_delay_s
            if self._is_leaving:
                return
            await asyncio.sleep(self._backoff_s)
            self._backoff_s = min(2 * self._backoff_s, WORKER_POLICY.max_rejoin_delay_s)

    async def _join_once(self) -> _Left:
        async with self._transport.channel(self._coordinator) as channel:
            call: Call = join_pb2_grpc.MembershipServiceStub(channel).Join()
            try:
                return await self._serve(call)
            finally:
                call.cancel()

    async def _serve(self, call: Call) -> _Left:
        async with asyncio.timeout(WORKER_POLICY.welcome_timeout_s):
            welcome = await self._welcome(call)
        self._backoff_s, self._logged_outage = WORKER_POLICY.first_rejoin_delay_s, ""
        self.leave_timeout_s = welcome.drain_timeout_ms / 1000 + WORKER_POLICY.loading_timeout_s
        self._rejoin_secret = welcome.rejoin_secret
        log.info("joined the coordinator at %s", self._coordinator)
        self._readiness.observe(join_pb2.JoinResponse(welcome=welcome))
        connection = self._connection = _Connection(call, self._readiness)
        self._stage.connected(connection.send, welcome, rejoin=connection.end)
        heartbeats = asyncio.create_task(self._beat(connection, welcome.heartbeat_interval_ms / 1000))
        writer = asyncio.create_task(connection.write())
        try:
            return await self._read(call, connection, lease_s=welcome.lease_ms / 1000 or None)
        finally:
            self._connection = None
            for task in (heartbeats, writer):
                task.cancel()
            await asyncio.gather(heartbeats, writer, return_exceptions=True)
            self._stage.disconnected()
            self._readiness.disconnected()

    async def _beat(self, connection: "_Connection", interval_s: float) -> None:
        while True:
            self._clock.refresh()
            heartbeat = self._heartbeat()
            heartbeat.clock_offset_us = self._clock.offset_us
            heartbeat.clock_uncertainty_us = self._clock.uncertainty_us or 0
            heartbeat.sent_at_us = wall_clock_us()
            connection.send(join_pb2.JoinRequest(heartbeat=heartbeat))
            await asyncio.sleep(interval_s / LOADING_BEATS if self._stage.is_loading else interval_s)

    async def _welcome(self, call: Call) -> join_pb2.Welcome:
        hello = self._new_hello()
        hello.rejoin_secret = self._rejoin_secret
        await _write(call, join_pb2.JoinRequest(hello=hello))
        message = await _read(call)
        if message.WhichOneof("message") != "welcome":
            raise JoinRefused(
                f"{self._coordinator} answered {message.WhichOneof('message')!r} where 'welcome' was due"
            )
        if message.welcome.heartbeat_interval_ms == 0:
            raise JoinRefused(f"heartbeat interval of {self._coordinator} is 0 ms, must be positive")
        return message.welcome

    async def _read(self, call: Call, connection: "_Connection", *, lease_s: float | None) -> _Left:
        """Dispatch messages. Heartbeats are answered, so `lease_s` of silence means a lost coordinator."""
        while True:
            try:
                async with asyncio.timeout(lease_s):
                    message = await _read(call)
            except TimeoutError:
                raise CoordinatorSilent(f"silent for {lease_s:g} s") from None
            self._readiness.observe(message)
            match message.WhichOneof("message"):
                case (
                    "assign"
                    | "begin_epoch"
                    | "end_epoch"
                    | "serving"
                    | "verify_weights"
                    | "report_states"
                    | "prefetch_weights"
                    | "measure_links"
                ) as order:
                    self._stage.submit(getattr(message, order), connection.send)
                case "heartbeat_answer":
                    answer = message.heartbeat_answer
                    self._clock.note(
                        Exchange(
                            answer.sent_at_us, answer.received_at_us, answer.answered_at_us, wall_clock_us()
                        )
                    )
                case "leave":
                    return _Left(message.leave.reason, message.leave.exit_process)
                case unknown:
                    log.warning("ignored unknown coordinator message %r", unknown)

    def _log_outage(self, error: Exception) -> None:
        """Log once per kind of outage. Raises JoinRefused where retrying cannot help."""
        kind = "TIMEOUT"
        if isinstance(error, grpc.aio.AioRpcError):
            kind, reason = error.code().name, f"{error.code().name}: {error.details()}"
            if error.code() in _FATAL:
                raise JoinRefused(f"the coordinator at {self._coordinator} refuses this worker: {reason}")
        elif isinstance(error, CoordinatorSilent):
            kind = reason = str(error)
        else:
            reason = f"no welcome within {WORKER_POLICY.welcome_timeout_s:g} s"
        if self._is_leaving:
            log.info("the connection to the coordinator at %s ended (%s)", self._coordinator, reason)
            return
        if isinstance(error, CoordinatorSilent):
            self._log_waiting(kind, reason)
        elif self._naming is None or self._naming.done():
            # Beside the next tries, which need not wait for it.
            self._naming = asyncio.create_task(self._name_cause(kind, reason))

    async def _name_cause(self, kind: str, reason: str) -> None:
        cause = await unreachable_cause(self._coordinator, self._transport)
        if self._connection is not None or self._is_leaving:
            return
        if cause == SILENT:
            self._log_waiting(kind, reason)
        else:
            self._log_waiting(cause, cause)

    def _log_waiting(self, kind: str, reason: str) -> None:
        if self._logged_outage != kind:
            log.info("waiting for the coordinator at %s: %s", self._coordinator, reason)
            self._logged_outage = kind


class _Connection:
    """Outgoing messages of one Join stream; dropped when it has ended."""

    def __init__(self, call: Call, readiness: Readiness) -> None:
        self._call, self._readiness = call, readiness
        self._outbox: asyncio.Queue[join_pb2.JoinRequest | None] = asyncio.Queue()

    def send(self, message: join_pb2.JoinRequest) -> None:
        self._readiness.observe(message)
        self._outbox.put_nowait(message)

    def end(self) -> None:
        """End the stream after the messages so far: the coordinator closes it, and the worker joins again."""
        self._outbox.put_nowait(None)

    async def write(self) -> None:
        """Write until the stream ends or breaks, which the reader notices too."""
        while (message := await self._outbox.get()) is not None:
            await _write(self._call, message)
        await self._call.done_writing()


async def _write(call: Call, message: join_pb2.JoinRequest) -> None:
    try:
        await call.write(message)
    except asyncio.InvalidStateError:
        await _raise_ended(call)


async def _read(call: Call) -> join_pb2.JoinResponse:
    message: Any = await call.read()
    if message is grpc.aio.EOF:
        await _raise_ended(call)
    answer: join_pb2.JoinResponse = message
    return answer


async def _raise_ended(call: Call) -> None:
    """Raise the status of an ended call, even if it is OK."""
    code, details = await call.code(), await call.details()
    raise grpc.aio.AioRpcError(
        code,
        await call.initial_metadata(),
        await call.trailing_metadata(),
        details=details or "the stream ended",
    )
