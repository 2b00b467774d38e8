"""Measures the ways between workers, and to them: when they join, and again while the cluster serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from itertools import pairwise

import grpc

from coordinator.cluster.connections import Connections, WorkerConnection
from coordinator.cluster.membership import WorkerIdentity
from coordinator.cluster.messages import encode_measure
from coordinator.cluster.state_machine import ClusterState
from coordinator.cluster.transitions import ClusterPhase
from coordinator.planner.links import Link
from wire.addresses import parse_address
from wire.link_probe import NUM_TRANSFERS, measure_way
from wire.payload_memory import memory_domain
from wire.transport import Transport, is_loopback_host

log = logging.getLogger(__name__)

INTERVAL_S = 60.0
Measured = Callable[[WorkerIdentity, Link], None]


class LinkChecks:
    """Sends the orders; transfers, which delay steps, only while there is no request."""

    def __init__(
        self, state: ClusterState, connections: Connections, has_requests: Callable[[], bool], own: OwnLinks
    ) -> None:
        self._state, self._connections, self._has_requests = state, connections, has_requests
        self._own = own

    def joined(self, connection: WorkerConnection) -> None:
        """Measure the way to a new worker, and let it measure the ways to all others."""
        self._own.measure([connection.identity], round_trips_only=self._has_requests())
        others = [known.identity for known in self._connections.values()]
        order = encode_measure(connection.identity, others, round_trips_only=self._has_requests())
        if order is not None:
            connection.send(order)

    async def run(self) -> None:
        """Measure the hops of the plan every INTERVAL_S, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            if self._state.phase is ClusterPhase.SERVING:
                self.measure_hops()

    def measure_hops(self) -> None:
        """Measure the ways to FIRST and LAST, and let each stage measure the way to the next one."""
        stages = self._state.stage_workers
        self._own.measure(
            {record.identity.name: record.identity for record in (stages[0], stages[-1])}.values(),
            round_trips_only=self._has_requests(),
        )
        for record, following in pairwise(stages):
            order = encode_measure(
                record.identity, (following.identity,), round_trips_only=self._has_requests()
            )
            if order is not None and (connection := self._connections.get(record.identity.name)):
                connection.send(order)


class OwnLinks:
    """Measures the ways from the coordinator to workers of other hosts, one after the other."""

    def __init__(
        self,
        host: str,
        transport: Transport,
        measured: Measured,
        spawn: Callable[[Coroutine[None, None, None]], object],
    ) -> None:
        """`host` is the one that the coordinator listens on; `measured` is called with each result."""
        self._host, self._transport, self._measured, self._spawn = host, transport, measured, spawn
        self._memory_domain = memory_domain()
        self._turn = asyncio.Lock()

    def measure(self, workers: Iterable[WorkerIdentity], *, round_trips_only: bool) -> None:
        """Measure the ways to these workers in the background."""
        num_transfers = 0 if round_trips_only else NUM_TRANSFERS
        for worker in workers:
            if not self._is_here(worker):
                self._spawn(self._measure(worker, num_transfers))

    def _is_here(self, worker: WorkerIdentity) -> bool:
        """Whether this host runs the worker, too."""
        host = parse_address(worker.address).host
        is_local = is_loopback_host(host) and not is_loopback_host(self._host)
        shares_memory = worker.memory_domain in {self._memory_domain} - {""}
        return host == self._host or is_local or shares_memory

    async def _measure(self, worker: WorkerIdentity, num_transfers: int) -> None:
        async with self._turn:
            try:
                way = await measure_way(self._transport, worker.address, num_transfers=num_transfers)
            except grpc.aio.AioRpcError as error:
                log.info(
                    "the way to worker %s at %s was not measured: %s: %s",
                    *(worker.name, worker.address, error.code().name, error.details()),
                )
                return
        self._measured(worker, Link(round_trip_s=way.round_trip_s, bytes_per_s=way.bytes_per_s))
