"""Writes the log without ever waiting for whoever reads it: a full pipe must not hold up steps."""

import contextlib
import logging
import os
import threading
from collections import deque

MAX_WAITING_LINES = 4096
"""Beyond that, lines are dropped and counted."""
LAST_WORDS_S = 1.0
"""How long the end of the process waits for lines that are not written yet."""


class LogWriter(logging.Handler):
    """Formats on the caller's thread, writes on one of its own. `num_dropped` lines have found no place.

    It writes to a file descriptor, past the buffers of Python's streams: the interpreter aborts when it ends
    while somebody holds the lock of such a buffer.
    """

    def __init__(self, descriptor: int, *, max_waiting: int = MAX_WAITING_LINES) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._max_waiting = max_waiting
        self._waiting = deque[str]()
        self._changed = threading.Condition()
        self._is_writing = self._is_closed = False
        self.num_dropped = 0
        self._num_untold = 0
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            if self._is_closed:
                return
            if len(self._waiting) >= self._max_waiting:
                self.num_dropped += 1
                self._num_untold += 1
                return
            self._waiting.append(line)
            self._changed.notify_all()

    def flush(self) -> None:
        """Waits for what is not written yet, but not for ever."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._is_writing, LAST_WORDS_S)

    def close(self) -> None:
        """Takes no more lines; those that it has are still written."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        super().close()

    def _run(self) -> None:
        while lines := self._take():
            # Where nobody reads stderr any more, there is no other place to say so.
            with contextlib.suppress(OSError):
                _write(self._descriptor, "".join(f"{line}\n" for line in lines))
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()

    def _take(self) -> list[str]:
        """What waits, as soon as anything does; nothing once this is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            lines, num_untold = list(self._waiting), self._num_untold
            self._waiting.clear()
            self._num_untold = 0
            self._is_writing = bool(lines)
        if num_untold:
            lines.append(self.format(_told(num_untold)))
        return lines


def _write(descriptor: int, text: str) -> None:
    left = memoryview(text.encode(errors="backslashreplace"))
    while left:
        left = left[os.write(descriptor, left) :]


def _told(num_dropped: int) -> logging.LogRecord:
    text = "%d lines of this log are lost: they came faster than they could be written"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (num_dropped,), None)
