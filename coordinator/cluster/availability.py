"""Whether requests can be served now, and how long they wait while they cannot."""

import asyncio
import contextlib
from collections.abc import Callable

from coordinator.cluster.cluster_state import ClusterPhase, ClusterState
from coordinator.planning.plan import Plan
from coordinator.requests.engine import Engine
from coordinator.timing import ClusterTiming
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
        timing: ClusterTiming,
        on_serving: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """`on_serving` is told whenever tokens begin or cease to be produced."""
        self._state = state
        self._engine = engine
        self._timing = timing
        self._on_serving = on_serving
        self._serving = asyncio.Event()
        self._is_draining = False
        self._is_closing = False
        self._give_up_timer: asyncio.TimerHandle | None = None
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
    def health(self) -> cluster_pb2.Health.ValueType:
        """What a client may expect."""
        if self._is_draining:
            return cluster_pb2.HEALTH_DRAINING
        if self._state.phase is ClusterPhase.SERVING:
            return cluster_pb2.HEALTH_SERVING
        return cluster_pb2.HEALTH_DEGRADED if self._state.has_served else cluster_pb2.HEALTH_STARTING

    async def wait_serving(self) -> Plan:
        """The plan that serves, as soon as there is one. Raises ClusterUnavailable after the recovery time,
        and when the coordinator stops.
        """
        if self._is_draining:
            raise ClusterUnavailable(DRAINING)
        try:
            async with asyncio.timeout(self._timing.recovery_timeout_s):
                # The event may be cleared again before a waiter runs.
                while not self._is_closing and self._state.phase is not ClusterPhase.SERVING:
                    await self._serving.wait()
        except TimeoutError:
            raise ClusterUnavailable(self._missing()) from None
        if self._is_closing or self._state.plan is None:
            raise ClusterUnavailable(STOPPING)
        return self._state.plan

    def begin(self) -> None:
        """An epoch serves from now on."""
        self._serving.set()
        self._stop_timer()
        self._on_serving(not self._is_draining)

    def end(self) -> None:
        """No epoch serves any more."""
        self._serving.clear()
        self._on_serving(False)

    def limit_waiting(self) -> None:
        """Live requests wait for the recovery time, from now on unless they do already."""
        if self._give_up_timer is None:
            loop = asyncio.get_running_loop()
            self._give_up_timer = loop.call_later(self._timing.recovery_timeout_s, self._give_up)

    async def drain(self) -> None:
        """Takes no new requests; returns when those that are here have ended, or their time is over."""
        self._is_draining = True
        self._on_serving(False)
        await self.wait_until(lambda: not self._engine.registry.live)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for it, but not longer than the limit for drains. Needs `look_around` now and then."""
        if not condition():
            waiting = (condition, asyncio.Event())
            self._awaited.append(waiting)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(waiting[1].wait(), self._timing.drain_timeout_s)
            self._awaited = [each for each in self._awaited if each is not waiting]

    def look_around(self) -> None:
        """Tells those who wait for something that it has come."""
        for condition, met in self._awaited:
            if condition():
                met.set()

    def close(self) -> None:
        """Nobody waits any more; live requests fail."""
        self._is_closing = True
        self._serving.set()
        self._stop_timer()
        self._engine.fail_all(STOPPING)

    def _give_up(self) -> None:
        self._give_up_timer = None
        self._engine.fail_all(self._missing())

    def _missing(self) -> str:
        return f"no pipeline within {self._timing.recovery_timeout_s:g} s: {self._state.detail}"

    def _stop_timer(self) -> None:
        if self._give_up_timer is not None:
            self._give_up_timer.cancel()
            self._give_up_timer = None
