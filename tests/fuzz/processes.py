"""A process for each surface, which may hang or end without taking the run with it."""

from __future__ import annotations

import multiprocessing
import signal
import time
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized

from tests.fuzz.harness import HANG_S, MAX_FINDINGS, Finding, Tally, run_cases
from tests.fuzz.planted import PLANTED
from tests.fuzz.surfaces import SURFACES

OPENING_S = 60.0
POLL_S = 0.5
_KNOWN = {**SURFACES, PLANTED.name: PLANTED}
_CONTEXT = multiprocessing.get_context("spawn")


def run_surface(name: str, seed: int, num_cases: int) -> Tally:
    """Run all cases; a process that hangs or ends is replaced, and goes on after the case that it was at."""
    whole = Tally(name)
    numbers = _KNOWN[name].numbers(num_cases)
    while numbers and len(whole.findings) < MAX_FINDINGS:
        run = _Run(name, seed, numbers, whole)
        if (problem := run.wait()) is None:
            break
        if run.at < numbers[0]:
            raise RuntimeError(f"surface {name} cannot be opened: {problem}")
        whole.num_cases += run.at - numbers[0] + 1
        whole.add(Finding(name, seed, run.at, problem, f"{problem} {run.at}"))
        numbers = range(run.at + 1, num_cases)
    print(whole.line(), flush=True)
    return whole


class _Run:
    """One process, which sends its findings when it has them."""

    def __init__(self, name: str, seed: int, numbers: range, whole: Tally) -> None:
        self._whole = whole
        self._current: Synchronized[int] = _CONTEXT.Value("q", numbers[0] - 1)
        self._results, sender = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(target=_child, args=(name, seed, numbers, self._current, sender))
        self._process.start()
        sender.close()

    @property
    def at(self) -> int:
        """The number of the case that was begun last."""
        return self._current.value

    def wait(self) -> str | None:
        """Take findings until the process has made all cases; return why it did not."""
        seen, seen_s = self.at, time.monotonic() + OPENING_S
        try:
            while True:
                while self._results.poll(POLL_S):
                    if self._take(self._results.recv()):
                        return None
                if (now := self.at) != seen:
                    seen, seen_s = now, time.monotonic()
                if self._process.exitcode is not None and not self._results.poll():
                    return _exit_text(self._process.exitcode)
                if time.monotonic() - seen_s > HANG_S:
                    return f"the process hung for {HANG_S:g} s"
        except (EOFError, OSError):  # also in the middle of a finding
            self._process.join(HANG_S)
            code = self._process.exitcode
            return f"the process hung for {HANG_S:g} s at its end" if code is None else _exit_text(code)
        finally:
            self._process.join(POLL_S)
            self._process.kill()
            self._process.join()

    def _take(self, result: Finding | Tally) -> bool:
        """Whether it is the last result."""
        if isinstance(result, Finding):
            self._whole.add(result)
            return False
        self._whole.count(result)
        return True


def _exit_text(code: int) -> str:
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"


def _child(name: str, seed: int, numbers: range, current: Synchronized[int], results: Connection) -> None:
    surface = _KNOWN[name]

    def note(number: int) -> None:
        current.value = number

    with surface.opened() as opened:
        tally = run_cases(surface, opened, seed, numbers, note, results.send)
    results.send(tally.without_findings())
