"""Measures the ways to other workers, and receives their measurements."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Callable
from typing import Any

import grpc

from stageline_rpc.internal.v1 import forward_pb2, join_pb2
from wire.errors import InvalidRequest
from wire.link_probe import MAX_TRANSFER_BYTES, NUM_TRANSFERS, measure_way
from wire.transport import Transport

log = logging.getLogger(__name__)

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
    try:
        way = await measure_way(transport, peer.address, num_transfers=num_transfers)
    except grpc.aio.AioRpcError as error:
        link.problem = f"{error.code().name}: {error.details()}"[:200]
        log.info("the way to worker %s at %s was not measured: %s", peer.worker, peer.address, link.problem)
        return link
    link.round_trip_us = round(way.round_trip_s * 1e6)
    link.bytes_per_second = round(way.bytes_per_s)
    return link
