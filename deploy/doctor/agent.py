"""`stageline doctor --serve`: answers for one host, at the addresses of its processes to come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from deploy.doctor.facts import HeldPorts, host_facts
from deploy.doctor.places import Place
from deploy.doctor.probe import MAX_TRANSFER_BYTES, TRANSFER_TIMEOUT_S, chunks, measure
from stageline_rpc.internal.v1 import doctor_pb2, doctor_pb2_grpc
from wire.authorization import authorization
from wire.channels import new_server
from wire.clock import wall_clock_us
from wire.errors import InvalidRequest
from wire.payloads import MIN_PAYLOAD_BYTES
from wire.peer_secrets import RefusedPeers
from wire.transport import Transport, open_transport

Context = grpc.aio.ServicerContext[Any, Any]
_STREAM_WINDOW_BYTES = MIN_PAYLOAD_BYTES + 64 * 1024
"""As of workers."""
_STOP_GRACE_S = 0.5


class DoctorAgent:
    """All processes of one host: `start`, then `stop`.

    `versions` and `now_us` are what this host claims, for tests of how differences are found.
    """

    def __init__(
        self,
        name: str,
        places: tuple[Place, ...],
        cluster: tuple[Place, ...],
        *,
        versions: Mapping[str, str],
        now_us: Callable[[], int] = wall_clock_us,
    ) -> None:
        """`places` are on this host, of all places of the `cluster`."""
        self._name, self._places = name, places
        self._cluster = {place.name: place for place in cluster}
        self._versions, self._now_us = versions, now_us
        self._held, self._servers = HeldPorts(), list[grpc.aio.Server]()

    async def start(self) -> list[str]:
        """Bind and serve; return the addresses.

        Raises OSError if none can be bound, ValueError for unusable certificates.
        """
        served: list[tuple[Place, grpc.aio.Server, Transport]] = []
        ports: list[doctor_pb2.PortFacts] = []
        for place in self._places:
            server, transport = self._new_server(place)
            problem = ""
            try:
                transport.bind(server, str(place.listen))
            except OSError as error:
                problem = str(error)
            else:
                served.append((place, server, transport))
            ports.append(_port_facts(place, "rpc", str(place.listen), problem))
            ports += self._hold_others(place)
        if not served:
            raise OSError(next(port.problem for port in ports if port.problem))
        commands = [place.command for place in self._places]
        facts = await asyncio.to_thread(
            host_facts, self._name, commands, versions=self._versions, ports=ports
        )
        for _, server, transport in served:
            service = DoctorService(facts, self._cluster, transport, self._now_us)
            doctor_pb2_grpc.add_DoctorServiceServicer_to_server(service, server)
            await server.start()
            self._servers.append(server)
        return [str(place.listen) for place, _, _ in served]

    async def stop(self) -> None:
        self._held.release()
        await asyncio.gather(*(server.stop(_STOP_GRACE_S) for server in self._servers))

    def _new_server(self, place: Place) -> tuple[grpc.aio.Server, Transport]:
        settings = place.transport()
        transport = open_transport(settings, place.role)
        checks = authorization(transport, settings.deny_list, RefusedPeers(time.monotonic))
        return new_server(authorization=checks, stream_window_bytes=_STREAM_WINDOW_BYTES), transport

    def _hold_others(self, place: Place) -> list[doctor_pb2.PortFacts]:
        others = [port for port in place.command.ports if port.address != place.listen]
        return [
            _port_facts(place, port.name, str(port.address), self._held.hold(port.address)) for port in others
        ]


def _port_facts(place: Place, name: str, address: str, problem: str) -> doctor_pb2.PortFacts:
    return doctor_pb2.PortFacts(process=place.name, name=name, address=address, problem=problem)


class DoctorService(doctor_pb2_grpc.DoctorServiceServicer):
    """One process to come, with its certificate."""

    def __init__(
        self,
        facts: doctor_pb2.HostFacts,
        cluster: Mapping[str, Place],
        transport: Transport,
        now_us: Callable[[], int],
    ) -> None:
        self._facts, self._cluster, self._transport, self._now_us = facts, cluster, transport, now_us
        self._measuring = asyncio.Lock()

    async def GetFacts(  # noqa: N802
        self, request: doctor_pb2.GetFactsRequest, context: Context
    ) -> doctor_pb2.GetFactsResponse:
        return doctor_pb2.GetFactsResponse(facts=self._facts)

    async def Measure(  # noqa: N802
        self, request: doctor_pb2.MeasureRequest, context: Context
    ) -> doctor_pb2.MeasureResponse:
        """Only addresses of the cluster file are called."""
        if (place := self._cluster.get(request.process)) is None:
            raise InvalidRequest(f"process {request.process[:100]!r} is not in the cluster file of this host")
        async with self._measuring:
            found = await measure(
                self._transport,
                str(place.reached),
                has_transfers=request.has_transfers,
                now_us=self._now_us,
            )
        return doctor_pb2.MeasureResponse(measurement=found)

    async def Ping(  # noqa: N802
        self, request: doctor_pb2.PingRequest, context: Context
    ) -> doctor_pb2.PingResponse:
        received_us = self._now_us()
        return doctor_pb2.PingResponse(received_at_us=received_us, answered_at_us=self._now_us())

    async def Upload(  # noqa: N802
        self, request_iterator: AsyncIterator[doctor_pb2.UploadRequest], context: Context
    ) -> doctor_pb2.UploadResponse:
        num_bytes = 0
        try:
            async with asyncio.timeout(TRANSFER_TIMEOUT_S):
                async for chunk in request_iterator:
                    num_bytes += len(chunk.data)
                    if num_bytes > MAX_TRANSFER_BYTES:
                        raise InvalidRequest(f"more than {MAX_TRANSFER_BYTES} bytes were sent")
        except TimeoutError:
            raise InvalidRequest(f"the data did not end within {TRANSFER_TIMEOUT_S:g} s") from None
        return doctor_pb2.UploadResponse(num_bytes=num_bytes)

    async def Download(  # noqa: N802
        self, request: doctor_pb2.DownloadRequest, context: Context
    ) -> AsyncIterator[doctor_pb2.DownloadResponse]:
        async for data in chunks():
            yield doctor_pb2.DownloadResponse(data=data)
