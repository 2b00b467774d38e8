"""What the steps say of the pipeline: how long they take, where, and how much of it stages idle."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

from coordinator.cluster.actions import EndCause
from coordinator.observing.bubble import BubbleWindow
from coordinator.requests.observer import EngineObserver
from coordinator.scheduling.answers import Progress
from telemetry.metrics import definitions
from telemetry.metrics.registry import Registry
from wire.steps import StageTime, Step, StepResult


@dataclass(slots=True)
class _StageTotals:
    """Of all answered steps at one stage, in microseconds."""

    hop: int = 0
    receive: int = 0
    wait: int = 0
    compute: int = 0


class PipelineMetrics(EngineObserver):
    """Steps, stages and recoveries, from what the engine sees."""

    def __init__(self, registry: Registry) -> None:
        self._step_time = registry.distribution(definitions.STEP_TIME).of()
        self._scheduler_time = registry.distribution(definitions.SCHEDULER_TIME).of()
        self._part_time = registry.number(definitions.STEP_PART_TIME)
        self._active_time = registry.number(definitions.ACTIVE_TIME).of()
        self._recoveries = registry.number(definitions.RECOVERIES)
        self._recovery_time = registry.distribution(definitions.RECOVERY_TIME)
        for reason in definitions.REASON.values:
            self._recoveries.of(reason)
        self._bubble = registry.number(definitions.BUBBLE)
        self._window = BubbleWindow()
        self._stages: list[_StageTotals] = []
        self._num_in_flight = 0
        self._counted_s = 0.0
        self._broken: tuple[float, str] | None = None
        self._cause: EndCause | None = None

    def step_scheduled(self, duration_s: float) -> None:
        self._scheduler_time.observe(duration_s)

    def step_sent(self, step: Step, now_s: float) -> None:
        if self._num_in_flight:
            self._count_active(now_s)
        self._num_in_flight += 1
        self._counted_s = now_s

    def step_answered(
        self, result: StepResult, progress: Items[Progress], sent_s: float, now_s: float
    ) -> None:
        self._step_time.observe(now_s - sent_s)
        computed_us = self._add_times(result.stage_times)
        self._count_active(now_s, computed_s=computed_us / 1e6)
        self._num_in_flight -= 1

    def note_end(self, cause: EndCause) -> None:
        """Why the epoch is about to be stopped."""
        self._cause = cause

    def epoch_stopped(self, reason: str, now_s: float) -> None:
        if self._num_in_flight:
            self._count_active(now_s)
        self._num_in_flight = 0
        if self._cause is not None:
            cause = self._cause.name.lower()
            self._recoveries.of(cause).add()
            self._broken, self._cause = (now_s, cause), None

    def epoch_started(self, epoch: int, now_s: float) -> None:
        if self._broken is not None:
            broken_s, cause = self._broken
            self._recovery_time.of(cause).observe(now_s - broken_s)
            self._broken = None

    def read(self, now_s: float) -> None:
        """Brings what is not counted step by step up to now."""
        share = self.bubble_share(now_s)
        for stage, totals in enumerate(self._stages):
            for part in definitions.STEP_PART.values:
                self._part_time.of(str(stage), part).set(getattr(totals, part) / 1e6)
        self._bubble.clear()
        if share is not None:
            self._bubble.of().set(share)

    def bubble_share(self, now_s: float) -> float | None:
        """Of the time with steps in flight in the last seconds, the share in which stages computed nothing;
        None where nothing was in flight.
        """
        if self._num_in_flight:
            self._count_active(now_s)
        return self._window.share(now_s)

    def _count_active(self, now_s: float, *, computed_s: float = 0.0) -> None:
        active_s = now_s - self._counted_s
        self._counted_s = now_s
        self._active_time.add(active_s)
        self._window.add(now_s, active_s=active_s, computed_s=computed_s)

    def _add_times(self, times: Items[StageTime]) -> float:
        """Returns the mean of what the stages have computed, in microseconds."""
        if not times:
            return 0.0
        while len(self._stages) < len(times):
            self._stages.append(_StageTotals())
        computed_us = 0
        for totals, time in zip(self._stages, times, strict=False):
            totals.hop += max(0, time.hop_us)
            totals.receive += time.receive_us
            totals.wait += time.wait_us
            totals.compute += time.compute_us
            computed_us += time.compute_us
        return computed_us / len(times)
