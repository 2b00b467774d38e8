"""An event loop whose clock jumps from one event to the next, and the processes whose code it runs."""

from __future__ import annotations

import asyncio
import heapq
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.network import Network

_OWNER: ContextVar[Process | None] = ContextVar("owner", default=None)


BEGAN_S = 1000.0
"""When a simulation begins, on its clock."""


class NeverCalm(Exception):
    """More happens than a cluster of this size can have to do."""


class Process:
    """The callbacks of one process of the cluster, which can be frozen, thawed and killed.

    A frozen process keeps its due callbacks until it is thawed. A killed process still runs its cleanup,
    which is not visible because its calls are closed.
    """

    def __init__(self, name: str, network: Network) -> None:
        self.name = name
        self.network = network
        self.loop = network.loop
        self.is_frozen = False
        self.is_dead = False
        self.tasks: set[asyncio.Task[Any]] = set()
        self.stalled: list[Handle] = []
        self.context = copy_context()
        self.context.run(_OWNER.set, self)

    @staticmethod
    def current() -> Process:
        """The process whose code runs now."""
        owner = _OWNER.get()
        assert owner is not None, "only processes open calls and servers"
        return owner

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of this process; all tasks that it makes are too."""
        task = asyncio.Task(coroutine, loop=self.loop, context=self.context.copy())
        self.adopt(task)
        return task

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """Ends with the process."""
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False
        stalled, self.stalled = self.stalled, []
        for handle in stalled:
            self.loop.ready.append(handle)

    def drop_unfinished(self) -> None:
        """What never came to rest, because of a planted bug, is not left to the garbage collector."""
        for task in tuple(self.tasks):
            coroutine: Any = task.get_coro()
            with suppress(RuntimeError):  # its cleanup waits for a task that was cancelled
                coroutine.close()
            with suppress(RuntimeError):
                coroutine.close()

    def die(self) -> None:
        """Close the calls of a killed process."""
        self.is_dead = True
        self.thaw()
        for task in tuple(self.tasks):
            task.cancel()


class Handle:
    """A callback that is due now or at a moment."""

    __slots__ = ("args", "callback", "context", "is_cancelled", "moment_s", "owner")

    def __init__(
        self, callback: Callable[..., Any], args: tuple[Any, ...], context: Context, moment_s: float
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self.moment_s = moment_s
        self.owner: Process | None = context.get(_OWNER)
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.moment_s


class VirtualLoop(asyncio.AbstractEventLoop):
    """As much of an event loop as tasks, timers and queues need. `problems` has what goes wrong in it."""

    def __init__(self) -> None:
        self.ready: deque[Handle] = deque()
        self.problems: list[str] = []
        self.num_timers = 0
        self.most_callbacks = 200_000
        self._num_callbacks = 0
        self._timers: list[tuple[float, int, Handle]] = []
        self._now_s = BEGAN_S
        self._num_handles = 0

    def time(self) -> float:
        return self._now_s

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:
        handle = Handle(callback, args, context or copy_context(), self._now_s)
        self.ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Any:
        handle = Handle(callback, args, context or copy_context(), when)
        self._num_handles += 1
        heapq.heappush(self._timers, (when, self._num_handles, handle))
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Any:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        owner = _OWNER.get()
        if owner is not None:
            owner.adopt(task)
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.problems.append(f"{context.get('message')}: {context.get('exception')!r}")

    def run_until(self, moment_s: float, *, is_done: Callable[[], bool] = lambda: False) -> None:
        """Runs what is due, up to `moment_s` or until `is_done`, which is asked whenever the clock moves."""
        timers = self._timers
        with self._as_running():
            while True:
                self._run_ready()
                if is_done() or not timers or timers[0][0] > moment_s:
                    break
                when, _, handle = heapq.heappop(timers)
                if handle.is_cancelled:
                    continue
                self._now_s = max(self._now_s, when)
                self.num_timers += 1
                self.ready.append(handle)
        if not is_done():
            self._now_s = max(self._now_s, moment_s)

    def _run_ready(self) -> None:
        ready = self.ready
        while ready:
            handle = ready.popleft()
            self._num_callbacks += 1
            if self._num_callbacks > self.most_callbacks:
                raise NeverCalm(f"more than {self.most_callbacks} callbacks in {self._now_s - BEGAN_S:.3f} s")
            if handle.is_cancelled:
                continue
            if handle.owner is not None and handle.owner.is_frozen:
                handle.owner.stalled.append(handle)
                continue
            try:
                handle.context.run(handle.callback, *handle.args)
            except Exception as error:
                self.problems.append(f"{handle.callback}: {error!r}")

    @contextmanager
    def _as_running(self) -> Iterator[None]:
        before = asyncio._get_running_loop()
        hooks = sys.get_asyncgen_hooks()
        asyncio._set_running_loop(self)
        sys.set_asyncgen_hooks(finalizer=lambda agen: self.create_task(agen.aclose()) and None)
        try:
            yield
        finally:
            asyncio._set_running_loop(before)
            sys.set_asyncgen_hooks(*hooks)
