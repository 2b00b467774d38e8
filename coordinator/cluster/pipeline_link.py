"""The coordinator's end of the pipeline for one epoch: steps to FIRST."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import grpc

from stageline_rpc.v1 import stage_pb2
from wire.channels import client_channel
from wire.clock import wall_clock_us
from wire.forward_call import HELLO_RETRY_S, ForwardCall, open_forward
from wire.frames import encode_frame
from wire.log_fields import about
from wire.step_codec import encode_step
from wire.steps import Step

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 5.0


class LinkBroken(Exception):
    """FIRST does not accept the stream, or the stream has ended."""


class PipelineLink:
    """One `Stage.Forward` stream. Steps go out in the order of `send`; the scheduler bounds their number."""

    def __init__(
        self,
        address: str,
        hello: stage_pb2.HopHello,
        on_broken: Callable[[str], None],
        *,
        worker: str = "FIRST",
        now_us: Callable[[], int] = wall_clock_us,
    ) -> None:
        """`on_broken` is called at most once, with the reason, when an open stream ends by itself. `now_us`:
        microseconds since 1970. `worker` is who listens at `address`.
        """
        self._where = f"stage 0 (worker {worker} at {address})"
        self._channel = client_channel(address)
        self._hello = hello
        self._on_broken = on_broken
        self._now_us = now_us
        self._steps: asyncio.Queue[tuple[Step, int]] = asyncio.Queue()
        self._call: ForwardCall | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def send(self, step: Step) -> None:
        """Queues a step; never blocks."""
        self._steps.put_nowait((step, self._now_us()))

    async def open(self) -> None:
        """Dials FIRST and waits until it accepts. Raises LinkBroken with the reason."""
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                call, response = await self._greet()
        except TimeoutError:
            raise LinkBroken(f"{self._where} did not accept within {OPEN_TIMEOUT_S:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise LinkBroken(f"{self._where} refused: {error.details()}") from error
        if not isinstance(response, stage_pb2.ForwardResponse):
            raise LinkBroken(f"{self._where} ended the stream instead of accepting it")
        log.debug("%s accepts steps", self._where, extra=about(epoch=self._hello.epoch))
        self._tasks = [asyncio.create_task(self._watch(call)), asyncio.create_task(self._write(call))]

    async def close(self) -> None:
        """Ends the stream; safe in every state and more than once."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._call is not None:
            self._call.cancel()
        await self._channel.close()

    async def _greet(self) -> tuple[ForwardCall, Any]:
        """The call with the answer to its hello, which is sent again while too many others wait there."""
        hello = stage_pb2.ForwardRequest(hello=self._hello).SerializeToString()
        while True:
            # With an iterator of requests, gRPC leaves a task behind that complains when it is collected.
            call = self._call = open_forward(self._channel)
            try:
                with contextlib.suppress(asyncio.InvalidStateError):  # it has ended, and reading says why
                    await call.write(hello)
                return call, await call.read()
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
            await asyncio.sleep(HELLO_RETRY_S)

    async def _write(self, call: ForwardCall) -> None:
        """Until the stream ends, which the watcher notices too."""
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            while True:
                step, ready_at_us = await self._steps.get()
                for message in encode_frame(encode_step(step), step.step_id, None, ready_at_us=ready_at_us):
                    await call.write(message)

    async def _watch(self, call: ForwardCall) -> None:
        try:
            await call.read()
            reason = f"{self._where} ended the stream"
        except grpc.aio.AioRpcError as error:
            reason = f"the connection to {self._where} broke: {error.code().name} {error.details()}"
        self._on_broken(reason)
