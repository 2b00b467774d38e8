"""Availability of the cluster, and the recovery timeout of waiting requests."""

import asyncio
import contextlib
from collections.abc import Callable

from coordinator.cluster.state_machine import ClusterState
from coordinator.cluster.transitions import ClusterPhase
from coordinator.engine.engine import Engine
from coordinator.planner.plan import Plan
from coordinator.recovery.policy import RecoveryPolicy
from stageline_rpc.v1 import cluster_pb2
from wire.errors import START_WORKERS, ClusterUnavailable

STOPPING = "the coordinator is stopping"
DRAINING = "the coordinator is draining and takes no new requests"


class Availability:
    """Tracks serving epochs, and fails requests that wait for one longer than the recovery timeout."""

    def __init__(
        self,
        state: ClusterState,
        engine: Engine,
        policy: RecoveryPolicy,
        on_serving: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """`on_serving` is called with `serves_new`, whenever that may have changed."""
        self._state = state
        self._engine = engine
        self._policy = policy
        self._on_serving = on_serving
        self._serving = asyncio.Event()
        self._is_draining = False
        self._admits_new = True
        self._is_closing = False
        self._waiting_since_s: float | None = None
        self._serving_since_s = 0.0
        self._awaited: list[tuple[Callable[[], bool], asyncio.Event]] = []

    @property
    def is_serving(self) -> bool:
        """Whether an epoch serves."""
        return self._serving.is_set()

    @property
    def is_ending(self) -> bool:
        """Whether the coordinator drains or stops, and rejects new requests."""
        return self._is_draining or self._is_closing

    @property
    def serves_new(self) -> bool:
        """Whether a new request would be accepted and get tokens."""
        accepts = self._admits_new and not self.is_ending and self._engine.journal_failure is None
        return self.is_serving and accepts

    @property
    def health(self) -> cluster_pb2.Health.ValueType:
        """Health of the cluster as seen by clients."""
        if self._is_draining:
            return cluster_pb2.HEALTH_DRAINING
        if self._state.phase is ClusterPhase.SERVING:
            if not self._admits_new:
                return cluster_pb2.HEALTH_DRAINING
            if self._engine.journal_failure is None:
                return cluster_pb2.HEALTH_SERVING
            return cluster_pb2.HEALTH_DEGRADED
        return cluster_pb2.HEALTH_DEGRADED if self._state.has_served else cluster_pb2.HEALTH_STARTING

    async def wait_serving(self) -> Plan:
        """Wait for a serving plan and return it.

        Raises ClusterUnavailable after the recovery timeout, and when the coordinator drains or stops.
        """
        if self._is_draining:
            raise ClusterUnavailable(DRAINING)
        try:
            async with asyncio.timeout(self._policy.recovery_timeout_s):
                # The event may be cleared again before a waiter runs.
                while not self._is_closing and self._state.phase is not ClusterPhase.SERVING:
                    await self._serving.wait()
        except TimeoutError:
            raise ClusterUnavailable(self._unavailable_text()) from None
        if self._is_closing or self._state.plan is None:
            raise ClusterUnavailable(STOPPING)
        return self._state.plan

    def begin(self, *, admits_new: bool = True) -> None:
        """Record that an epoch serves; without `admits_new`, it serves only requests that have started.

        The recovery timeout of waiting requests continues until a token arrives.
        """
        self._serving.set()
        self._serving_since_s = self._engine.now_s()
        if not self._engine.has_live_requests:
            self._waiting_since_s = None
        self._admits_new = admits_new
        self.report()

    def stop_admitting(self) -> None:
        """Reject new requests for the rest of the epoch."""
        self._admits_new = False
        self.report()

    def record_result(self, *, has_tokens: bool) -> None:
        """Stop the recovery timeout after a result with tokens.

        Results without tokens (prompt chunks) count once the epoch has served for the recovery timeout;
        otherwise every epoch might end after its first result without a request ever failing.
        """
        if self._waiting_since_s is not None and (has_tokens or self._is_long_since(self._serving_since_s)):
            self._waiting_since_s = None

    def end(self) -> None:
        """Record that the serving epoch ended."""
        self._serving.clear()
        self.report()

    def limit_waiting(self) -> None:
        """Start the recovery timeout of live requests unless it is running."""
        if self._waiting_since_s is None:
            self._waiting_since_s = self._engine.now_s()
        self._fail_late_requests()

    async def drain(self) -> None:
        """Reject new requests and wait until live ones have ended, at most for the drain timeout."""
        self._is_draining = True
        self.report()
        await self.wait_until(lambda: not self._engine.has_live_requests)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`, at most for the drain timeout; `tick` evaluates it."""
        if not condition():
            waiting = (condition, asyncio.Event())
            self._awaited.append(waiting)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(waiting[1].wait(), self._policy.drain_timeout_s)
            self._awaited = [awaited for awaited in self._awaited if awaited is not waiting]

    def tick(self) -> None:
        """Evaluate awaited conditions and fail late requests. Call periodically."""
        self._fail_late_requests()
        for condition, met in self._awaited:
            if condition():
                met.set()

    def journal_changed(self) -> None:
        """Report availability after a journal outage started or ended; it does not count as waiting time."""
        if self._waiting_since_s is not None:
            self._waiting_since_s = self._engine.now_s()
        self.report()

    def report(self) -> None:
        """Call `on_serving`."""
        self._on_serving(self.serves_new)

    def close(self) -> None:
        """Fail live requests and end every wait."""
        self._is_closing = True
        self._serving.set()
        self._engine.fail_all(STOPPING)

    def _fail_late_requests(self) -> None:
        """Fail requests after the recovery timeout; in a serving epoch, steps have timeouts instead."""
        since_s = self._waiting_since_s
        if self._engine.journal_failure is not None:
            return
        if since_s is not None and not self.is_serving and self._is_long_since(since_s):
            late_s = self._engine.now_s() - self._policy.recovery_timeout_s
            self._engine.fail_waiting(late_s, self._unavailable_text())

    def _is_long_since(self, since_s: float) -> bool:
        return self._engine.now_s() - since_s >= self._policy.recovery_timeout_s

    def _unavailable_text(self) -> str:
        limit = f"{self._policy.recovery_timeout_s:g} s"
        if trouble := self._state.trouble:
            return f"no token within {limit}: {trouble}"
        is_missing = self._state.phase is ClusterPhase.WAITING_FOR_WORKERS
        remedy = f"; {START_WORKERS}" if is_missing else ""
        return f"no pipeline within {limit}: {self._state.detail}{remedy}"
