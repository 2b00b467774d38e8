"""Rejoin timer of lost workers, and failure counters with restart backoff. Pure."""

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


Timer = HoldExpired | GraceExpired


@dataclass(frozen=True, slots=True)
class StartTimer:
    """Call `ClusterState.elapsed(timer)` after `delay_s`."""

    delay_s: float
    timer: Timer


class RejoinTimer:
    """Timer of the last loss; timers of earlier ones are void."""

    def __init__(self, policy: RecoveryPolicy) -> None:
        self._policy = policy
        self._num_losses = 0
        self.is_running = False

    def await_all(self) -> StartTimer:
        """Starts the timer of a restarted coordinator, for the workers of the former one."""
        self.is_running = True
        return StartTimer(
            max(self._policy.return_grace_s, self._policy.coordinator_rejoin_s),
            GraceExpired(self._num_losses),
        )

    def note_loss(self, *, is_granted: bool) -> None:
        """Restarts the timer for a loss, or stops it unless the wait `is_granted`."""
        self._num_losses += 1
        self.is_running = is_granted

    def timer(self) -> StartTimer:
        """The action that starts the timer of the last loss."""
        return StartTimer(self._policy.return_grace_s, GraceExpired(self._num_losses))

    def end(self, timer: GraceExpired) -> bool:
        """Stops the timer; False for the timer of an earlier loss."""
        if timer.num_losses != self._num_losses:
            return False
        self.is_running = False
        return True


class FailureCounters:
    """Consecutive failures of epochs: a result resets epochs without one, a token resets broken ones."""

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
        """Pause before the epoch that begins now."""
        delay_s = 0.0
        if self._num_without_result:
            # The exponent is bounded: 2**1024 is no float.
            doubled_s = self._policy.first_epoch_delay_s * 2 ** min(self._num_without_result - 1, 10)
            delay_s = min(self._policy.max_epoch_delay_s, doubled_s)
        self._num_without_result += 1
        return delay_s

    def on_progress(self) -> None:
        """A result arrived in the current epoch."""
        self._num_without_result = 0
        if self._hop_failures:
            self._hop_failures.clear()

    def on_token(self) -> None:
        """A token arrived in the current epoch."""
        if self._num_breaks:
            self._num_breaks, self._last_break = 0, ""

    def record_break(self, reason: str) -> bool:
        """Counts a broken epoch; True once that is considered lasting."""
        self._num_breaks += 1
        self._last_break = reason
        return self._num_breaks >= self._policy.max_breaks

    def start_over(self) -> None:
        """Resets what was counted of the previous plan."""
        self._num_without_result = 0
        self._hop_failures.clear()
        self._non_finite.clear()

    def note_steady(self) -> None:
        """Forgets non-finite steps after a steady window."""
        self._non_finite.clear()

    def record_non_finite(self, worker: str, requests: Collection[RequestId]) -> bool:
        """Counts a non-finite step of `worker`; True once plans should avoid it: the steps are not all of one
        request. Results in between reset nothing: they may be of steps that the worker computed correctly.
        """
        steps = self._non_finite.setdefault(worker, deque(maxlen=self._policy.non_finite_window))
        steps.append(frozenset(requests))
        return len(steps) >= self._policy.max_non_finite_steps and len(frozenset().union(*steps)) > 1

    def record_unreached(self, worker: str) -> bool:
        """Counts a failed connection to `worker`; True once that is considered lasting."""
        self._hop_failures[worker] += 1
        return self._hop_failures[worker] >= self._policy.max_hop_failures
