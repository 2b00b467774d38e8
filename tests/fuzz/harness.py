"""Runs numbered cases of a surface: each ends in success or a typed error, soon, without a lasting trace.

A case is bytes, made from seed and number alone. What a case must not do is a `Finding`: raise anything but a
typed error, take longer than `MAX_CASE_S`, end the process, or leave memory behind.
"""

from __future__ import annotations

import gc
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psutil

MAX_CASE_S = 5.0
"""Processor time of a case in this process; its wall time is limited by `HANG_S` alone."""
HANG_S = 30.0
"""Time after which a case that has not ended is a hang."""
MAX_GROWTH_BYTES = 64 * 2**20
"""Growth of a process from the end of the warm-up to the last case; caches with limits are below."""
WARM_UP = 0.4
"""Part of the cases after which caches are full."""
MIN_CASES_FOR_MEMORY = 400
CHECK_EVERY = 100
MAX_FINDINGS = 25
"""Different ones of a surface, after which its run ends."""

CORPUS = Path(__file__).parent / "corpus"
_ROOT = Path(__file__).parents[2]


class Broken(AssertionError):
    """A case ended in something that is neither success nor a typed error; the text says in what."""


def _ignore(what: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Opened:
    """A surface that takes cases.

    `examine` returns how a case ended ("ok", or the error's name). `check` raises unless a known request is
    answered as before. `pids` are the processes whose memory must not grow.
    """

    examine: Callable[[bytes], str]
    check: Callable[[], None] = lambda: None
    pids: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """Something that reads bytes from outside; `share` is its part of the cases of a whole run."""

    name: str
    share: int
    make: Callable[[Random], bytes]
    opened: Callable[[], AbstractContextManager[Opened]]

    def case(self, seed: int, number: int) -> bytes:
        """The bytes of a case; those below 0 once failed, whatever the seed."""
        if number < 0:
            return self.corpus[number].read_bytes()
        return self.make(Random(f"{self.name} {seed} {number}"))

    @property
    def corpus(self) -> list[Path]:
        """What once failed."""
        return sorted((CORPUS / self.name).glob("*.case"))

    def numbers(self, num_cases: int) -> range:
        """All of the corpus, and so many new cases."""
        return range(-len(self.corpus), num_cases)


@dataclass(frozen=True, slots=True)
class Finding:
    """A case that broke a rule; `signature` is equal for cases with the same cause."""

    surface: str
    seed: int
    number: int
    problem: str
    signature: str

    def line(self) -> str:
        first = self.problem.strip().splitlines()[-1]
        return f"{self.surface} seed={self.seed} case={self.number}: {first[:300]}"


@dataclass(slots=True)
class Tally:
    """How the cases of a surface ended."""

    surface: str
    num_cases: int = 0
    seconds: float = 0.0
    grown_bytes: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    repeated: Counter[str] = field(default_factory=Counter)
    on_finding: Callable[[Finding], None] = _ignore

    def add(self, finding: Finding) -> None:
        """Keep the first finding of each signature."""
        self.repeated[finding.signature] += 1
        if self.repeated[finding.signature] == 1:
            self.findings.append(finding)
            self.on_finding(finding)

    def without_findings(self) -> Tally:
        """The numbers alone."""
        return Tally(self.surface, self.num_cases, self.seconds, self.grown_bytes, self.outcomes)

    def count(self, other: Tally) -> None:
        """Count the cases of another tally, without its findings."""
        self.num_cases += other.num_cases
        self.seconds += other.seconds
        self.grown_bytes = max(self.grown_bytes, other.grown_bytes)
        self.outcomes += other.outcomes

    def line(self) -> str:
        rate = self.num_cases / self.seconds if self.seconds else 0.0
        most = ", ".join(f"{name} {count}" for name, count in self.outcomes.most_common(6))
        return (
            f"{self.surface:18} {self.num_cases:7} cases {rate:7.0f}/s  "
            f"grown {self.grown_bytes / 2**20:5.1f} MB  {len(self.findings)} findings  {most}"
        )


class Memory:
    """Resident memory of processes, compared with what it was after the warm-up."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        self._before: list[int] | None = None

    def grown_bytes(self) -> int:
        """Growth of the process that grew most since the first call."""
        gc.collect()
        now = [process.memory_info().rss for process in self._processes]
        if self._before is None:
            self._before = now
        return max((late - early for early, late in zip(self._before, now, strict=True)), default=0)


def run_cases(
    surface: Surface,
    opened: Opened,
    seed: int,
    numbers: Sequence[int],
    on_case: Callable[[int], None] = _ignore,
    on_finding: Callable[[Finding], None] = _ignore,
) -> Tally:
    """Examine the cases; `on_case` is called before each, and `on_finding` at once."""
    tally, memory = Tally(surface.name, on_finding=on_finding), Memory(opened.pids)
    warm = int(len(numbers) * WARM_UP)
    began_s = time.monotonic()
    for index, number in enumerate(numbers):
        if index == warm:
            memory.grown_bytes()
        on_case(number)
        data = surface.case(seed, number)
        _run_case(surface.name, opened, seed, number, data, tally)
        if index % CHECK_EVERY == CHECK_EVERY - 1 or index == len(numbers) - 1:
            _guard(surface.name, seed, number, opened.check, tally)
        if len(tally.findings) >= MAX_FINDINGS:
            break
    tally.grown_bytes = memory.grown_bytes()
    if tally.grown_bytes > MAX_GROWTH_BYTES and len(numbers) >= MIN_CASES_FOR_MEMORY:
        text = (
            f"memory grew by {tally.grown_bytes / 2**20:.0f} MB over cases {numbers[warm]} to {numbers[-1]}"
        )
        tally.add(Finding(surface.name, seed, numbers[-1], text, "growth"))
    tally.seconds = time.monotonic() - began_s
    return tally


def _run_case(name: str, opened: Opened, seed: int, number: int, data: bytes, tally: Tally) -> None:
    tally.num_cases += 1

    def examine() -> None:
        began_s = time.process_time()
        tally.outcomes[opened.examine(data)] += 1
        if (took_s := time.process_time() - began_s) > MAX_CASE_S:
            raise Broken(f"the case took {took_s:.1f} s of processor time, the limit is {MAX_CASE_S:g} s")

    _guard(name, seed, number, examine, tally)


def _guard(name: str, seed: int, number: int, work: Callable[[], None], tally: Tally) -> None:
    try:
        work()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # Rust's panics are no Exceptions
        problem = "".join(traceback.format_exception(error))
        tally.add(Finding(name, seed, number, problem, _signature(error)))


def _signature(error: BaseException) -> str:
    """The error's kind and the line of ours that raised it; numbers in the text of a Broken do not count."""
    if isinstance(error, Broken):
        return re.sub(r"\d+|'.*'", "", str(error))[:120]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_ours(frame.filename)]
    place = f"{own[-1].filename}:{own[-1].lineno}" if own else ""
    return f"{type(error).__name__} {place}"


def _is_ours(file: str) -> bool:
    return file.startswith(str(_ROOT)) and "site-packages" not in file and "tests/fuzz/harness" not in file


def shares(surfaces: Iterable[Surface], num_cases: int) -> dict[str, int]:
    """Number of cases of each surface, at least 1."""
    known = list(surfaces)
    total = sum(surface.share for surface in known)
    return {surface.name: max(1, num_cases * surface.share // total) for surface in known}
