"""An event loop in a thread, for surfaces that are servers."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeVar

from tests.fuzz.harness import HANG_S, Broken

_Value = TypeVar("_Value")


class Background:
    """Runs coroutines in a thread of its own, one at a time for the caller."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _Value], *, timeout_s: float = HANG_S) -> _Value:
        """Wait for the result of `work`. Raises Broken if it hangs."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            raise Broken(f"nothing within {timeout_s:g} s") from None

    @contextmanager
    def entered(self, make: Callable[[], AbstractAsyncContextManager[_Value]]) -> Iterator[_Value]:
        """Make, enter and leave an asynchronous context in the thread."""

        async def enter() -> tuple[AbstractAsyncContextManager[_Value], _Value]:
            context = make()
            return context, await context.__aenter__()

        context, value = self.run(enter())
        try:
            yield value
        finally:
            self.run(context.__aexit__(None, None, None))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class ErrorsLogged(logging.Handler):
    """Keeps what the product logs with a traceback: exceptions that no servicer or handler expects."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.texts.append(self.format(record))

    def check(self) -> None:
        """Raises Broken for an error since the last check."""
        if self.texts:
            texts, self.texts = self.texts, []
            raise Broken("logged: " + "\n".join(texts)[-3000:])


@contextmanager
def errors_logged() -> Iterator[ErrorsLogged]:
    handler = ErrorsLogged()
    logging.getLogger().addHandler(handler)
    try:
        yield handler
    finally:
        logging.getLogger().removeHandler(handler)
