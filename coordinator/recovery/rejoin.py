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
    """Of the last loss; one before it counts no more."""

    def __init__(self, policy: RecoveryPolicy) -> None:
        self._policy = policy
        self._num_losses = 0
        self.is_running = False

    def await_all(self) -> StartTimer:
        """Nobody is here yet, and whoever was before may come."""
        self.is_running = True
        return StartTimer(
            max(self._policy.return_grace_s, self._policy.coordinator_rejoin_s),
            GraceExpired(self._num_losses),
        )

    def note_loss(self, *, is_granted: bool) -> None:
        """A worker is lost; unless that `is_granted`, nobody waits for it."""
        self._num_losses += 1
        self.is_running = is_granted

    def timer(self) -> StartTimer:
        """When it is over."""
        return StartTimer(self._policy.return_grace_s, GraceExpired(self._num_losses))

    def end(self, timer: GraceExpired) -> bool:
        """Its time is over; False for an older one."""
        if timer.num_losses != self._num_losses:
            return False
        self.is_running = False
        return True


class FailureCounters:
    """Counted in a row: a result makes up for epochs that bore none, a token for those that broke."""

    def __init__(self, policy: RecoveryPolicy) -> None:
        self._policy = policy
        self._num_without_result = 0
        self._num_breaks = 0
        self._last_break = ""
        self._hop_failures = Counter[str]()
        self._non_finite = dict[str, deque[frozenset[RequestId]]]()

    @property
    def text(self) -> str:
        """How often epochs have broken since the last token, and why; empty if none has."""
        if self._num_breaks < 2:
            return self._last_break
        return f"{self._last_break}, and so or in a like way ended {self._num_breaks} epochs without a token"

    def next_delay_s(self) -> float:
        """An epoch is to begin, after this pause."""
        delay_s = 0.0
        if self._num_without_result:
            # The exponent is bounded: 2**1024 is no float.
            doubled_s = self._policy.first_epoch_delay_s * 2 ** min(self._num_without_result - 1, 10)
            delay_s = min(self._policy.max_epoch_delay_s, doubled_s)
        self._num_without_result += 1
        return delay_s

    def on_progress(self) -> None:
        """A result has come."""
        self._num_without_result = 0
        if self._hop_failures:
            self._hop_failures.clear()

    def note_token(self) -> None:
        """Somebody has got on."""
        if self._num_breaks:
            self._num_breaks, self._last_break = 0, ""

    def record_break(self, reason: str) -> bool:
        """An epoch has broken; True when that is to be taken for lasting."""
        self._num_breaks += 1
        self._last_break = reason
        return self._num_breaks >= self._policy.max_breaks

    def start_over(self) -> None:
        """With another plan, of which neither failed hops nor fruitless epochs say anything."""
        self._num_without_result = 0
        self._hop_failures.clear()
        self._non_finite.clear()

    def note_steady(self) -> None:
        """All has gone well for a while."""
        self._non_finite.clear()

    def record_non_finite(self, worker: str, requests: Collection[RequestId]) -> bool:
        """What this worker computed for these requests was not finite; True when it is not to be trusted:
        once more, and not always for the same single request. Results in between make up for nothing: they
        may be of steps that it did not spoil.
        """
        steps = self._non_finite.setdefault(worker, deque(maxlen=self._policy.non_finite_window))
        steps.append(frozenset(requests))
        return len(steps) >= self._policy.max_non_finite_steps and len(frozenset().union(*steps)) > 1

    def record_unreached(self, worker: str) -> bool:
        """The stage before does not reach this worker; True when that is to be taken for lasting."""
        self._hop_failures[worker] += 1
        return self._hop_failures[worker] >= self._policy.max_hop_failures
