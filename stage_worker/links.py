"""Measures the ways to other workers, and receives their measurements."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any

import grpc

from stageline_rpc.internal.v1 import forward_pb2, forward_pb2_grpc, join_pb2
from wire.errors import InvalidRequest
from wire.transport import Transport

log = logging.getLogger(__name__)

NUM_PINGS, NUM_TRANSFERS = 17, 3
"""The fastest counts: the others tell of the load of the hosts. The first ping connects."""
CALL_TIMEOUT_S = 5.0
CHUNK_BYTES = 256 * 1024
TRANSFER_TIME_S = 0.1
SLOW_TRANSFER_S = 3 * TRANSFER_TIME_S
MAX_TRANSFER_BYTES = 8 * 2**20
"""Of one transfer: what a link of 670 Mbit/s takes in TRANSFER_TIME_S; faster ones take less time."""
MAX_PEERS = 64
Reply = Callable[[join_pb2.JoinRequest], None]
_PROBE = forward_pb2.DESCRIPTOR.services_by_name["StageService"].methods_by_name["ProbeLink"]


def probe_handler() -> grpc.GenericRpcHandler:
    """The RPC handler of ProbeLink."""
    untyped: Any = _receive
    handler: Any = grpc.stream_unary_rpc_method_handler(
        untyped,
        request_deserializer=forward_pb2.ProbeLinkRequest.FromString,
        response_serializer=forward_pb2.ProbeLinkResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(_PROBE.containing_service.full_name, {_PROBE.name: handler})


async def _receive(
    requests: AsyncIterable[forward_pb2.ProbeLinkRequest], context: grpc.aio.ServicerContext[Any, Any]
) -> forward_pb2.ProbeLinkResponse:
    num_bytes = 0
    async for request in requests:
        num_bytes += len(request.data)
        if num_bytes > MAX_TRANSFER_BYTES:
            raise InvalidRequest(f"a probe has more than {MAX_TRANSFER_BYTES} bytes, the limit")
    return forward_pb2.ProbeLinkResponse(num_bytes=num_bytes)


class LinkMeasurement:
    """At most one measurement, in the background."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._task: asyncio.Task[None] | None = None

    def start(self, order: join_pb2.MeasureLinks, reply: Reply) -> None:
        """Replace the measurement."""
        self.cancel()
        self._task = asyncio.create_task(self._run(order, reply), name="link-measurement")

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self, order: join_pb2.MeasureLinks, reply: Reply) -> None:
        reply(await measure_links(self._transport, order))


async def measure_links(transport: Transport, order: join_pb2.MeasureLinks) -> join_pb2.JoinRequest:
    """Measure one peer after the other, so that they do not share the link of this host."""
    num_transfers = 0 if order.round_trips_only else NUM_TRANSFERS
    links = [await _measure(transport, peer, num_transfers) for peer in order.peers[:MAX_PEERS]]
    return join_pb2.JoinRequest(measured_links=join_pb2.MeasuredLinks(links=links))


async def _measure(
    transport: Transport, peer: join_pb2.LinkPeer, num_transfers: int
) -> join_pb2.MeasuredLink:
    link = join_pb2.MeasuredLink(worker=peer.worker)
    async with transport.channel(peer.address) as channel:
        try:
            pings = [await _probe(channel, has_data=False) for _ in range(NUM_PINGS)]
            transfers = await _transfers(channel, num_transfers)
        except grpc.aio.AioRpcError as error:
            link.problem = f"{error.code().name}: {error.details()}"[:200]
            log.info(
                "the way to worker %s at %s was not measured: %s", peer.worker, peer.address, link.problem
            )
            return link
    round_trip_s = min(time_s for time_s, _ in pings[1:])
    rates = [num_bytes / max(1e-4, time_s - round_trip_s) for time_s, num_bytes in transfers]
    link.round_trip_us = round(round_trip_s * 1e6)
    link.bytes_per_second = round(max(rates, default=0.0))
    return link


async def _transfers(channel: grpc.aio.Channel, num_transfers: int) -> list[tuple[float, int]]:
    """Times and bytes. One is enough on a slow link, where the load of the hosts matters less."""
    found: list[tuple[float, int]] = []
    while len(found) < num_transfers and all(time_s < SLOW_TRANSFER_S for time_s, _ in found):
        found.append(await _probe(channel, has_data=True))
    return found


async def _probe(channel: grpc.aio.Channel, *, has_data: bool) -> tuple[float, int]:
    """Time of a call in seconds, and its bytes."""
    begin_s = time.monotonic()
    stub = forward_pb2_grpc.StageServiceStub(channel)
    answer = await stub.ProbeLink(_chunks(has_data=has_data), timeout=CALL_TIMEOUT_S)
    return time.monotonic() - begin_s, answer.num_bytes


async def _chunks(*, has_data: bool) -> AsyncIterator[forward_pb2.ProbeLinkRequest]:
    if not has_data:
        yield forward_pb2.ProbeLinkRequest()
        return
    request = forward_pb2.ProbeLinkRequest(data=bytes(CHUNK_BYTES))
    end_s = time.monotonic() + TRANSFER_TIME_S
    for _ in range(MAX_TRANSFER_BYTES // CHUNK_BYTES):
        if time.monotonic() >= end_s:
            return
        yield request
        await asyncio.sleep(0)
