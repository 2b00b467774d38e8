"""An engine over stages, calls and a clock that a test drives."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import cast

from coordinator.engine.admission import AdmissionLimits
from coordinator.engine.durability import Durability
from coordinator.engine.engine import Engine
from coordinator.engine.observer import EngineObserver
from coordinator.engine.output_stream import Output, OutputStream, Positions
from coordinator.engine.request import Request
from coordinator.journal.records import AcceptedRequest
from coordinator.recovery.attribution import FailureAttribution
from coordinator.recovery.policy import DEFAULT_POLICY
from coordinator.scheduler.kv_manager import KvCacheManager
from coordinator.scheduler.policy import SchedulerLimits
from coordinator.scheduler.sequence import SequenceState
from tests.unit.coordinator.engine.buffer_scripts import put_together
from tests.unit.coordinator.engine.request_cases import RequestCase, solo
from tests.unit.coordinator.scheduler.stage_replica import StageReplica
from wire.errors import DeadlinePassed, RequestCancelled, ServingError, StepFaultKind
from wire.ids import RequestId
from wire.steps import FaultReport, SliceError, SliceResult, Step, StepResult, StepSlice

LIMITS = SchedulerLimits(max_step_tokens=16, max_step_sequences=8, max_steps_in_flight=2)
BLOCK_SIZE = 4


class Call:
    """One client call that reads a request, a message at a time.

    It has its own event loop, which runs only while the test reads.
    """

    def __init__(self, engine: Engine, stream: OutputStream, turn: Callable[[], None]) -> None:
        """`turn` runs what the engine left for the next turn of the event loop."""
        self.stream = stream
        self._turn_engine = turn
        self.outputs: list[Output] = []
        self.error: ServingError | None = None
        self.is_over = False
        self._engine = engine
        self._loop = asyncio.new_event_loop()
        self._messages = cast(AsyncGenerator[Output], stream.outputs())
        self._next: asyncio.Task[Output] | None = None

    def read(self) -> Output | None:
        """The next message; None when there is none now, or the call is over."""
        if self.is_over:
            return None
        if self._next is None:
            self._next = self._loop.create_task(_next_of(self._messages))
        self._turn_loop()
        if not self._next.done():
            return None
        task, self._next = self._next, None
        try:
            output = task.result()
        except StopAsyncIteration:
            self._end(None)
        except ServingError as error:
            self._end(error)
        else:
            self.outputs.append(output)
            return output
        return None

    def read_all(self) -> list[Output]:
        """Every message that there is now."""
        return list(iter(self.read, None))

    def close(self) -> None:
        """Disconnect the client."""
        if self.is_over:
            return
        self.abandon()
        self._engine.detach(self.stream)

    def abandon(self) -> None:
        """Drops its state without notifying the engine."""
        self.is_over = True
        if self._next is not None:
            self._next.cancel()
            self._turn_loop()
        self._loop.run_until_complete(self._messages.aclose())
        self._loop.close()

    def tokens(self, choice: int = 0) -> tuple[int, ...]:
        """Received tokens of one choice; checks that pieces have no gap or overlap."""
        pieces = [output.piece for output in self.outputs if output.choice.index == choice]
        return put_together(pieces).tokens if pieces else ()

    def text(self, choice: int = 0) -> str:
        return "".join(output.piece.text for output in self.outputs if output.choice.index == choice)

    def has_last(self, choice: int = 0) -> bool:
        return any(output.piece.is_last for output in self.outputs if output.choice.index == choice)

    def _turn_loop(self) -> None:
        self._turn_engine()
        self._loop.run_until_complete(_turn())

    def _end(self, error: ServingError | None) -> None:
        self.is_over, self.error = True, error
        self._loop.close()
        self._engine.detach(self.stream)


async def _next_of(messages: AsyncGenerator[Output]) -> Output:
    return await anext(messages)


async def _turn() -> None:
    """Yields to the event loop long enough for a task and its waiter."""
    for _ in range(3):
        await asyncio.sleep(0)


class EngineModel:
    """Steps wait in front of each stage, and results in front of the engine, until they are moved."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        num_stages: int = 1,
        limits: SchedulerLimits = LIMITS,
        admission: AdmissionLimits | None = None,
        durability: Durability | None = None,
        observer: EngineObserver | None = None,
    ) -> None:
        self.now_s = 1000.0
        self._soon: deque[Callable[[], None]] = deque()
        self.engine = Engine(
            admission or AdmissionLimits(queue_size=64),
            policy=DEFAULT_POLICY,
            clock=lambda: self.now_s,
            call_soon=self._soon.append,
            durability=durability,
            observer=observer,
        )
        self.attribution = FailureAttribution(
            self.engine.scheduler, self.engine.registry, self.engine.fail, policy=DEFAULT_POLICY
        )
        self.error_at: Callable[[StepSlice], bool] = lambda part: False
        self.sent: list[Step] = []
        self.epoch = 0
        self.stages: list[StageReplica] = []
        self.queues: list[deque[Step]] = [deque() for _ in range(num_stages)]
        self.results: deque[StepResult] = deque()
        self._calls: list[Call] = []
        self._limits = limits
        self.start(num_blocks)

    def close(self) -> None:
        for call in self._calls:
            if not call.is_over:
                call.abandon()

    @property
    def totals(self) -> tuple[int, int, int]:
        """Requests that are finished, cancelled, failed."""
        counts = self.engine.totals
        return counts.finished, counts.cancelled, counts.failed

    # Epochs

    @property
    def is_serving(self) -> bool:
        return bool(self.stages)

    @property
    def kv(self) -> KvCacheManager:
        assert self.engine.scheduler.kv is not None
        return self.engine.scheduler.kv

    def start(self, num_blocks: int, *, admits_new: bool = True) -> None:
        self.epoch += 1
        self.stages = [
            StageReplica(num_blocks=num_blocks, block_size=BLOCK_SIZE, limits=self._limits)
            for _ in self.queues
        ]
        self.engine.start_epoch(
            self.epoch,
            KvCacheManager(num_blocks=num_blocks, block_size=BLOCK_SIZE),
            self._limits,
            self._send,
            max_sequence_tokens=num_blocks * BLOCK_SIZE,
            admits_new=admits_new,
        )

    def stop(self) -> None:
        """Loses the workers with all steps and results in transit."""
        self.engine.stop_epoch()
        self.stages = []
        self.results.clear()
        for queue in self.queues:
            queue.clear()

    def die(self, reason: str = "worker b is lost") -> None:
        """A worker dies."""
        self.engine.deliver()
        self.attribution.record_worker_loss(reason)
        self.stop()

    def fault(
        self,
        step_id: int,
        *,
        request_ids: tuple[RequestId, ...] = (),
        kind: StepFaultKind = StepFaultKind.POSITION,
        is_worker_avoided: bool = False,
    ) -> None:
        """A stage refuses a step."""
        self.engine.deliver()
        self.attribution.record_fault(
            FaultReport(
                epoch=self.epoch, step_id=step_id, stage=0, kind=kind, message="", request_ids=request_ids
            ),
            is_worker_avoided=is_worker_avoided,
        )
        self.stop()

    # Calls

    def submit(
        self, request: Request, *, deadline_s: float | None = None, accepted: AcceptedRequest | None = None
    ) -> Call:
        return self._call(self.engine.submit(request, deadline_s=deadline_s, accepted=accepted))

    def attach(
        self,
        request_id: RequestId,
        from_token: int = 0,
        *,
        by_choice: dict[int, int] | None = None,
        prompt_token: int | None = None,
        deadline_s: float | None = None,
        observes: bool = False,
    ) -> Call:
        positions = Positions(from_token, by_choice, prompt_token)
        stream = self.engine.attach(request_id, positions, deadline_s=deadline_s, observes=observes)
        return self._call(stream)

    # Steps

    def advance(self, stage: int) -> bool:
        """A stage runs the oldest step that waits there; False if there is none."""
        if not self.stages or not self.queues[stage]:
            return False
        step = self.queues[stage].popleft()
        tokens = self.stages[stage].apply(step)
        if stage + 1 < len(self.stages):
            self.queues[stage + 1].append(step)
            return True
        answered = [part for part in step.slices if part.is_answered]
        results = tuple(self._answer(part, tokens.get(part.sequence)) for part in answered)
        self.results.append(StepResult.of(step.epoch, step.step_id, results))
        return True

    def deliver(self) -> bool:
        """The oldest result reaches the engine and its readers; False if there is none."""
        is_there = self.complete()
        self.turn()
        return is_there

    def complete(self) -> bool:
        """The oldest result reaches the engine, which delivers it later; False if there is none."""
        if not self.results:
            return False
        self.attribution.record_tokens(self.engine.complete(self.results.popleft()))
        return True

    @property
    def is_delivery_due(self) -> bool:
        """A completed result was not delivered yet."""
        return bool(self.engine._undelivered or self.engine._facts)

    def turn(self, *, most: int = 1000) -> None:
        """Runs what the engine left for the next turns of the event loop, up to `most` callbacks."""
        while self._soon and most:
            self._soon.popleft()()
            most -= 1

    def run_step(self) -> bool:
        """Runs the oldest step on all stages and delivers its result."""
        while not self.results:
            if not any(self.advance(stage) for stage in reversed(range(len(self.stages)))):
                return False
        return self.deliver()

    def run(self) -> None:
        """Runs until no step or result is pending."""
        for _ in range(2000):
            if not self.run_step():
                return
        raise AssertionError("the steps do not end")

    def check_idle(self) -> None:
        """No resource is held, and every request has ended once."""
        scheduler = self.engine.scheduler
        assert (scheduler.queue, scheduler.running) == ((), ())
        assert not self.engine.registry.live
        assert self.engine.totals.orphaned == 0
        if self.is_serving:
            assert scheduler.num_steps_in_flight == 0
            assert not self.kv.has_pending
            assert self.kv.num_active == 0
            self.kv.check_integrity([])
            for stage in self.stages:
                stage.check_idle()
                stage.tables.check_integrity()

    def _call(self, stream: OutputStream) -> Call:
        call = Call(self.engine, stream, self.turn)
        self._calls.append(call)
        return call

    def _send(self, step: Step) -> None:
        self.sent.append(step)
        self.queues[0].append(step)

    def _answer(self, part: StepSlice, token: int | None) -> SliceResult:
        last = self.stages[-1]
        if self.error_at(part):
            error = SliceError(1, len(self.stages) - 1, "made up")
            return SliceResult(part.sequence, part.restart_count, error)
        logprobs = None if token is None else last.logprobs(part, token)
        return SliceResult(part.sequence, part.restart_count, token, logprobs, last.prompt_logprobs(part))


def ended_as(request: Request) -> SequenceState:
    """The terminal state of an ended request."""
    assert not request.is_live
    assert not request.live_sequences
    if request.error is None:
        assert all(choice.sequence.state is SequenceState.FINISHED for choice in request.choices)
        return SequenceState.FINISHED
    was_cancelled = isinstance(request.error, RequestCancelled | DeadlinePassed)
    return SequenceState.CANCELLED if was_cancelled else SequenceState.FAILED


def check_whole(call: Call, case: RequestCase) -> None:
    """The call has ended with the solo output of each choice."""
    call.read_all()
    assert call.is_over
    assert call.error is None
    for choice in range(case.n):
        outcome = solo(case, choice)
        assert (call.tokens(choice), call.text(choice)) == (outcome.tokens, outcome.text)
        assert call.stream.request.choices[choice].buffer.finish_reason is outcome.reason
