"""Lets workers measure the ways between them: when they join, and again while the cluster serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise

from coordinator.cluster.connections import Connections, WorkerConnection
from coordinator.cluster.messages import encode_measure
from coordinator.cluster.state_machine import ClusterState
from coordinator.cluster.transitions import ClusterPhase

INTERVAL_S = 60.0


class LinkChecks:
    """Sends the orders; transfers, which delay steps, only while there is no request."""

    def __init__(
        self, state: ClusterState, connections: Connections, has_requests: Callable[[], bool]
    ) -> None:
        self._state, self._connections, self._has_requests = state, connections, has_requests

    def joined(self, connection: WorkerConnection) -> None:
        """Let a new worker measure the ways to all others."""
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
        """Let each stage measure the way to the next one, on links of their own."""
        for record, following in pairwise(self._state.stage_workers):
            order = encode_measure(
                record.identity, (following.identity,), round_trips_only=self._has_requests()
            )
            if order is not None and (connection := self._connections.get(record.identity.name)):
                connection.send(order)
