"""A node of a ring of raw grpc.aio streams, the lower bound of a hop.

python -m bench.harness.ring_node NEXT_ADDRESS PLACE PAUSE_S

Answers its first question with {"address": ...} and serves until its input ends. A node reads each message
from one long-lived stream and writes it to the next in the same coroutine, under uvloop, with the product's
channel options, without protobuf and without a checksum. With a pause it holds each message for so long, as a
mock stage computes: processes that sleep wake up later than processes that are always busy.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import uvloop

from bench.harness.ring_message import Place, passed_on
from stage_worker.backends.mock_backend import Alarm
from wire.channels import CHANNEL_OPTIONS, SERVER_OPTIONS

METHOD = "/stageline.bench.Ring/Forward"

Take = Callable[[bytes], Awaitable[None]]


async def serve(take: Take) -> tuple[grpc.aio.Server, str]:
    """Start a server that passes every message of a stream to `take`; return it and its address."""

    async def forward(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield b""  # opens the call before its first message
        async for message in messages:
            await take(message)

    handler: Any = grpc.stream_stream_rpc_method_handler(forward)
    service, name = METHOD[1:].split("/")
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {name: handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


class Next:
    """The stream to the next node."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._call: Any = self._channel.stream_stream(METHOD)(wait_for_ready=True)

    async def open(self) -> None:
        """Connect; returns when the next node accepts messages."""
        await self._call.read()

    async def write(self, message: bytes) -> None:
        await self._call.write(message)

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


class Pause:
    """Waits as mock stages do, with their precision."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._alarm = Alarm()

    async def wait(self) -> None:
        if self._pause_s:
            over = asyncio.Event()
            self._alarm.set(time.monotonic() + self._pause_s, over.set)
            await over.wait()

    def close(self) -> None:
        self._alarm.close()


async def main(next_address: str, place: Place, pause_s: float) -> None:
    following, pause = Next(next_address), Pause(pause_s)
    await following.open()

    async def take(message: bytes) -> None:
        await pause.wait()
        await following.write(passed_on(message, place))

    server, address = await serve(take)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, sys.stdin.readline)
    print(json.dumps({"address": address}), flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    await server.stop(0)
    pause.close()
    await following.close()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], Place(sys.argv[2]), float(sys.argv[3])))
