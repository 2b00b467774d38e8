"""Timers of the cluster, such as the wait for lost workers, and failure counters with backoff. Pure."""

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass

from coordinator.recovery.policy import RecoveryPolicy
from wire.ids import Incarnation, RequestId


@dataclass(frozen=True, slots=True)
class HoldExpired:
    """A worker with repeated losses may be used again."""

    name: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class GraceExpired:
    """The time for a lost worker to rejoin is over; `num_losses` identifies the loss."""

    num_losses: int


@dataclass(frozen=True, slots=True)
class LinksOverdue:
    """A worker had long enough to measure its ways to others."""

    name: str
    incarnation: Incarnation


Timer = HoldExpired | GraceExpired | LinksOverdue


@dataclass(frozen=True, slots=True)
class StartTimer:
    """Call `ClusterState.elapsed(timer)` after `delay_s`."""

    delay_s: float
    timer: Timer


class RejoinTimer:
    """Grace period of the last loss; timers of earlier losses are ignored."""

    def __init__(self, policy: RecoveryPolicy) -> None:
        self._policy = policy
        self._num_losses = 0
        self.is_running = False
        self._is_of_restart = False

    @property
    def awaits_all(self) -> bool:
        """Whether all workers of a restarted coordinator may rejoin; how many it had is not known."""
        return self.is_running and self._is_of_restart

    def await_all(self) -> StartTimer:
        """Start the timer of a restarted coordinator, for workers to rejoin."""
        self.is_running = self._is_of_restart = True
        return StartTimer(
            max(self._policy.rejoin_grace_s, self._policy.coordinator_rejoin_s),
            GraceExpired(self._num_losses),
        )

    def record_loss(self, *, is_granted: bool) -> None:
        """Restart the timer for a loss, or stop it unless the wait `is_granted`."""
        self._num_losses += 1
        self.is_running = is_granted
        self._is_of_restart = False

    def timer(self) -> StartTimer:
        """The action that starts the timer of the last loss."""
        return StartTimer(self._policy.rejoin_grace_s, GraceExpired(self._num_losses))

    def end(self, timer: GraceExpired) -> bool:
        """Stop the timer; False for the timer of an earlier loss."""
        if timer.num_losses != self._num_losses:
            return False
        self.is_running = False
        return True


class FailureCounters:
    """Consecutive failures: a result resets the restart backoff, a token resets the broken epochs."""

    def __init__(self, policy: RecoveryPolicy) -> None:
        self._policy = policy
        self._num_without_result = 0
        self._num_breaks = 0
        self._last_break = ""
        self._hop_failures = Counter[str]()
        self._non_finite = dict[str, deque[frozenset[RequestId]]]()

    @property
    def text(self) -> str:
        """Number and reason of breaks since the last token; empty if there are none."""
        if self._num_breaks < 2:
            return self._last_break
        return f"{self._last_break}; {self._num_breaks} epochs in a row ended without a token"

    def next_delay_s(self) -> float:
        """Delay of the next epoch."""
        delay_s = 0.0
        if self._num_without_result:
            # The exponent is bounded: 2**1024 is no float.
            doubled_s = self._policy.first_epoch_delay_s * 2 ** min(self._num_without_result - 1, 10)
            delay_s = min(self._policy.max_epoch_delay_s, doubled_s)
        self._num_without_result += 1
        return delay_s

    def on_progress(self) -> None:
        """Reset the backoff after a result."""
        self._num_without_result = 0
        if self._hop_failures:
            self._hop_failures.clear()

    def on_token(self) -> None:
        """Reset the broken epochs after a token."""
        if self._num_breaks:
            self._num_breaks, self._last_break = 0, ""

    def record_break(self, reason: str) -> bool:
        """Count a broken epoch; returns True if breaks are lasting."""
        self._num_breaks += 1
        self._last_break = reason
        return self._num_breaks >= self._policy.max_breaks

    def reset_plan(self) -> None:
        """Reset the counters of the previous plan."""
        self._num_without_result = 0
        self._hop_failures.clear()
        self._non_finite.clear()

    def on_steady(self) -> None:
        """Forget non-finite steps after a steady window."""
        self._non_finite.clear()

    def record_non_finite(self, worker: str, requests: Collection[RequestId]) -> bool:
        """Count a non-finite step of `worker`; returns True if plans should avoid it.

        That is the case if the steps are not all of one request. Finite steps in between reset nothing.
        """
        steps = self._non_finite.setdefault(worker, deque(maxlen=self._policy.non_finite_window))
        steps.append(frozenset(requests))
        return len(steps) >= self._policy.max_non_finite_steps and len(frozenset().union(*steps)) > 1

    def record_unreached(self, worker: str) -> bool:
        """Count a failed connection to `worker`; returns True if plans should avoid it."""
        self._hop_failures[worker] += 1
        return self._hop_failures[worker] >= self._policy.max_hop_failures
