"""Which workers hold which weights, and where a worker finds those that it lacks."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from coordinator.cluster.connections import Connections, WorkerConnection
from coordinator.cluster.messages import tensor_names
from coordinator.model import ServedModel
from coordinator.planner.plan import StagePlan
from stageline_rpc.internal.v1 import join_pb2
from weights.cached_model import unit_of
from weights.peers import PeerAddress
from wire.addresses import parse_peer_address

log = logging.getLogger(__name__)


class WeightTracker:
    """What the connected workers serve of one model."""

    def __init__(self, model: ServedModel, connections: Connections, trackers: Iterable[str] = ()) -> None:
        """`trackers` are the addresses of the weights of other coordinators."""
        self._model, self._connections, self._trackers = model, connections, tuple(trackers)
        self.coordinator = ""
        """Address at which this coordinator serves its directory; empty if it does not."""

    def take(self, connection: WorkerConnection, held: join_pb2.HeldWeights) -> None:
        """Store what a worker serves; ignored for another model."""
        name = connection.identity.name
        if held.fingerprint != self._model.fingerprint:
            log.debug("worker %s holds weights of another model, %s", name, held.fingerprint[:64])
            return
        try:
            parse_peer_address(held.address)
        except ValueError as error:
            log.warning("worker %s serves no weights to others: %s", name, error)
            return
        connection.held_weights = held

    def peers(self) -> list[PeerAddress]:
        """All workers that serve weights. May be called by any thread."""
        return [
            PeerAddress(
                name=connection.identity.name,
                address=held.address,
                units=None if held.is_complete else frozenset(held.units),
            )
            for connection in list(self._connections.values())
            if (held := connection.held_weights).address
        ]

    def sources(self, worker: str, stages: Iterable[StagePlan]) -> join_pb2.WeightSources:
        """Where `worker` finds the weights of stages."""
        if self._model.is_mock:
            return join_pb2.WeightSources()
        units = set(map(unit_of, tensor_names(self._model, stages)))
        peers = [
            join_pb2.WeightPeer(
                worker=peer.name,
                address=peer.address,
                units=[] if peer.units is None else sorted(units & peer.units),
                is_complete=peer.units is None,
            )
            for peer in self.peers()
            if peer.name != worker and (peer.units is None or units & peer.units)
        ]
        return join_pb2.WeightSources(peers=peers, trackers=self._trackers, coordinator=self.coordinator)
