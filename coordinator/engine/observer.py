"""Facts that the engine publishes: its numbers at one time, and events for its observer."""

from collections import abc
from dataclasses import dataclass
from enum import Enum

from coordinator.engine.request import Request, RequestTotals
from coordinator.scheduler.batch import SchedulerCounts, SequenceUpdate
from coordinator.scheduler.sequence import Sequence
from stageline_rpc.v1 import cluster_pb2
from wire.errors import ServingError
from wire.steps import Step, StepResult


class EndCause(Enum):
    """Why an epoch ends. The values equal the wire enum.

    Attributes:
        DEATH: a worker was lost, possibly because of a request.
        DEVICE: a worker reported a failed device and exits, hardly because of a request.
        FAULT: a stage refused a step, or its result is overdue.
        BROKEN: a stream ended for an unknown reason.
        NO_PROGRESS: several epochs in a row were BROKEN without a token, possibly because of a request.
        REPLANNED: a better plan exists.
    """

    DEATH = cluster_pb2.EPOCH_END_CAUSE_DEATH
    DEVICE = cluster_pb2.EPOCH_END_CAUSE_DEVICE
    FAULT = cluster_pb2.EPOCH_END_CAUSE_FAULT
    BROKEN = cluster_pb2.EPOCH_END_CAUSE_BROKEN
    NO_PROGRESS = cluster_pb2.EPOCH_END_CAUSE_NO_PROGRESS
    REPLANNED = cluster_pb2.EPOCH_END_CAUSE_REPLANNED


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """Numbers of the engine at one time; sequences are of live requests.

    `num_preparing` sequences belong to requests that are not live yet.
    """

    num_preparing: int
    num_queued: int
    num_prefilling: int
    num_decoding: int
    num_detached: int
    num_kept: int
    num_steps_in_flight: int
    ended: RequestTotals
    scheduled: SchedulerCounts


class EngineObserver:
    """Receives the engine's events; the methods of this base class do nothing.

    The methods run on the event loop between two steps and must return within microseconds. `now_s` is the
    engine's clock.
    """

    def accepted(self, request: Request, now_s: float) -> None:
        """A request was queued, or restored from the journal."""

    def step_scheduled(self, duration_s: float) -> None:
        """The scheduler took `duration_s` to build the next step."""

    def step_sent(self, step: Step, now_s: float) -> None:
        """A step was sent; its decodes precede its prompt chunks."""

    def step_completed(
        self, result: StepResult, updates: abc.Sequence[SequenceUpdate], sent_s: float, now_s: float
    ) -> None:
        """The result of the oldest step, sent at `sent_s`, arrived; nothing of it was delivered yet."""

    def preempted(self, sequences: abc.Sequence[Sequence], now_s: float) -> None:
        """`sequences` lost their blocks and were queued again."""

    def requeued(self, sequences: abc.Sequence[Sequence], now_s: float) -> None:
        """`sequences` were queued again, so that suspects of a worker loss run alone."""

    def epoch_started(self, epoch: int, now_s: float) -> None:
        """Steps of this epoch can be sent."""

    def epoch_stopped(self, cause: EndCause | None, reason: str, now_s: float) -> None:
        """Steps in flight were discarded; running sequences were queued again.

        `cause` is None when the coordinator stops.
        """

    def ended(self, request: Request, error: ServingError | None, now_s: float) -> None:
        """A request finished, or ended with `error`."""
