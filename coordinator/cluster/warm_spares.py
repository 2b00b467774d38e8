"""Lets workers without a stage fetch and keep the layers that they would get if a worker were lost."""

from __future__ import annotations

import asyncio

from coordinator.cluster.connections import Connections, WorkerConnection
from coordinator.cluster.membership import WorkerRecord
from coordinator.cluster.messages import encode_prefetch
from coordinator.cluster.state_machine import ClusterState
from coordinator.cluster.transitions import ClusterPhase
from coordinator.cluster.weight_tracker import WeightTracker
from coordinator.model import ServedModel
from coordinator.planner.plan import StagePlan

PAUSE_S = 0.05
"""Between two plans: one takes some 30 ms for 32 workers, and steps go on meanwhile."""


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
        self._planned_for: object = None
        self._losses: list[str] = []
        """Workers whose loss is to be planned, the last one first."""
        self._wanted: dict[str, list[StagePlan]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def update(self) -> None:
        """Call after each change of members, plan or sources; orders are sent while the cluster serves."""
        is_serving = self._state.phase is ClusterPhase.SERVING
        if not (self._is_enabled and is_serving and any(map(self._is_asked, self._connections.values()))):
            return
        if (situation := self._situation()) != self._planned_for:
            self._planned_for, self._wanted = situation, {}
            self._losses = [] if situation is None else [*map(_name, reversed(self._state.stage_workers))]
        if self._losses:
            self._plan_later()
        else:
            self._send()

    def close(self) -> None:
        """End planning."""
        self._losses.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _send(self) -> None:
        plan = self._state.plan
        assert plan is not None, "a cluster that serves has a plan"
        for name, connection in self._connections.items():
            stages = self._wanted.get(name, []) if self._is_asked(connection) else []
            sources = self._weights.sources(name, stages)
            message = encode_prefetch(self._model, plan, stages, sources)
            text = message.SerializeToString(deterministic=True) if stages else b""
            if text != connection.prefetch:
                connection.prefetch = text
                connection.send(message)

    def _is_asked(self, connection: WorkerConnection) -> bool:
        """Whether the worker could fetch weights, or keep them in memory; a mock does neither."""
        has_source = self._model.pins is not None or self._model.shared is not None
        identity = connection.identity
        return not identity.is_mock and (has_source or identity.warm_spare_bytes > 0)

    def _situation(self) -> object:
        """What the plans depend on; None without a spare."""
        usable = [record for record in self._state.workers if record.is_usable]
        if all(record.stage is not None for record in usable):
            return None
        return self._state.plan_id, frozenset(record.identity.incarnation for record in usable)

    def _plan_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PAUSE_S, self._plan_next)

    def _plan_next(self) -> None:
        self._timer = None
        if self._losses and self._situation() == self._planned_for:
            for stage in self._state.stages_after_loss(self._losses.pop()):
                self._wanted.setdefault(stage.worker, []).append(stage)
        self.update()


def _name(record: WorkerRecord) -> str:
    return record.identity.name
