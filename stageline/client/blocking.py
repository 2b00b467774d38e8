"""Runs the calls of an asynchronous client for threads that block: one event loop, on a thread of its own."""

import asyncio
import atexit
import concurrent.futures
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Generator
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from stageline.client.connection import CLOSED
from stageline.client.errors import Cancelled

_Result = TypeVar("_Result")
_Client = TypeVar("_Client", bound=AbstractAsyncContextManager[object])
INTERRUPT_S = 0.5
"""Until an interrupt is seen that did not wake the thread that waits for a result."""
_END = object()
_AFTER_FORK = (
    "this process was forked after a SyncClient was used, and gRPC does not work in such a process: fork "
    "before the first call, or start processes with the method 'spawn' or 'forkserver'"
)


class _LoopThread:
    """Keeps a client open in its event loop until `stop`, which ends all calls."""

    def __init__(self, client: AbstractAsyncContextManager[object]) -> None:
        self._client = client
        self._stopping = asyncio.Event()
        self._opened: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        # A daemon, because the interpreter waits for other threads before it calls `stop`.
        self._thread = threading.Thread(target=self._serve, name="stageline SyncClient", daemon=True)
        _threads.add(self)
        _ever_started.add(os.getpid())
        atexit.register(self.stop)
        self._thread.start()
        self._loop = self._opened.result()

    def submit(self, coroutine: Coroutine[Any, Any, _Result]) -> concurrent.futures.Future[_Result]:
        """Run a coroutine in the event loop, in the caller's context."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    @property
    def is_current(self) -> bool:
        """Whether the caller is this thread, which must not wait for itself."""
        return threading.current_thread() is self._thread

    def stop_soon(self) -> None:
        """End the thread without waiting for it."""
        if self in _threads and not self._loop.is_closed():
            with suppress(RuntimeError):  # closed in the meantime
                self._loop.call_soon_threadsafe(self._stopping.set)

    def stop(self) -> None:
        """End every call and the thread."""
        self.stop_soon()
        if self in _threads and not self.is_current:
            self._thread.join()

    def _serve(self) -> None:
        try:
            asyncio.run(self._keep_open())
        except BaseException as error:
            if self._opened.done():
                raise
            self._opened.set_exception(error)
        finally:
            atexit.unregister(self.stop)
            _threads.discard(self)

    async def _keep_open(self) -> None:
        async with self._client:
            self._opened.set_result(asyncio.get_running_loop())
            await self._stopping.wait()


_threads: set[_LoopThread] = set()
_lost_in_fork: list[_LoopThread] = []
"""Of the parent process: they do not run in this one. Kept, since gRPC could not free their channels."""
_ever_started: set[int] = set()
"""Ids of this process and its parents, of those that used gRPC here."""


def _forget_threads() -> None:
    _lost_in_fork.extend(_threads)
    _threads.clear()


os.register_at_fork(after_in_child=_forget_threads)


class _Stream(Generic[_Result]):
    """An asynchronous generator that several tasks use, one at a time."""

    def __init__(self, items: AsyncGenerator[_Result, None]) -> None:
        self._items = items
        self._turn = asyncio.Lock()

    async def next(self) -> _Result | object:
        """The next item, or `_END`."""
        async with self._turn:
            return await anext(self._items, _END)

    async def close(self) -> None:
        async with self._turn:
            await self._items.aclose()


def _result_of(future: concurrent.futures.Future[_Result]) -> _Result:
    """Wait for the result, and look for interrupts meanwhile: one that arrives just before the thread sleeps,
    or that another thread gets, does not wake it.
    """
    while True:
        try:
            return future.result(INTERRUPT_S)
        except TimeoutError:
            if future.done():
                raise


class BlockingCalls(Generic[_Client]):
    """Opens an asynchronous client at the first call, and closes it with `close`, or when collected."""

    def __init__(self, client: _Client) -> None:
        self._asynchronous = client
        self._lock = threading.RLock()
        self._loop_thread: _LoopThread | None = None
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every call (it raises `Cancelled`) and the connection. The client cannot be used afterwards."""
        with self._lock:
            self._is_closed = True
        if self._loop_thread is not None:
            self._loop_thread.stop()

    def _run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Wait for the result. An interrupt of the wait cancels the coroutine."""
        future = self._submit(coroutine)
        try:
            return _result_of(future)
        except concurrent.futures.CancelledError:
            raise Cancelled(CLOSED) from None
        finally:
            future.cancel()

    def _iterate(self, items: AsyncGenerator[_Result, None]) -> Generator[_Result, None, None]:
        """Yield the items. The end of the iteration, for any reason, closes the asynchronous generator."""
        stream = _Stream(items)
        try:
            while (item := self._run(stream.next())) is not _END:
                yield item  # type: ignore[misc]
        finally:
            # Without waiting: garbage collection may close a generator in any thread, also in the loop's.
            with suppress(RuntimeError):  # the client is closed
                self._submit(stream.close())

    def _submit(self, coroutine: Coroutine[Any, Any, _Result]) -> concurrent.futures.Future[_Result]:
        try:
            with self._lock:  # so that a call that begins before `close` ends by it
                return self._opened().submit(coroutine)
        except BaseException:
            coroutine.close()
            raise

    def _opened(self) -> _LoopThread:
        if _ever_started - {os.getpid()}:
            raise RuntimeError(_AFTER_FORK)
        if self._is_closed:
            raise RuntimeError("the client is closed: create another one")
        if self._loop_thread is None:
            self._loop_thread = _LoopThread(self._asynchronous)
            weakref.finalize(self, self._loop_thread.stop_soon).atexit = False
        return self._loop_thread
