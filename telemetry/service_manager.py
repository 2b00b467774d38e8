"""The notifications of systemd's service manager: readiness, status, watchdog, and time to start and stop.

Source: sd_notify(3) and sd_watchdog_enabled(3) of systemd 257.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from wire.condition import Condition
from wire.foreign_text import parse_digits

log = logging.getLogger(__name__)

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
_INTERVAL_S = 0.5
_BEATS_PER_WATCHDOG = 3
_EXTENSION_S = 60.0
"""A process that starts or stops may take this long from now; a hung one says nothing, and is ended."""


@dataclass(frozen=True, slots=True)
class NotifySettings:
    """Where to notify; without a socket, nowhere. `watchdog_s` is the longest silence that is allowed."""

    socket: str | None = None
    watchdog_s: float | None = None


UNSUPERVISED = NotifySettings()


def read_notify_settings(environment: Mapping[str, str], *, pid: int) -> NotifySettings:
    """Read the variables of systemd. Raises ValueError."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address:
        return UNSUPERVISED
    if not address.startswith(("/", "@")):
        raise ValueError(f"NOTIFY_SOCKET is {address!r}, must begin with '/' or '@'")
    return NotifySettings(address, _watchdog_s(environment, pid))


def _watchdog_s(environment: Mapping[str, str], pid: int) -> float | None:
    text = environment.get("WATCHDOG_USEC", "")
    if not text or environment.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None  # it is not expected, or of another process
    if not (watchdog_us := parse_digits(text, limit=2**63 - 1)):
        raise ValueError(f"WATCHDOG_USEC is {text!r}, must be microseconds above 0")
    return watchdog_us / 1e6


class ServiceManager:
    """Sends notifications. Lost ones are logged once: a process does not fail because of its supervisor."""

    def __init__(self, address: str) -> None:
        """A leading '@' marks an abstract socket."""
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._has_failed = False

    def notify(self, **fields: str | int) -> None:
        """Send assignments in one datagram."""
        text = "".join(f"{name}={str(value).replace(chr(10), ' ')}\n" for name, value in fields.items())
        try:
            self._socket.sendto(text.encode(), self._address)
        except OSError as error:
            if not self._has_failed:
                log.warning("the service manager is not notified: %s", error.strerror)
            self._has_failed = True

    def close(self) -> None:
        self._socket.close()


class Supervision:
    """What a service manager is told of a process: a pure function of its conditions over time."""

    def __init__(self, *, watchdog: bool, is_started: Callable[[Condition], bool]) -> None:
        self._watchdog, self._is_started = watchdog, is_started
        self._status = ""
        self._has_started = self._is_stopping = False

    def next_fields(self, condition: Condition) -> dict[str, str | int]:
        """The notification that is due."""
        fields: dict[str, str | int] = {}
        if not self._has_started and self._is_started(condition):
            self._has_started = True
            fields["READY"] = 1
        if condition.is_stopping and not self._is_stopping:
            self._is_stopping = True
            fields["STOPPING"] = 1
        if condition.text != self._status:
            fields["STATUS"] = self._status = condition.text
        if self._watchdog:
            fields["WATCHDOG"] = 1
        if self._is_stopping or not self._has_started:
            fields["EXTEND_TIMEOUT_USEC"] = round(_EXTENSION_S * 1e6)
        return fields

    def last_fields(self) -> dict[str, str | int]:
        """At the end of the process."""
        return {} if self._is_stopping else {"STOPPING": 1}


@contextlib.asynccontextmanager
async def supervised(
    settings: NotifySettings,
    condition: Callable[[], Condition],
    *,
    is_started: Callable[[Condition], bool] = lambda condition: condition.is_ready,
) -> AsyncIterator[None]:
    """Notify the service manager, if there is one, from this event loop while the block runs.

    The process has started when `is_started`; the watchdog sees a loop that hangs.
    """
    if settings.socket is None:
        yield
        return
    manager = ServiceManager(settings.socket)
    supervision = Supervision(watchdog=settings.watchdog_s is not None, is_started=is_started)
    task = asyncio.create_task(_follow(manager, supervision, settings, condition), name="service manager")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        manager.notify(**supervision.last_fields())
        manager.close()


async def _follow(
    manager: ServiceManager,
    supervision: Supervision,
    settings: NotifySettings,
    condition: Callable[[], Condition],
) -> None:
    beat_s = _INTERVAL_S if settings.watchdog_s is None else settings.watchdog_s / _BEATS_PER_WATCHDOG
    while True:
        if fields := supervision.next_fields(condition()):
            manager.notify(**fields)
        await asyncio.sleep(min(_INTERVAL_S, beat_s))
