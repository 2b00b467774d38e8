"""The compared policies: schedulers with limits of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from coordinator.recovery.policy import DEFAULT_POLICY
from coordinator.scheduler.policy import (
    BatchingPolicy,
    DecodeLoad,
    PrefillLoad,
    SchedulerLimits,
    StepPlan,
)
from coordinator.scheduler.scheduler import Scheduler


class FixedBudgetPolicy(BatchingPolicy):
    """`max_step_tokens` tokens per step, decodes first; a step per stage."""

    def __init__(self, limits: SchedulerLimits, scheduler: Scheduler) -> None:
        super().__init__(limits, scheduler.cost_model)
        self._fixed = StepPlan(
            slowest=scheduler.cost_model.slowest,
            num_steps=limits.min_in_flight,
            num_shares=limits.min_in_flight,
            prefill_tokens=limits.max_step_tokens,
        )

    def plan_step(
        self, load: DecodeLoad, prefill: PrefillLoad, *, num_in_flight: int, now_s: float
    ) -> StepPlan | None:
        return self._fixed if num_in_flight < self._fixed.num_steps else None


class FixedBudget(Scheduler):
    """A scheduler with a fixed token budget per step."""

    def begin_epoch(self, epoch: int, kv: Any, limits: SchedulerLimits, *, admits_new: bool = True) -> None:
        super().begin_epoch(epoch, kv, limits, admits_new=admits_new)
        self._batching = FixedBudgetPolicy(limits, self)


class PrefillFirst(FixedBudget):
    """As `FixedBudget`, and no decodes while prompts wait."""

    def _add_decodes(self, builder: Any, kv: Any, num_steps: int, *, max_decodes: int) -> None:
        if not self._num_waiting_tokens:
            super()._add_decodes(builder, kv, num_steps, max_decodes=max_decodes)


@dataclass(frozen=True, slots=True)
class Compared:
    """A policy: its scheduler and changes of the default limits."""

    name: str
    new_scheduler: Callable[[], Scheduler] = lambda: Scheduler(DEFAULT_POLICY)
    max_step_tokens: int | None = None
    max_decode_slowdown: float | None = None

    def limits(self, limits: SchedulerLimits) -> SchedulerLimits:
        return replace(
            limits,
            max_step_tokens=self.max_step_tokens or limits.max_step_tokens,
            max_decode_slowdown=self.max_decode_slowdown,
        )


DEFAULT = Compared("default")
POLICIES = (
    DEFAULT,
    Compared("slowdown 1.3", max_decode_slowdown=1.3),
    Compared("slowdown 10", max_decode_slowdown=10.0),
    Compared("512 per step", lambda: FixedBudget(DEFAULT_POLICY), max_step_tokens=512),
    Compared("2,048 per step", lambda: FixedBudget(DEFAULT_POLICY), max_step_tokens=2048),
    Compared("prefill first", lambda: PrefillFirst(DEFAULT_POLICY), max_step_tokens=512),
)
