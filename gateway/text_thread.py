"""Text work on one thread beside the event loop."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

_Result = TypeVar("_Result")
Work = Callable[[], Any]
_Outcome = tuple["TextJob", Any, Exception | None]

TURN_S = 0.005
"""How long the thread works on what it was handed before others may be ahead of the rest."""


class TextJob(Protocol):
    """Something with work for the thread, now and then."""

    def begin(self) -> Work | None:
        """Return what is to be done now, if anything; called on the event loop."""

    def end(self, result: Any, error: Exception | None) -> None:
        """Take the result of that work; called on the event loop."""


class TextThread:
    """Runs work of tenants in turns, and hands over everything that waits at once.

    A hand-over wakes the thread and then the event loop, which costs more than the text of one token. So the
    work of all streams that received tokens from one step travels together, and comes back after `TURN_S`.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._waiting: dict[TextJob, str] = {}
        self._begun: list[_Begun] = []
        self._is_busy = False
        self._is_closed = False

    def of(self, tenant: str) -> "TenantText":
        """The thread as one tenant uses it."""
        return TenantText(self, tenant)

    def add(self, job: TextJob, *, tenant: str) -> None:
        """Begin `job` soon; no effect while it waits for that."""
        self._waiting[job] = tenant
        if not self._is_busy:
            self._is_busy = True
            loop = asyncio.get_running_loop()
            loop.call_soon(self._hand_over, loop)

    def close(self) -> None:
        """Begin no more work; what has ended still arrives."""
        self._is_closed = True
        self._executor.shutdown(wait=False)

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._is_closed:
            return
        waiting, self._waiting = self._waiting, {}
        new = [
            _Begun(tenant, job, work) for job, tenant in waiting.items() if (work := job.begin()) is not None
        ]
        batch, self._begun = _in_turns([*self._begun, *new]), []
        if batch:
            self._executor.submit(self._run_batch, loop, batch)
        else:
            self._is_busy = False

    def _run_batch(self, loop: asyncio.AbstractEventLoop, batch: "list[_Begun]") -> None:
        outcomes, until_s = list[_Outcome](), time.monotonic() + TURN_S
        for begun in batch:
            outcomes.append((begun.job, *_outcome(begun.work)))
            if time.monotonic() >= until_s:
                break
        loop.call_soon_threadsafe(self._deliver, loop, outcomes, batch[len(outcomes) :])

    def _deliver(
        self, loop: asyncio.AbstractEventLoop, outcomes: list[_Outcome], rest: "list[_Begun]"
    ) -> None:
        self._begun = rest
        if rest or self._waiting:
            self._hand_over(loop)
        else:
            self._is_busy = False
        for job, result, error in outcomes:
            job.end(result, error)


@dataclass(frozen=True, slots=True)
class TenantText:
    """The text thread with the turns of one tenant."""

    thread: TextThread
    tenant: str

    def add(self, job: TextJob) -> None:
        """Begin `job` soon; no effect while it waits for that."""
        self.thread.add(job, tenant=self.tenant)

    def run(self, work: Callable[[], _Result]) -> asyncio.Future[_Result]:
        """Return the future result of `work`."""
        future: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        self.add(_SingleWork(future, work))
        return future


@dataclass(frozen=True, slots=True)
class _Begun:
    """A job with its work."""

    tenant: str
    job: TextJob
    work: Work


def _in_turns(begun: Iterable[_Begun]) -> list[_Begun]:
    """The first job of each tenant, then the second ones, and so on; otherwise in the same order."""
    num_before = Counter[str]()
    rounds = []
    for job in begun:
        rounds.append((num_before[job.tenant], job))
        num_before[job.tenant] += 1
    return [job for _, job in sorted(rounds, key=lambda turn: turn[0])]


class _SingleWork:
    """Work whose result a future has."""

    def __init__(self, future: asyncio.Future[Any], work: Work) -> None:
        self._future, self._work = future, work

    def begin(self) -> Work:
        return self._work

    def end(self, result: Any, error: Exception | None) -> None:
        if self._future.done():  # its reader was cancelled
            return
        if error is None:
            self._future.set_result(result)
        else:
            self._future.set_exception(error)


def _outcome(work: Work) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error
