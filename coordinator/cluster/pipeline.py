"""The coordinator's ends of the pipeline: the step stream to FIRST, the result stream from LAST."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import grpc

from certificates.identity import Identity, Role
from coordinator.cluster.actions import BeginEpoch
from coordinator.cluster.messages import check_results_hello, encode_begin, encode_hop_hello
from stageline_rpc.internal.v1 import forward_pb2, join_pb2
from wire.channels import OrderedWrites
from wire.clock import wall_clock_us
from wire.errors import StaleStream
from wire.frames import encode_step_frame
from wire.ids import Incarnation
from wire.log_context import log_context
from wire.peer_secrets import HopSecrets, RefusedPeers
from wire.stage_calls import HELLO_RETRY_S, ForwardCall, open_forward
from wire.step_codec import encode_step
from wire.steps import Step
from wire.tensors import HopRoute
from wire.transport import PLAIN, Transport

log = logging.getLogger(__name__)


class LinkBroken(Exception):
    """FIRST did not accept the step stream, or the stream ended."""


class PipelineLink:
    """One `StageService.Forward` stream; sends steps in order. The scheduler bounds their number."""

    def __init__(
        self,
        address: str,
        hello: forward_pb2.HopHello,
        on_broken: Callable[[str], None],
        *,
        worker: str = "FIRST",
        timeout_s: float,
        now_us: Callable[[], int] = wall_clock_us,
        transport: Transport = PLAIN,
    ) -> None:
        """Create a link that is not open yet.

        Args:
            address: where FIRST listens.
            hello: first message of the stream.
            on_broken: called at most once, with the reason, when an open stream ends.
            worker: name of FIRST, for messages.
            timeout_s: limit for FIRST to accept the stream.
            now_us: wall clock, in microseconds since 1970.
        """
        self._where = f"stage 0 (worker {worker} at {address})"
        self._channel = transport.channel(address)
        self._hello = hello
        self._on_broken = on_broken
        self._timeout_s = timeout_s
        self._now_us = now_us
        self._writes = OrderedWrites()
        self._call: ForwardCall | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def send(self, step: Step) -> None:
        """Hand a step to gRPC in this turn of the event loop, or queue it behind an unfinished write."""
        self._writes.put(encode_step_frame(encode_step(step), ready_at_us=self._now_us()))

    async def open(self) -> None:
        """Connect to FIRST and wait until it accepts the stream. Raises LinkBroken with the reason."""
        try:
            async with asyncio.timeout(self._timeout_s):
                call, response = await self._handshake()
        except TimeoutError:
            raise LinkBroken(f"{self._where} did not accept within {self._timeout_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise LinkBroken(f"{self._where} refused: {error.details()}") from error
        if not isinstance(response, forward_pb2.ForwardResponse):
            raise LinkBroken(f"{self._where} ended the stream instead of accepting it")
        log.debug("%s accepted the step stream", self._where, extra=log_context(epoch=self._hello.epoch))
        self._tasks = [asyncio.create_task(self._watch(call)), asyncio.create_task(self._write(call))]

    async def close(self) -> None:
        """End the stream; may be called in every state and repeatedly."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._call is not None:
            self._call.cancel()
        await self._channel.close()

    async def _handshake(self) -> tuple[ForwardCall, Any]:
        """Open a call and read the reply to its hello; retries while FIRST has too many waiting streams."""
        hello = forward_pb2.ForwardRequest(hello=self._hello).SerializeToString()
        while True:
            # With a request iterator, gRPC leaves a task behind that logs an error when it is collected.
            call = self._call = open_forward(self._channel)
            try:
                with contextlib.suppress(asyncio.InvalidStateError):  # ended; `read` raises the reason
                    await call.write(hello)
                return call, await call.read()
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
            await asyncio.sleep(HELLO_RETRY_S)

    async def _write(self, call: ForwardCall) -> None:
        """Finish or do the writes of `send` until the stream ends, which `_watch` reports."""
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await self._writes.run(call)

    async def _watch(self, call: ForwardCall) -> None:
        try:
            await call.read()
            reason = f"{self._where} ended the stream"
        except grpc.aio.AioRpcError as error:
            reason = f"the connection to {self._where} broke: {error.code().name} {error.details()}"
        self._on_broken(reason)


class Pipeline:
    """Owns the streams and hop secrets of the current epoch."""

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        fingerprint: str,
        connect_timeout_s: float,
        new_secret: Callable[[], bytes],
        refused: RefusedPeers,
        transport: Transport = PLAIN,
        hop_route: HopRoute = HopRoute.AUTO,
    ) -> None:
        """`new_secret` creates the secret of a hop; `refused` counts and logs streams with a wrong secret."""
        self._new_secret, self._transport, self._hop_route = new_secret, transport, hop_route
        self._secrets: tuple[bytes, ...] = ()
        self._incoming = HopSecrets(refused)
        self._has_results = False
        self._incarnation = incarnation
        self._fingerprint = fingerprint
        self._connect_timeout_s = connect_timeout_s
        self._begun: BeginEpoch | None = None
        self._link: PipelineLink | None = None

    def expect(self, action: BeginEpoch) -> None:
        """Create the secrets of an epoch and accept its result stream."""
        self._begun, self._has_results = action, False
        self._secrets = tuple(self._new_secret() for _ in range(len(action.workers) + 1))
        self._incoming.begin_epoch(self._secrets[-1], (Role.WORKER, action.workers[-1].name))

    def begin_message(self, action: BeginEpoch, stage: int) -> join_pb2.JoinResponse:
        """Encode `BeginEpoch` for one stage, with the secrets of its incoming and outgoing hops."""
        assert action is self._begun, "secrets are of one epoch"
        return encode_begin(
            action,
            incarnation=self._incarnation,
            incoming_secret=self._secrets[stage],
            outgoing_secret=self._secrets[stage + 1],
            hop_route=self._hop_route,
        )

    def new_link(self, action: BeginEpoch, on_broken: Callable[[str], None]) -> PipelineLink:
        """Create the step stream of this epoch, after `release` of the previous one."""
        assert self._link is None, "an epoch has one stream"
        hello = encode_hop_hello(action, incarnation=self._incarnation, fingerprint=self._fingerprint)
        hello.secret = self._secrets[0]
        first = action.workers[0]
        self._link = PipelineLink(
            *(first.address, hello, on_broken),
            worker=first.name,
            timeout_s=self._connect_timeout_s,
            transport=self._transport,
        )
        return self._link

    def send(self, step: Step) -> None:
        """Send a step of the current epoch; see `PipelineLink.send`."""
        assert self._link is not None, "no epoch has started"
        self._link.send(step)

    def release(self) -> PipelineLink | None:
        """Remove the step stream and return it for closing."""
        link, self._link = self._link, None
        return link

    def accept_results(
        self, hello: forward_pb2.HopHello, *, epoch: int, host: str, caller: Identity | None = None
    ) -> None:
        """Accept the result stream of LAST from `host`, once per epoch; `epoch` is the current one.

        Raises AccessDenied, SecretMismatch, StaleStream or HandshakeMismatch.
        """
        self._incoming.check(hello.secret, host=host, caller=caller)
        if self._begun is None or hello.epoch != epoch:
            raise StaleStream(f"result stream is of epoch {hello.epoch}, the current epoch is {epoch}")
        check_results_hello(hello, self._begun, incarnation=self._incarnation, fingerprint=self._fingerprint)
        if self._has_results:
            raise StaleStream(f"epoch {epoch} already has a result stream")
        self._has_results = True
