"""Failure detector: missing heartbeats and overdue steps."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from coordinator.engine.engine import Engine
from coordinator.recovery.policy import RecoveryPolicy
from wire.errors import StepFaultKind
from wire.steps import FaultReport


class Heartbeats(Protocol):
    """Attributes of a worker connection that the detector uses."""

    last_message_s: float
    loads_tokenizer: bool
    is_silent: bool


Worker = TypeVar("Worker", bound=Heartbeats)


@dataclass(frozen=True, slots=True)
class StageProgress:
    """Warm-up of a stage, and the number of steps of the epoch in its last heartbeat."""

    warmup_s: float
    num_steps: int


def overdue_fault(
    engine: Engine, stages: Sequence[StageProgress | None], policy: RecoveryPolicy
) -> FaultReport | None:
    """The fault of the oldest step in flight if its result is overdue.

    `stages` is in stage order; None for a stage whose worker was lost.
    """
    warmup_s = sum(stage.warmup_s for stage in stages if stage is not None)
    unknown_s = max(policy.first_step_timeout_s, policy.first_step_warmups * warmup_s)
    overdue = engine.overdue_step(unknown_s=unknown_s)
    if overdue is None:
        return None
    step = overdue.step
    missing = (stage is None or stage.num_steps <= step.step_id for stage in stages)
    first_missing = next((index for index, is_missing in enumerate(missing) if is_missing), len(stages) - 1)
    return FaultReport(
        epoch=step.epoch,
        step_id=step.step_id,
        stage=first_missing,
        kind=StepFaultKind.OVERDUE,
        message=f"no result for {overdue.waited_s:.1f} s, the limit is {overdue.limit_s:.1f} s",
        request_ids=step.request_ids,
    )


class FailureDetector(Generic[Worker]):
    """Checks leases and the oldest step twice per heartbeat."""

    def __init__(
        self,
        policy: RecoveryPolicy,
        *,
        connections: Callable[[], Iterable[Worker]],
        on_silence: Callable[[Worker, bool], None],
        on_lease_over: Callable[[Worker, str], None],
        on_tick: Callable[[], None],
        on_steady: Callable[[], None],
        on_window: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            on_silence: called when heartbeats of a worker are missing, and when they arrive again.
            on_lease_over: called with the reason when the lease of a worker expired.
            on_tick: called with every check.
            on_steady: called after a steady window without a loss or a `restart`.
            on_window: called after every steady window.
        """
        self._policy = policy
        self._connections = connections
        self._on_silence = on_silence
        self._on_lease_over = on_lease_over
        self._on_tick = on_tick
        self._on_steady = on_steady
        self._on_window = on_window
        self._steady_since_s = 0.0
        self._timed_since_s = 0.0

    def restart(self) -> None:
        """Start a new steady window."""
        self._steady_since_s = asyncio.get_running_loop().time()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        interval_s = self._policy.heartbeat_interval_s / 2
        self.restart()
        self._timed_since_s = loop.time()
        num_late = 0
        while True:
            due_s = loop.time() + interval_s
            await asyncio.sleep(interval_s)
            num_late = num_late + 1 if loop.time() - due_s > interval_s else 0
            if 0 < num_late <= self._policy.max_late_checks:
                # This process was delayed, so heartbeats may be unread.
                continue
            self._check(loop.time())
            self._on_tick()

    def _check(self, now_s: float) -> None:
        for connection in list(self._connections()):
            silence_s = now_s - connection.last_message_s
            lease_s = self._policy.lease_s
            if connection.loads_tokenizer:
                lease_s = max(lease_s, self._policy.loading_lease_s)
            if silence_s > lease_s:
                self._on_lease_over(connection, f"no heartbeat for {silence_s:.1f} s")
                self.restart()
                continue
            is_silent = silence_s > lease_s / 2
            if is_silent != connection.is_silent:
                connection.is_silent = is_silent
                self._on_silence(connection, is_silent)
        if now_s - self._steady_since_s > self._policy.steady_window_s:
            self._on_steady()
            self.restart()
        if now_s - self._timed_since_s > self._policy.steady_window_s:
            self._on_window()
            self._timed_since_s = now_s
