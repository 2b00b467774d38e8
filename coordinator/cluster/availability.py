"""Whether requests can be served now, and how long they wait while they cannot."""

import asyncio
import contextlib
from collections.abc import Callable

from coordinator.cluster.state_machine import ClusterState
from coordinator.cluster.transitions import ClusterPhase
from coordinator.engine.engine import Engine
from coordinator.planner.plan import Plan
from coordinator.recovery.policy import RecoveryPolicy
from stageline_rpc.v1 import cluster_pb2
from wire.errors import ClusterUnavailable

STOPPING = "the coordinator is stopping"
DRAINING = "the coordinator finishes what runs, and takes no new requests"


class Availability:
    """Follows epochs as they begin and end; fails what has waited too long for one."""

    def __init__(
        self,
        state: ClusterState,
        engine: Engine,
        policy: RecoveryPolicy,
        on_serving: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """`on_serving` is told whether new requests are served, when that may have changed."""
        self._state = state
        self._engine = engine
        self._policy = policy
        self._on_serving = on_serving
        self._serving = asyncio.Event()
        self._is_draining = False
        self._starts_new = True
        self._is_closing = False
        self._waiting_since_s: float | None = None
        self._serving_since_s = 0.0
        self._awaited: list[tuple[Callable[[], bool], asyncio.Event]] = []

    @property
    def is_serving(self) -> bool:
        """An epoch serves."""
        return self._serving.is_set()

    @property
    def is_ending(self) -> bool:
        """The coordinator is about to end, and takes no new requests."""
        return self._is_draining or self._is_closing

    @property
    def serves_new(self) -> bool:
        """A new request would be accepted and get tokens."""
        welcomes = self._starts_new and not self.is_ending and self._engine.journal_failure is None
        return self.is_serving and welcomes

    @property
    def health(self) -> cluster_pb2.Health.ValueType:
        """What a client may expect."""
        if self._is_draining:
            return cluster_pb2.HEALTH_DRAINING
        if self._state.phase is ClusterPhase.SERVING:
            if not self._starts_new:
                return cluster_pb2.HEALTH_DRAINING
            if self._engine.journal_failure is None:
                return cluster_pb2.HEALTH_SERVING
            return cluster_pb2.HEALTH_DEGRADED
        return cluster_pb2.HEALTH_DEGRADED if self._state.has_served else cluster_pb2.HEALTH_STARTING

    async def wait_serving(self) -> Plan:
        """The plan that serves, as soon as there is one. Raises ClusterUnavailable after the recovery time,
        and when the coordinator stops.
        """
        if self._is_draining:
            raise ClusterUnavailable(DRAINING)
        try:
            async with asyncio.timeout(self._policy.recovery_timeout_s):
                # The event may be cleared again before a waiter runs.
                while not self._is_closing and self._state.phase is not ClusterPhase.SERVING:
                    await self._serving.wait()
        except TimeoutError:
            raise ClusterUnavailable(self._missing()) from None
        if self._is_closing or self._state.plan is None:
            raise ClusterUnavailable(STOPPING)
        return self._state.plan

    def begin(self, *, starts_new: bool = True) -> None:
        """An epoch serves from now on; without `starts_new`, only what has begun. Whoever waits goes on
        waiting until there is a token.
        """
        self._serving.set()
        self._serving_since_s = self._engine.now_s()
        if not self._engine.has_live_requests:
            self._waiting_since_s = None
        self._starts_new = starts_new
        self.report()

    def finish_running(self) -> None:
        """Nothing new begins in this epoch."""
        self._starts_new = False
        self.report()

    def note_result(self, *, has_tokens: bool) -> None:
        """The present epoch bears fruit. Parts of prompts count when that has gone on for long enough: an
        epoch after another may end behind the first.
        """
        if self._waiting_since_s is not None and (has_tokens or self._is_long_since(self._serving_since_s)):
            self._waiting_since_s = None

    def end(self) -> None:
        """No epoch serves any more."""
        self._serving.clear()
        self.report()

    def limit_waiting(self) -> None:
        """Live requests wait for the recovery time, from now on unless they do already."""
        if self._waiting_since_s is None:
            self._waiting_since_s = self._engine.now_s()
        self._give_up_late()

    async def drain(self) -> None:
        """Takes no new requests; returns when those that are here have ended, or their time is over."""
        self._is_draining = True
        self.report()
        await self.wait_until(lambda: not self._engine.has_live_requests)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for it, but not longer than the limit for drains. Needs `tick` now and then."""
        if not condition():
            waiting = (condition, asyncio.Event())
            self._awaited.append(waiting)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(waiting[1].wait(), self._policy.drain_timeout_s)
            self._awaited = [each for each in self._awaited if each is not waiting]

    def tick(self) -> None:
        """Tells those who wait for something that it has come, and those who wait for too long. To be called
        now and then.
        """
        self._give_up_late()
        for condition, met in self._awaited:
            if condition():
                met.set()

    def journal_changed(self) -> None:
        """The journal can be written again, or not any more. Its outage does not count as waiting."""
        if self._waiting_since_s is not None:
            self._waiting_since_s = self._engine.now_s()
        self.report()

    def report(self) -> None:
        """Tells whether new requests are served."""
        self._on_serving(self.serves_new)

    def close(self) -> None:
        """Nobody waits any more; live requests fail."""
        self._is_closing = True
        self._serving.set()
        self._engine.fail_all(STOPPING)

    def _give_up_late(self) -> None:
        """While an epoch serves, an answer comes or is overdue."""
        since_s = self._waiting_since_s
        if self._engine.journal_failure is not None:
            return
        if since_s is not None and not self.is_serving and self._is_long_since(since_s):
            late_s = self._engine.now_s() - self._policy.recovery_timeout_s
            self._engine.fail_waiting(late_s, self._missing())

    def _is_long_since(self, since_s: float) -> bool:
        return self._engine.now_s() - since_s >= self._policy.recovery_timeout_s

    def _missing(self) -> str:
        limit = f"{self._policy.recovery_timeout_s:g} s"
        if trouble := self._state.trouble:
            return f"no token within {limit}: {trouble}"
        return f"no pipeline within {limit}: {self._state.detail}"
