"""Recent steps with stage times; load of stages, and pipeline bubble.

All times are seconds of the coordinator's monotonic clock. The start of a stage's computation is the step's
sending plus the hop, receive, wait and compute times of all stages before it.

These times are known when a step is answered. While steps are in flight, a stage's window ends with its last
known computation.
"""

import math
from collections import abc, deque
from dataclasses import dataclass

from coordinator.engine.observer import EndCause
from coordinator.observability.facts import FactObserver, SentStep, StepRecord
from coordinator.scheduler.batch import SequenceUpdate
from wire.steps import StageTime, Step

KEPT_S = 10.0
MAX_STEPS = 4096
MAX_STAGE_TIMES = 32768
"""Limit over all steps: with 64 stages, 512 steps are stored."""


class StepHistory(FactObserver):
    """Steps in flight, and steps answered within the last `KEPT_S`."""

    def __init__(self) -> None:
        self._in_flight = deque[SentStep]()
        self._answered = deque[StepRecord]()
        self._num_stage_times = 0
        self.num_answered = 0

    def step_sent(self, sent: SentStep, step: Step) -> None:
        self._in_flight.append(sent)

    def step_completed(self, record: StepRecord, updates: abc.Sequence[SequenceUpdate]) -> None:
        self._in_flight.popleft()
        self.num_answered = record.number
        self._answered.append(record)
        self._num_stage_times += len(record.stage_times)
        self._prune(record.answered_s)

    def epoch_stopped(self, cause: EndCause | None, reason: str, now_s: float) -> None:
        self._in_flight.clear()

    def in_flight(self) -> tuple[SentStep, ...]:
        """Oldest first."""
        return tuple(self._in_flight)

    def answered(self, now_s: float) -> tuple[StepRecord, ...]:
        """Oldest first."""
        self._prune(now_s)
        return tuple(self._answered)

    def _prune(self, now_s: float) -> None:
        steps = self._answered
        while steps and (
            steps[0].answered_s < now_s - KEPT_S
            or len(steps) > MAX_STEPS
            or self._num_stage_times > MAX_STAGE_TIMES
        ):
            self._num_stage_times -= len(steps.popleft().stage_times)


Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """Load of one stage over the last seconds.

    `busy_share` is the share of time spent computing. Times are means per step in seconds; `hop_s` ends with
    the first byte of the frame, as in traces.
    """

    num_steps: int
    busy_share: float
    compute_s: float
    wait_s: float
    hop_s: float


def stage_loads(
    steps: abc.Sequence[StepRecord], now_s: float, *, began_s: float, is_idle: bool
) -> list[StageLoad]:
    """Load of each stage of the newest step with stage times; empty without one.

    Time before `began_s`, steps without slices and steps of other plans do not count. `is_idle`: no step is
    in flight.
    """
    known = [step for step in steps if step.stage_times and step.sent.num_sequences]
    if not known:
        return []
    num_stages = len(known[-1].stage_times)
    known = [step for step in known if len(step.stage_times) == num_stages]
    begin_s = max(now_s - KEPT_S, began_s)
    # only steps sent before the window can have been computed before it
    early = [list(step.computed()) for step in known if step.sent.sent_s < begin_s]
    ends_s = [end_s for _, end_s in known[-1].computed()]
    loads = []
    for stage, times in enumerate(zip(*[step.stage_times for step in known], strict=True)):
        window = (begin_s, now_s if is_idle else min(now_s, ends_s[stage]))
        before_s = _overlap_s([computed[stage] for computed in early], (-math.inf, begin_s))
        loads.append(_load(times, before_s, window[1] - window[0]))
    return loads


def _load(times: abc.Sequence[StageTime], before_s: float, window_s: float) -> StageLoad:
    """`before_s` of the compute time were before the window."""
    count = len(times)
    compute_s = sum([stage_time.compute_us for stage_time in times]) / 1e6
    return StageLoad(
        num_steps=count,
        busy_share=_share(compute_s - before_s, window_s),
        compute_s=compute_s / count,
        wait_s=sum([stage_time.wait_us for stage_time in times]) / count / 1e6,
        hop_s=sum([stage_time.hop_us for stage_time in times]) / count / 1e6,
    )


def _share(part_s: float, whole_s: float) -> float:
    return min(1.0, max(0.0, part_s) / max(whole_s, 1e-9))


def _overlap_s(intervals: abc.Sequence[Interval], window: Interval) -> float:
    begin_s, end_s = window
    return sum([max(0.0, min(end, end_s) - max(begin, begin_s)) for begin, end in intervals])


WINDOW_S = 10


@dataclass(slots=True)
class _Second:
    index: int
    active_s: float = 0.0
    computed_s: float = 0.0


class BubbleWindow:
    """Bubble of the last ten seconds, in buckets of one second.

    Bubble = 1 - computed / active, where `active` is the time with at least one step in flight, and
    `computed` the compute time of answered steps, as a mean over all stages. A step counts when it is
    answered, so the share is approximate for steps longer than the window.
    """

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque(maxlen=WINDOW_S + 1)

    def add(self, now_s: float, *, active_s: float, computed_s: float = 0.0) -> None:
        """Add `active_s` with steps in flight, and the mean compute time per stage of an answered step."""
        second = self._at(int(now_s))
        second.active_s += active_s
        second.computed_s += computed_s

    def share(self, now_s: float) -> float | None:
        """In [0, 1]; None without steps in flight."""
        recent = [second for second in self._seconds if second.index > now_s - WINDOW_S]
        active_s = sum(second.active_s for second in recent)
        if active_s <= 0:
            return None
        return min(1.0, max(0.0, 1.0 - sum(second.computed_s for second in recent) / active_s))

    def _at(self, index: int) -> _Second:
        if not self._seconds or self._seconds[-1].index != index:
            self._seconds.append(_Second(index))
        return self._seconds[-1]
