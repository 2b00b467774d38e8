"""Phases of the coordinator, read from its log, and the phases within a pause of a request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from itertools import pairwise
from pathlib import Path


class Phase(Enum):
    """What a request waits for. The first four are known from the coordinator's log; of the time in which an
    epoch serves, DETECTION comes before the first recovery within a pause, and RECOMPUTING after it.
    """

    COORDINATOR_DOWN = "coordinator restarts"
    NO_PLAN = "waits for a worker"
    LOADING = "load and warm up"
    BACKOFF = "backoff before an epoch"
    CONNECTING = "epoch starts (dial)"
    SERVING = "serving"
    DETECTION = "until the fault is noticed"
    RECOMPUTING = "recompute, wait for its turn"


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line; `at_s` is in seconds since 1970."""

    at_s: float
    message: str


@dataclass(frozen=True, slots=True)
class Span:
    """The cluster is in `phase` from `begin_s` to `end_s`."""

    phase: Phase
    begin_s: float
    end_s: float


def read_log(path: Path) -> list[LogLine]:
    """JSON lines of a log; other lines, such as printed output, are skipped."""
    return [line for text in path.read_text(errors="replace").splitlines() if (line := _parse(text))]


def _parse(text: str) -> LogLine | None:
    try:
        entry = json.loads(text)
        return LogLine(datetime.fromisoformat(entry["ts"]).timestamp(), entry["message"])
    except (ValueError, KeyError, TypeError):
        return None


_PLAN = re.compile(r"plan \d+: layers (.*)")
_PLACE = re.compile(r"\S+ on (\S+?)(?:, |$)")
_LEFT = re.compile(r"worker (\S+) left: ")
_READY = re.compile(r"worker (\S+) is ready ")


def spans_of(
    lines: Iterable[LogLine], coordinator_downs: Iterable[tuple[float, float]], *, end_s: float
) -> list[Span]:
    """The phases one after another, without gaps. `coordinator_downs`: when it ended and listened again."""
    spans: list[Span] = []
    changes = sorted([*_changes(lines), *_downs(coordinator_downs)])
    for (begin_s, phase), (next_s, _) in pairwise([*changes, (end_s, "")]):
        if next_s > begin_s:
            spans.append(Span(Phase[phase], begin_s, next_s))
    return spans


def _downs(coordinator_downs: Iterable[tuple[float, float]]) -> Iterator[tuple[float, str]]:
    for begin_s, end_s in coordinator_downs:
        yield begin_s, Phase.COORDINATOR_DOWN.name
        yield end_s, Phase.NO_PLAN.name


def _changes(lines: Iterable[LogLine]) -> Iterator[tuple[float, str]]:
    """(time, phase that begins), read from the log."""
    planned: set[str] = set()
    loading: set[str] = set()
    phase = Phase.NO_PLAN
    for line in lines:
        text = line.message
        if found := _PLAN.match(text):
            planned, phase = set(_PLACE.findall(found[1])), Phase.LOADING
            loading = set(planned)
        elif (found := _READY.match(text)) and phase is Phase.LOADING:
            loading.discard(found[1])
            phase = phase if loading else Phase.BACKOFF
        elif text.startswith("epoch ") and " begins on " in text:
            phase = Phase.CONNECTING
        elif text.startswith("serving: epoch "):
            phase = Phase.SERVING
        elif text.startswith("epoch ") and " is over: " in text:
            phase = Phase.NO_PLAN if " is lost: " in text else Phase.BACKOFF
        elif (found := _LEFT.match(text)) and found[1] in planned and phase is Phase.LOADING:
            phase = Phase.NO_PLAN
        else:
            continue
        yield line.at_s, phase.name


def parts_of(begin_s: float, end_s: float, spans: Iterable[Span]) -> dict[Phase, float]:
    """Seconds per phase between `begin_s` and `end_s`."""
    parts: dict[Phase, float] = {}
    is_recovering = False
    for span in spans:
        overlap_s = min(end_s, span.end_s) - max(begin_s, span.begin_s)
        if overlap_s <= 0:
            continue
        phase = span.phase
        if phase is Phase.SERVING:
            phase = Phase.RECOMPUTING if is_recovering else Phase.DETECTION
        else:
            is_recovering = True
        parts[phase] = parts.get(phase, 0.0) + overlap_s
    return parts


def num_recoveries(begin_s: float, end_s: float, spans: Iterable[Span]) -> int:
    """Number of epochs that started to serve in this time."""
    return sum(span.phase is Phase.SERVING and begin_s < span.begin_s < end_s for span in spans)
