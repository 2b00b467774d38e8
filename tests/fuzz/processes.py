"""A process for each surface, which may hang or end without taking the run with it."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import Synchronized
from queue import Empty

from tests.fuzz.harness import HANG_S, MAX_FINDINGS, Finding, Tally, run_cases
from tests.fuzz.surfaces import SURFACES

OPENING_S = 60.0
_CONTEXT = multiprocessing.get_context("spawn")


def run_surface(name: str, seed: int, num_cases: int) -> Tally:
    """Run all cases; a process that hangs or ends is replaced, and goes on after the case that it was at."""
    whole, first = Tally(name), 0
    while first < num_cases and len(whole.findings) < MAX_FINDINGS:
        tally, at = _run_process(name, seed, range(first, num_cases))
        if tally is not None:
            whole.merge(tally)
            break
        if at < first:
            raise RuntimeError(f"surface {name} cannot be opened")
        whole.num_cases += at - first + 1
        problem = "the process hung or ended"
        whole.add(Finding(name, seed, at, problem, f"{problem} {at}"))
        first = at + 1
    print(whole.line(), flush=True)
    return whole


def _run_process(name: str, seed: int, numbers: range) -> tuple[Tally | None, int]:
    current: Synchronized[int] = _CONTEXT.Value("q", numbers[0] - 1)
    results: Queue[Tally] = _CONTEXT.Queue()
    process = _CONTEXT.Process(target=_child, args=(name, seed, numbers, current, results))
    process.start()
    seen, seen_s = numbers[0] - 1, time.monotonic() + OPENING_S
    try:
        while True:
            try:
                return results.get(timeout=0.5), current.value
            except Empty:
                pass
            if (now := current.value) != seen:
                seen, seen_s = now, time.monotonic()
            if not process.is_alive() or time.monotonic() - seen_s > HANG_S:
                return None, current.value
    finally:
        process.join(0.5)
        process.kill()
        process.join()


def _child(name: str, seed: int, numbers: range, current: Synchronized[int], results: Queue[Tally]) -> None:
    surface = SURFACES[name]

    def note(number: int) -> None:
        current.value = number

    with surface.opened() as opened:
        tally = run_cases(surface, opened, seed, numbers, note)
    results.put(tally)
    results.close()
    results.join_thread()
