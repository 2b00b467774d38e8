"""The sending end of bare hops: bytes per second of messages of 1 MiB over some connections."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc

from bench.harness.hop_sink import EPOCH, HOST, MESSAGE_BYTES, METHOD, SECRET, message
from bench.harness.peer import Peer
from wire.addresses import Address
from wire.payload_sockets import PayloadSender
from wire.payloads import PayloadKey
from wire.transport import PLAIN, client_transport


class BareHop:
    """A hop to another process; with TLS if `directories` has the certificates of both ends."""

    def __init__(self, directories: tuple[Path, Path] | None = None) -> None:
        self._transport = PLAIN if directories is None else client_transport(directories[0])
        self._sink = Peer("bench.harness.hop_sink", *([] if directories is None else [str(directories[1])]))
        self._exit = AsyncExitStack()

    async def __aenter__(self) -> BareHop:
        await self._exit.enter_async_context(self._sink)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exit.aclose()

    async def over_grpc(self, num_connections: int, num_messages: int) -> float:
        """Each message of a connection waits for the answer to the one before."""
        ports = (await self._sink.ask({"grpc": num_connections}))["ports"]
        async with AsyncExitStack() as stack:
            calls: list[grpc.aio.StreamStreamCall[bytes, bytes]] = []
            for port in ports:
                channel = await stack.enter_async_context(self._transport.channel(f"{HOST}:{port}"))
                calls.append(channel.stream_stream(METHOD)(wait_for_ready=True))
            await asyncio.gather(*(_send(call, 2) for call in calls))
            began_s = time.monotonic()
            await asyncio.gather(*(_send(call, num_messages) for call in calls))
            return num_connections * num_messages * MESSAGE_BYTES / (time.monotonic() - began_s)

    async def over_payload_connections(self, num_connections: int, num_messages: int) -> float:
        """As Stageline sends hidden states, from the first message until all have arrived and are checked."""
        question = {"payloads": num_connections, "num": num_messages}
        offers = (await self._sink.ask(question))["offers"]
        keys = [(port, PayloadKey(EPOCH, SECRET, bytes.fromhex(ticket))) for port, ticket in offers]
        tls = self._transport.client_context()
        senders = [PayloadSender(Address(HOST, port), key, tls) for port, key in keys]
        try:
            for sender in senders:
                await sender.open()
            began_s = time.monotonic()
            await asyncio.gather(*(_send_payloads(sender, num_messages) for sender in senders))
            await self._sink.ask({"done": True})
            return num_connections * num_messages * MESSAGE_BYTES / (time.monotonic() - began_s)
        finally:
            for sender in senders:
                sender.close()


async def _send(call: Any, num_messages: int) -> None:
    for _ in range(num_messages):
        await call.write(message())
        await call.read()


async def _send_payloads(sender: PayloadSender, num_messages: int) -> None:
    for _ in range(num_messages):
        await sender.send(message())
