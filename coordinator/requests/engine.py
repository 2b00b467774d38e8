"""Binds scheduler, pipeline and clients together: events in, steps and tokens out.

Everything here runs on the event loop without awaiting, so there is one owner and no lock. After each event
the engine hands out steps for as long as the scheduler has any.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from coordinator.requests.output import OutputChannel
from coordinator.scheduling.kv_feed import KvFeed
from coordinator.scheduling.kv_log import KvLog
from coordinator.scheduling.lifecycle import SequenceState
from coordinator.scheduling.scheduler import Progress, Scheduler, SchedulerLimits
from coordinator.scheduling.sequence import Sequence
from wire.errors import (
    ClusterUnavailable,
    Overloaded,
    RequestCancelled,
    RequestExists,
    RequestNotFound,
    ServingError,
    StepFailed,
)
from wire.ids import RequestId, SequenceKey, id_text
from wire.steps import FaultReport, Step, StepResult

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestTotals:
    """Requests that have ended, since the coordinator started."""

    finished: int = 0
    cancelled: int = 0
    failed: int = 0


class Engine:
    """Owner of the scheduler and of the channels to the clients."""

    def __init__(self, *, queue_size: int) -> None:
        """`queue_size` bounds the live requests that hold no blocks."""
        if queue_size < 1:
            raise ValueError(f"queue_size must be at least 1, got {queue_size}")
        self._queue_size = queue_size
        self._scheduler = Scheduler()
        self._live: dict[RequestId, tuple[Sequence, OutputChannel]] = {}
        self._send: Callable[[Step], None] | None = None
        self._num_preparing = 0
        self.totals = RequestTotals()
        self.kv_feed = KvFeed()

    @property
    def scheduler(self) -> Scheduler:
        """For reading only."""
        return self._scheduler

    @property
    def num_preparing(self) -> int:
        """Requests that are being tokenized, or wait for a pipeline, and are not live yet."""
        return self._num_preparing

    @property
    def live_sequences(self) -> list[Sequence]:
        return [sequence for sequence, _ in self._live.values()]

    def submit(self, sequence: Sequence) -> OutputChannel:
        """Accepts a request. Raises RequestExists, or Overloaded when the queue is full."""
        request_id = sequence.key.request_id
        self.check_new(request_id)
        self._check_room(len(self._scheduler.queue))
        channel = OutputChannel()
        self._live[request_id] = (sequence, channel)
        self._scheduler.add(sequence)
        self._pump()
        return channel

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """A place in the queue while a request is made ready to be submitted. Raises Overloaded."""
        self._check_room(len(self._scheduler.queue) + self._num_preparing)
        self._num_preparing += 1
        try:
            yield
        finally:
            self._num_preparing -= 1

    def _check_room(self, num_waiting: int) -> None:
        if num_waiting >= self._queue_size:
            raise Overloaded(f"{self._queue_size} requests are waiting, which is the limit; retry later")

    def check_new(self, request_id: RequestId) -> None:
        """Raises RequestExists when a live request has this id."""
        if request_id in self._live:
            raise RequestExists(f"request {id_text(request_id)} is live already")

    def cancel(self, request_id: RequestId) -> None:
        """Ends a live request; its pages are freed with the next step. Raises RequestNotFound."""
        if request_id not in self._live:
            raise RequestNotFound(f"no live request {id_text(request_id)}")
        self.totals.cancelled += 1
        self._end(request_id, SequenceState.CANCELLED, RequestCancelled("the request was cancelled"))
        self._pump()

    def start_epoch(
        self,
        epoch: int,
        kv: KvLog,
        limits: SchedulerLimits,
        send: Callable[[Step], None],
        *,
        max_sequence_tokens: int,
    ) -> None:
        """Begins to hand out steps through `send`, which must not block.

        A live request that was accepted under a larger plan, and can never fit under this one, fails: at the
        head of the queue it would hold up all others for ever.
        """
        for sequence in self.live_sequences:
            needed = sequence.num_prompt_tokens + sequence.max_tokens
            if needed > max_sequence_tokens:
                reason = f"the cluster was planned anew and holds {max_sequence_tokens} tokens per request"
                self._fail(sequence, ClusterUnavailable(f"{reason}; this one may need {needed}"))
        self._scheduler.begin_epoch(epoch, kv, limits)
        self.kv_feed.begin_epoch(epoch, block_size=kv.block_size, cached_blocks=kv.cached_blocks)
        self._send = send
        self._pump()

    def stop_epoch(self) -> None:
        """Stops handing out steps; live requests go back to the queue with their tokens."""
        self._send = None
        self._scheduler.end_epoch()
        self.kv_feed.end_epoch()

    def fail_step(self, fault: FaultReport) -> None:
        """Fails the requests of a faulty step; to be called before `stop_epoch`.

        They are those that the report names. Where the frame was too broken to tell, they are those of the
        step that the stage expected; where its step id was wrong, no such step may be in flight.
        """
        error = StepFailed(f"the step that computed this request was refused: {fault}")
        live = (self._live.get(request_id) for request_id in fault.request_ids)
        named = [sequence for sequence, _ in filter(None, live) if not sequence.state.is_queued]
        for sequence in dict.fromkeys((*self._scheduler.sequences_in_step(fault.step_id), *named)):
            self._fail(sequence, error)

    def fail_all(self, reason: str) -> None:
        """Fails every live request as UNAVAILABLE."""
        for sequence in self.live_sequences:
            self._fail(sequence, ClusterUnavailable(reason))

    def complete(self, result: StepResult) -> None:
        """Takes the answer of LAST to the oldest step. Raises ResultMismatch."""
        for progress in self._scheduler.complete(result):
            self._deliver(progress)
        self._pump()

    def _deliver(self, progress: Progress) -> None:
        request_id = progress.sequence.key.request_id
        _, channel = self._live[request_id]
        if progress.token is not None:
            channel.put(progress.token, progress.finish_reason)
        if progress.finish_reason is not None:
            self.totals.finished += 1
            del self._live[request_id]
        if progress.error is not None:
            self.totals.failed += 1
            channel.fail(progress.error)
            del self._live[request_id]

    def _fail(self, sequence: Sequence, error: ServingError) -> None:
        self.totals.failed += 1
        self._end(sequence.key.request_id, SequenceState.FAILED, error)

    def _end(self, request_id: RequestId, state: SequenceState, error: ServingError) -> None:
        sequence, channel = self._live.pop(request_id)
        self._scheduler.drop(sequence, state)
        channel.fail(error)

    def _pump(self) -> None:
        if self._send is None:
            return
        while (step := self._scheduler.next_step()) is not None:
            self._send(step)
        if (kv := self._scheduler.kv) is not None:
            self.kv_feed.publish(kv.take_events())


def sequence_key(request_id: RequestId) -> SequenceKey:
    """The one choice that a request has today."""
    return SequenceKey(request_id, 0)
