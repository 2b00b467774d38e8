"""Runs the phases one after another, each in a process of its own, and keeps what they found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from bench.gpu.phase import FACTS_KIND, RATES_KIND, ROW_KIND, Order
from bench.gpu.rows import Row, decode

REPOSITORY = Path(__file__).resolve().parents[2]
PARENT_DEATH_SIGNAL = REPOSITORY / "deploy" / "parent_death_signal.py"
"""Run by its path: the package needs packages that may be missing."""
GRACE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """`weight_s` is the phase's share of the time, in seconds of nine minutes; `module` is its name."""

    letter: str
    name: str
    about: str
    weight_s: float
    needs_model: bool = True


PHASES = (
    Phase(
        letter="A",
        name="hardware",
        about="clocks, rates of memory, products and copies, cost of launches",
        weight_s=25,
        needs_model=False,
    ),
    Phase(
        letter="",
        name="checkpoint",
        about="a model with random weights, made on the device",
        weight_s=30,
        needs_model=False,
    ),
    Phase(
        letter="B",
        name="decode",
        about="decode steps of the reference stage, by batch and context",
        weight_s=130,
    ),
    Phase(letter="C", name="prompts", about="prompt steps, by length and context", weight_s=80),
    Phase(letter="D", name="sampling", about="what sampling adds to a decode step", weight_s=40),
    Phase(
        letter="E",
        name="wire_copies",
        about="hidden states from the wire to the device and back, and between stages of a host",
        weight_s=25,
        needs_model=False,
    ),
    Phase(
        letter="F", name="cluster", about="real clusters of one and two stages on the device", weight_s=105
    ),
    Phase(
        letter="G",
        name="failures",
        about="out of memory, kill -9 and a device-side assert beside running streams",
        weight_s=50,
    ),
    Phase(letter="H", name="transformers", about="transformers on the same checkpoint", weight_s=40),
    Phase(
        letter="I",
        name="experts",
        about="products of quantised experts, against the bytes of chosen ones",
        weight_s=15,
        needs_model=False,
    ),
)
ALWAYS = ("hardware", "checkpoint")
"""Phases that the others need: they may take all the time that is left."""


class PhaseStatus(StrEnum):
    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """How a phase ended; `error` is empty if it is DONE."""

    phase: Phase
    status: PhaseStatus
    error: str = ""
    took_s: float = 0.0
    limit_s: float = 0.0
    rows: tuple[Row, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.phase.name,
            "letter": self.phase.letter,
            "about": self.phase.about,
            "status": self.status.value,
            "error": self.error,
            "took_s": round(self.took_s, 1),
            "limit_s": round(self.limit_s, 1),
        }


@dataclass(slots=True)
class Found:
    """What the phases of a run found so far."""

    device: str
    versions: Mapping[str, str]
    results: list[PhaseResult] = field(default_factory=list)
    rates: Mapping[str, float] = field(default_factory=dict)
    has_model: bool = False

    @property
    def rows(self) -> list[Row]:
        return [row for result in self.results for row in result.rows]

    @property
    def has_failed(self) -> bool:
        return any(result.status is not PhaseStatus.DONE for result in self.results)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """`minutes` is for all phases together; logs go to `output`, large files to `work`."""

    device: str
    is_quick: bool
    minutes: float
    output: Path
    work: Path
    command: tuple[str, ...] = (sys.executable, "-P", "-m", "bench.gpu.phase")


def chosen(names: Sequence[str]) -> list[Phase]:
    """Phases by name, and those that they need; all without names. Raises ValueError."""
    known = [phase.name for phase in PHASES]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{', '.join(unknown)}: no such phases; there are {', '.join(known)}")
    return [phase for phase in PHASES if not names or phase.name in names or phase.name in ALWAYS]


def run_phases(
    phases: Sequence[Phase],
    settings: RunSettings,
    found: Found,
    *,
    after_each: Callable[[Found], None],
    say: Callable[[str], None],
) -> None:
    """Run `phases`, and call `after_each` after each. A phase that ends early leaves its time to the rest."""
    end_s = time.monotonic() + 60 * settings.minutes
    for index, phase in enumerate(phases):
        weights_s = [later.weight_s for later in phases[index:]]
        limit_s = max(0.0, end_s - time.monotonic())
        if phase.name not in ALWAYS:
            limit_s *= phase.weight_s / sum(weights_s)
        say(f"{phase.name}: {phase.about} (at most {limit_s:.0f} s)")
        if phase.needs_model and not found.has_model:
            reason = "no checkpoint: its phase failed"
            result = PhaseResult(phase=phase, status=PhaseStatus.SKIPPED, error=reason)
        else:
            result = _run(phase, settings, found, limit_s)
        found.results.append(result)
        if phase.name == "checkpoint":
            found.has_model = result.status is PhaseStatus.DONE
        if result.error:
            say(f"{phase.name}: {result.status.value}: {result.error}")
        after_each(found)


def _run(phase: Phase, settings: RunSettings, found: Found, limit_s: float) -> PhaseResult:
    began_s = time.monotonic()
    order = Order(
        phase=phase.name,
        device=settings.device,
        is_quick=settings.is_quick,
        deadline_s=began_s + limit_s,
        work=settings.work,
        logs=settings.output.absolute() / "logs",
        rows_file=settings.work / f"{phase.name}.jsonl",
        rates=found.rates,
    )
    log = order.logs / f"{phase.name}.log"
    code = _exit_code(settings.command, order, log, limit_s)
    rows = _read(order.rows_file, found)
    status, error = PhaseStatus.DONE, ""
    if code is None:
        status, error = PhaseStatus.TIMED_OUT, f"not done after {limit_s:.0f} s"
    elif code != 0:
        status, error = PhaseStatus.FAILED, _last_line(log) or f"exit code {code}"
    return PhaseResult(
        phase=phase,
        status=status,
        error=error,
        took_s=time.monotonic() - began_s,
        limit_s=limit_s,
        rows=tuple(rows),
    )


def _exit_code(command: tuple[str, ...], order: Order, log: Path, limit_s: float) -> int | None:
    """Run the phase's process to its end; None if it was killed at its deadline."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output, _process([*command, order.encoded()], output) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None


@contextmanager
def _process(command: list[str], output: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process group that ends with this block, and with this process however it ends."""
    path = [str(REPOSITORY), str(REPOSITORY / "proto"), os.environ.get("PYTHONPATH", "")]
    environment = {
        "GRPC_VERBOSITY": "NONE",
        "GRPC_ENABLE_FORK_SUPPORT": "false",
        "HF_HUB_OFFLINE": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }
    wrapper = [sys.executable, "-I", "-S", str(PARENT_DEATH_SIGNAL), str(os.getpid())]
    process = subprocess.Popen(
        [*wrapper, *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, number)
                try:
                    process.wait(GRACE_S)
                except subprocess.TimeoutExpired:
                    continue


def _read(file: Path, found: Found) -> list[Row]:
    """The rows of a phase; its rates and facts go to `found`. A line without its end is not complete."""
    if not file.exists():
        return []
    complete, _, _ = file.read_text().rpartition("\n")
    rows = []
    for line in complete.splitlines():
        values = json.loads(line)
        kind = values.pop("kind")
        if kind == ROW_KIND:
            rows.append(decode(values))
        elif kind == RATES_KIND:
            found.rates = values
        elif kind == FACTS_KIND:
            found.device, found.versions = values["device"], values["versions"]
    return rows


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""
