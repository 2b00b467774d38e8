"""What was seen of each request of a load."""

from dataclasses import dataclass, field
from itertools import pairwise

from stageline.load.plan import PlannedRequest

OK = "OK"
RUNNING = "RUNNING"
INTERRUPTED = "INTERRUPTED"


@dataclass(kw_only=True, slots=True)
class RequestRecord:
    """One request that came due. Times are seconds from the load's begin, when the first request was due.

    `slot_wait_s` is how long it waited because as many as the concurrency limit allows were running. Entry i
    of `message_times_s` is when the i-th message with tokens arrived, which had `message_tokens[i]` of them.
    `sent_s` is None while it waits for that. `status` is OK, RUNNING, INTERRUPTED (by whoever drives the
    load) or the name of the gRPC status that it failed with, which `error` explains.
    """

    planned: PlannedRequest
    sent_s: float | None = None
    slot_wait_s: float = 0.0
    ended_s: float | None = None
    message_times_s: list[float] = field(default_factory=list)
    message_tokens: list[int] = field(default_factory=list)
    status: str = RUNNING
    error: str = ""
    cached_tokens: int = 0
    restarts: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether all its tokens have arrived."""
        return self.status == OK

    @property
    def has_failed(self) -> bool:
        """Whether it has ended otherwise than by its own length or an interruption."""
        return self.status not in (OK, RUNNING, INTERRUPTED)

    @property
    def num_tokens(self) -> int:
        """Output tokens that have arrived."""
        return sum(self.message_tokens)

    @property
    def lag_s(self) -> float | None:
        """How late it was sent by the load generator's own fault; None while it is not sent."""
        if self.sent_s is None:
            return None
        return max(0.0, self.sent_s - self.planned.time_s - self.slot_wait_s)

    @property
    def ttft_s(self) -> float:
        """From when it was due to its first token."""
        return self.message_times_s[0] - self.planned.time_s

    @property
    def e2e_s(self) -> float:
        """From when it was due to its last token."""
        return self.message_times_s[-1] - self.planned.time_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first one; None for a single token."""
        num_later = self.num_tokens - 1
        return (self.message_times_s[-1] - self.message_times_s[0]) / num_later if num_later else None

    @property
    def gaps_s(self) -> list[float]:
        """Between each message with tokens and the next one."""
        return [later_s - earlier_s for earlier_s, later_s in pairwise(self.message_times_s)]


@dataclass(kw_only=True, slots=True)
class Tally:
    """What a load that is under way comes to so far."""

    num_due: int = 0
    num_running: int = 0
    num_completed: int = 0
    num_failed: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRun:
    """What a load that was driven has left behind.

    `num_planned` requests were to be sent; `records` has those that came due before `duration_s`, which ends
    with the last request or with an interruption. `cpu_s` is the processor time of the load generator.
    """

    records: tuple[RequestRecord, ...]
    num_planned: int
    duration_s: float
    cpu_s: float
    is_interrupted: bool = False
