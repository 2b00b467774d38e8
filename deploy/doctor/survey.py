"""Asks all agents of a cluster, and has them measure the ways between them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

import grpc.aio

from deploy.doctor.places import Path, Place, paths_of
from deploy.doctor.probe import (
    CONNECT_TIMEOUT_S,
    PING_TIME_S,
    TRANSFER_TIMEOUT_S,
    describe_call_error,
)
from stageline_rpc.internal.v1 import doctor_pb2, doctor_pb2_grpc
from wire.transport import Transport

MEASURE_TIMEOUT_S = 2 * (CONNECT_TIMEOUT_S + PING_TIME_S + 2 * TRANSFER_TIMEOUT_S)
"""Also of one that waits for another at the same agent."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One way."""

    path: Path
    result: doctor_pb2.Measurement


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """What the agents said. `silent` has the places without an answer, with the reason."""

    facts: dict[str, doctor_pb2.HostFacts]
    """By host."""
    silent: dict[str, str]
    """By process."""
    measured: tuple[Measured, ...]


async def survey(places: tuple[Place, ...], transport: Transport) -> Survey:
    """Ask all agents. Takes seconds per silent process and per worker, never longer than the deadlines."""
    answers = await asyncio.gather(*(_facts(place, transport) for place in places))
    facts, silent = dict[str, doctor_pb2.HostFacts](), dict[str, str]()
    for place, answer in zip(places, answers, strict=True):
        if isinstance(answer, str):
            silent[place.name] = answer
        else:
            facts[place.host] = answer
    paths = [path for path in paths_of(places) if path.caller.name not in silent]
    measured = [
        *await _measure_all([path for path in paths if not path.carries_data], transport),
        *[await _measure(path, transport) for path in paths if path.carries_data],
    ]
    return Survey(facts=facts, silent=silent, measured=tuple(measured))


async def _facts(place: Place, transport: Transport) -> doctor_pb2.HostFacts | str:
    async with transport.channel(str(place.reached)) as channel:
        stub = doctor_pb2_grpc.DoctorServiceStub(channel)
        try:
            answer = await stub.GetFacts(doctor_pb2.GetFactsRequest(), timeout=CONNECT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return describe_call_error(error)
    return answer.facts


async def _measure_all(paths: Iterable[Path], transport: Transport) -> list[Measured]:
    """Round trips, one after the other from each caller."""
    of_caller: dict[str, list[Path]] = {}
    for path in paths:
        of_caller.setdefault(path.caller.name, []).append(path)

    async def in_turn(own: list[Path]) -> list[Measured]:
        return [await _measure(path, transport) for path in own]

    found = await asyncio.gather(*map(in_turn, of_caller.values()))
    return [measured for own in found for measured in own]


async def _measure(path: Path, transport: Transport) -> Measured:
    """Transfers are measured one at a time, so that none disturbs another."""
    async with transport.channel(str(path.caller.reached)) as channel:
        stub = doctor_pb2_grpc.DoctorServiceStub(channel)
        request = doctor_pb2.MeasureRequest(process=path.callee.name, has_transfers=path.carries_data)
        try:
            answer = await stub.Measure(request, timeout=MEASURE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            problem = f"the doctor of {path.caller.name} stopped to answer: {describe_call_error(error)}"
            return Measured(path, doctor_pb2.Measurement(problem=problem))
    return Measured(path, answer.measurement)
