"""Measures the way to another agent: round trips, clock offset and bandwidth."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import grpc.aio

from stageline_rpc.internal.v1 import doctor_pb2, doctor_pb2_grpc
from wire.clock import Exchange
from wire.transport import Transport

NUM_PINGS = 100
PING_TIME_S = 3.0
CONNECT_TIMEOUT_S = 5.0
CHUNK_BYTES = 2**20
TRANSFER_TIME_S = 1.0
MAX_TRANSFER_BYTES = 256 * 2**20
TRANSFER_TIMEOUT_S = 10.0
"""A slow network delivers what was sent within TRANSFER_TIME_S later."""


async def measure(
    transport: Transport, address: str, *, has_transfers: bool, now_us: Callable[[], int]
) -> doctor_pb2.Measurement:
    """Measure the way to an address; a failure is the `problem` of the result."""
    async with transport.channel(address) as channel:
        stub = doctor_pb2_grpc.DoctorServiceStub(channel)
        try:
            await stub.Ping(doctor_pb2.PingRequest(), timeout=CONNECT_TIMEOUT_S)
            exchanges = await _exchanges(stub, now_us)
            result = _statistics(exchanges)
            if has_transfers:
                result.upload_rate = await _upload(stub)
                result.download_rate = await _download(stub)
        except grpc.aio.AioRpcError as error:
            return doctor_pb2.Measurement(problem=describe_call_error(error))
    return result


async def _exchanges(stub: doctor_pb2_grpc.DoctorServiceStub, now_us: Callable[[], int]) -> list[Exchange]:
    end_s, exchanges = time.monotonic() + PING_TIME_S, list[Exchange]()
    while len(exchanges) < NUM_PINGS and (not exchanges or time.monotonic() < end_s):
        sent_us = now_us()
        answer = await stub.Ping(doctor_pb2.PingRequest(), timeout=CONNECT_TIMEOUT_S)
        exchanges.append(Exchange(sent_us, answer.received_at_us, answer.answered_at_us, now_us()))
    return exchanges


def _statistics(exchanges: list[Exchange]) -> doctor_pb2.Measurement:
    """As in `wire.clock`: the exchange with the shortest round trip has the least error, half of that."""
    trips = sorted(max(0, exchange.round_trip_us) for exchange in exchanges)
    best = min(exchanges, key=lambda exchange: exchange.round_trip_us)
    return doctor_pb2.Measurement(
        median_us=trips[len(trips) // 2],
        p99_us=trips[min(len(trips) - 1, len(trips) * 99 // 100)],
        clock_offset_us=best.offset_us,
        clock_uncertainty_us=max(1, best.round_trip_us // 2),
    )


async def chunks() -> AsyncIterator[bytes]:
    """Data for TRANSFER_TIME_S."""
    chunk, end_s = bytes(CHUNK_BYTES), time.monotonic() + TRANSFER_TIME_S
    for _ in range(MAX_TRANSFER_BYTES // CHUNK_BYTES):
        if time.monotonic() >= end_s:
            return
        yield chunk
        await asyncio.sleep(0)


async def _uploads() -> AsyncIterator[doctor_pb2.UploadRequest]:
    async for data in chunks():
        yield doctor_pb2.UploadRequest(data=data)


async def _upload(stub: doctor_pb2_grpc.DoctorServiceStub) -> int:
    begin_s = time.monotonic()
    answer = await stub.Upload(_uploads(), timeout=TRANSFER_TIMEOUT_S)
    return round(answer.num_bytes / max(1e-6, time.monotonic() - begin_s))


async def _download(stub: doctor_pb2_grpc.DoctorServiceStub) -> int:
    begin_s, num_bytes = time.monotonic(), 0
    async for chunk in stub.Download(doctor_pb2.DownloadRequest(), timeout=TRANSFER_TIMEOUT_S):
        num_bytes += len(chunk.data)
    return round(num_bytes / max(1e-6, time.monotonic() - begin_s))


_MAX_DETAIL = 200


def describe_call_error(error: grpc.aio.AioRpcError) -> str:
    """Why an agent was not reached, in one line."""
    code, details = error.code(), " ".join((error.details() or "").split())[:_MAX_DETAIL]
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return "another Stageline process listens there: a doctor checks hosts before they start"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time"
    if code is grpc.StatusCode.UNAVAILABLE:
        return details.rpartition("UNKNOWN: ")[2] or "no connection"
    return f"{code.name}: {details}"
