"""The receiving end of bare hops: a process that takes messages of 1 MiB, with or without TLS.

python -m bench.harness.hop_sink [TLS_DIR]

Question {"grpc": N}: N ports, one stream of messages each, which are answered by a byte. {"payloads": N,
"num": M}: port and ticket of N payload connections, each of which takes M payloads. {"done": true}: answers
when these have all arrived.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import uvloop
import xxhash

from wire.addresses import Address
from wire.channels import SERVER_OPTIONS
from wire.payload_sockets import PayloadListener, PayloadReceiver
from wire.payloads import PayloadNotice
from wire.peer_secrets import RefusedPeers
from wire.transport import PLAIN, Transport, client_transport

METHOD = "/stageline.bench.Hop/Take"
MESSAGE_BYTES = 1 << 20
EPOCH, SECRET = 1, b"benchmark" * 4
HOST = "127.0.0.1"


@cache
def message() -> bytes:
    """What every message is."""
    return random.Random(0).randbytes(MESSAGE_BYTES)


class Sink:
    """Answers questions."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._listener = PayloadListener(RefusedPeers(time.monotonic), tls=transport.server_context)
        self._listener.listen(Address(HOST, 0))
        self._takes: list[asyncio.Task[None]] = []
        self._servers: list[grpc.aio.Server] = []

    async def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if "grpc" in question:
            return {"ports": [await self._serve() for _ in range(question["grpc"])]}
        if "payloads" in question:
            receivers = [self._expect() for _ in range(question["payloads"])]
            self._takes = [asyncio.create_task(_take(each, question["num"])) for each in receivers]
            offers = [receiver.offer for receiver in receivers]
            return {"offers": [[offer.port, offer.ticket.hex()] for offer in offers]}
        await asyncio.gather(*self._takes)
        return {"done": True}

    async def _serve(self) -> int:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        service, name = METHOD[1:].split("/")
        handler: Any = grpc.stream_stream_rpc_method_handler(_acknowledge)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {name: handler})])
        port = self._transport.bind(server, f"{HOST}:0")
        await server.start()
        self._servers.append(server)  # ends when nothing refers to it
        return port

    def _expect(self) -> PayloadReceiver:
        receiver = self._listener.expect(epoch=EPOCH, secret=SECRET, max_bytes=MESSAGE_BYTES)
        assert receiver is not None, "it listens"
        return receiver


async def _acknowledge(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for _ in messages:
        yield b"\0"


async def _take(receiver: PayloadReceiver, num: int) -> None:
    digest = xxhash.xxh3_64_intdigest(message())
    for number in range(1, num + 1):
        await receiver.inbox.take(PayloadNotice(number, MESSAGE_BYTES, digest))


async def main(directory: str) -> None:
    sink, loop = Sink(client_transport(Path(directory)) if directory else PLAIN), asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await sink.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1] if len(sys.argv) > 1 else ""))
