"""Notices what does not happen: heartbeats that are missing, answers that do not come."""

import asyncio
from collections.abc import Callable, Iterable

from coordinator.cluster.worker_connection import WorkerConnection
from coordinator.timing import ClusterTiming

_MOST_LATE = 4
"""So often in a row, to be late is an excuse for workers that seem silent."""
_STEADY_S = 30.0
"""After so long without a break, earlier losses of a worker are not held against it; after so long with some,
half of them.
"""


class Watch:
    """Looks after the workers and the oldest step, a few times per heartbeat."""

    def __init__(
        self,
        timing: ClusterTiming,
        *,
        connections: Callable[[], Iterable[WorkerConnection]],
        on_silence: Callable[[WorkerConnection, bool], None],
        on_lease_over: Callable[[WorkerConnection, str], None],
        on_tick: Callable[[], None],
        on_steady: Callable[[], None],
        on_time: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_silence` says when a worker becomes silent and when it does not any more; `on_lease_over` that
        it has been silent for too long; `on_tick` is called every time; `on_steady` when no worker was lost
        and nobody called `restart` for a while; `on_time` after each such while, whatever happened in it.
        """
        self._timing = timing
        self._connections = connections
        self._on_silence = on_silence
        self._on_lease_over = on_lease_over
        self._on_tick = on_tick
        self._on_steady = on_steady
        self._on_time = on_time
        self._steady_since_s = 0.0
        self._timed_since_s = 0.0

    def restart(self) -> None:
        """What is steady counts from now on."""
        self._steady_since_s = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        interval_s = self._timing.heartbeat_interval_s / 2
        self.restart()
        self._timed_since_s = loop.time()
        num_late = 0
        while True:
            due_s = loop.time() + interval_s
            await asyncio.sleep(interval_s)
            num_late = num_late + 1 if loop.time() - due_s > interval_s else 0
            if 0 < num_late <= _MOST_LATE:
                # This process was held up, so heartbeats may be here that nobody has read.
                continue
            self._check(loop.time())
            self._on_tick()

    def _check(self, now_s: float) -> None:
        for connection in list(self._connections()):
            silence_s = now_s - connection.heard_at_s
            lease_s = self._timing.lease_s
            if connection.loads_tokenizer:
                lease_s = max(lease_s, self._timing.loading_lease_s)
            if silence_s > lease_s:
                self._on_lease_over(connection, f"no heartbeat for {silence_s:.1f} s")
                self.restart()
                continue
            is_silent = silence_s > lease_s / 2
            if is_silent != connection.is_silent:
                connection.is_silent = is_silent
                self._on_silence(connection, is_silent)
        if now_s - self._steady_since_s > _STEADY_S:
            self._on_steady()
            self.restart()
        if now_s - self._timed_since_s > _STEADY_S:
            self._on_time()
            self._timed_since_s = now_s
