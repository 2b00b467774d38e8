"""Measures the way to a worker: round trips of small calls, and the rate of short uploads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from stageline_rpc.internal.v1 import forward_pb2, forward_pb2_grpc
from wire.transport import Transport

NUM_PINGS, NUM_TRANSFERS = 17, 3
"""The fastest counts: the others tell of the load of the hosts. The first ping connects."""
CALL_TIMEOUT_S = 5.0
CHUNK_BYTES = 256 * 1024
TRANSFER_TIME_S = 0.1
SLOW_TRANSFER_S = 3 * TRANSFER_TIME_S
MAX_TRANSFER_BYTES = 8 * 2**20
"""Of one transfer: what a link of 670 Mbit/s takes in TRANSFER_TIME_S; faster ones take less time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWay:
    """Round trip in seconds, and bytes per second (0: not measured)."""

    round_trip_s: float
    bytes_per_s: float


async def measure_way(transport: Transport, address: str, *, num_transfers: int) -> MeasuredWay:
    """Measure the way to the worker at `address`. Raises grpc.aio.AioRpcError."""
    async with transport.channel(address) as channel:
        pings = [await _probe(channel, has_data=False) for _ in range(NUM_PINGS)]
        transfers = await _transfers(channel, num_transfers)
    round_trip_s = min(time_s for time_s, _ in pings[1:])
    rates = [num_bytes / max(1e-4, time_s - round_trip_s) for time_s, num_bytes in transfers]
    return MeasuredWay(round_trip_s=round_trip_s, bytes_per_s=max(rates, default=0.0))


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
