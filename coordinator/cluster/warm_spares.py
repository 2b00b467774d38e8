"""Lets workers without a stage fetch the layers that they would get if a worker were lost."""

from __future__ import annotations

from coordinator.cluster.connections import Connections
from coordinator.cluster.messages import encode_prefetch
from coordinator.cluster.state_machine import ClusterState
from coordinator.cluster.transitions import ClusterPhase
from coordinator.cluster.weight_tracker import WeightTracker
from coordinator.model import ServedModel
from coordinator.planner.plan import StagePlan


class WarmSpares:
    """Sends each spare the layers to prefetch, when they have changed."""

    def __init__(
        self,
        state: ClusterState,
        connections: Connections,
        weights: WeightTracker,
        model: ServedModel,
        *,
        is_enabled: bool,
    ) -> None:
        self._state, self._connections, self._weights = state, connections, weights
        self._model, self._is_enabled = model, is_enabled
        self._made_for: object = None
        self._wanted: dict[str, list[StagePlan]] = {}

    def update(self) -> None:
        """Call after each change of members, plan or sources; orders are sent while the cluster serves."""
        has_source = self._model.pins is not None or self._model.shared is not None
        if not self._is_enabled or not has_source or self._state.phase is not ClusterPhase.SERVING:
            return
        wanted = self._stages_after_losses()
        for name, connection in self._connections.items():
            stages = wanted.get(name, [])
            message = encode_prefetch(self._model, stages, self._weights.sources(name, stages))
            text = message.SerializeToString(deterministic=True) if stages else b""
            if text != connection.prefetch:
                connection.prefetch = text
                connection.send(message)

    def _stages_after_losses(self) -> dict[str, list[StagePlan]]:
        """Made again when the plan or its possible workers have changed, since plans take a while."""
        usable = [record for record in self._state.workers if record.is_usable]
        if all(record.stage is not None for record in usable):
            return {}
        made_for = (self._state.plan_id, frozenset(record.identity.incarnation for record in usable))
        if made_for != self._made_for:
            self._made_for, self._wanted = made_for, self._state.stages_after_losses()
        return self._wanted
