"""One epoch on one stage: receives frames, computes steps, sends outputs."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from stage_worker.assignment import Assignment
from stage_worker.backends.backend import RanStep, StageBackend
from stage_worker.backends.contract import (
    DeviceError,
    HandedOn,
    ReceivedFrame,
    StageOutput,
    StepObserver,
    StepTiming,
    TimedOutput,
)
from stage_worker.executor import StepExecutor
from stage_worker.handshake import Epoch, check_hop, declared_dtype
from stage_worker.hop_payloads import IncomingPayloads
from stage_worker.next_stage_stream import NextStageStream
from stage_worker.policy import WORKER_POLICY
from stageline_rpc.internal.v1 import forward_pb2
from stageline_rpc.v1 import cluster_pb2
from wire.clock import ClusterClock
from wire.errors import StaleStream, StepFault, StepFaultKind
from wire.frames import Frame, FrameAssembler, StepFrame
from wire.log_context import log_context
from wire.payloads import PayloadNotice
from wire.steps import FaultReport, StageTime
from wire.tensors import TensorView, WireDType

log = logging.getLogger(__name__)


E = TypeVar("E", bound=Exception)


QUEUED_FRAMES = 64
"""Frames that may wait; more than a coordinator has in flight, so that queueing is measured here."""
KEPT_TOKENS = 2048
"""Limit on kept hidden states of a self-check, far above what one sends."""


class _VerifyAccounting:
    """Request to check the KV accounting, queued behind frames."""


@dataclass(slots=True)
class _Queued:
    """A queued frame; `running` is set once it is submitted to the backend."""

    received: ReceivedFrame
    running: "asyncio.Future[RanStep] | None" = None


class EpochSession:
    """State and tasks of one epoch, from BeginEpoch to the next BeginEpoch, EndEpoch or disconnection.

    The first fault ends it: the session reports the fault once, ends its streams, and rejects every later
    frame and stream of the epoch. Faults caused by an external end are not reported.
    """

    def __init__(
        self,
        *,
        epoch: Epoch,
        assignment: Assignment,
        executor: StepExecutor,
        backend: StageBackend,
        next_stage: NextStageStream,
        on_ready: Callable[[], None],
        on_refused: Callable[[FaultReport | None], None],
        clock: ClusterClock,
        payloads: IncomingPayloads,
        observers: Sequence[StepObserver] = (),
    ) -> None:
        """`on_refused` is called at most once, on an internal failure; with None if another stage reports."""
        self.epoch = epoch
        self.is_serving = False
        self.handed_on: list[TensorView] = []
        """Hidden states of all steps, in an epoch for a self-check only."""
        self._assignment = assignment
        self._role = assignment.role
        self._executor = executor
        self._backend = backend
        self._next_stage = next_stage
        self._on_ready = on_ready
        self._on_refused = on_refused
        self._clock = clock
        self._observers = tuple(observers)
        self._payloads = payloads
        self._has_begun = asyncio.Event()
        self._inbox: asyncio.Queue[_Queued | _VerifyAccounting | StepFault] = asyncio.Queue(QUEUED_FRAMES)
        self._num_queued = 0
        self._running: deque[_Queued] = deque()
        self._waiting: deque[_Queued] = deque()
        self._num_unfinished = 0
        self._next_step_id = 0
        self._has_stream = self._has_stopped = False
        self._wire_dtype: WireDType = assignment.dtype
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Serving, with no step that is prepared, queued or being computed."""
        return self.is_serving and not self._num_unfinished

    @property
    def payload_fallback(self) -> str:
        """Why large hidden states to or from this stage travel over gRPC; empty if nothing is wrong."""
        return self._next_stage.payload_fallback or self._payloads.fallback

    @property
    def same_host_fallback(self) -> str:
        """Why hidden states do not travel the fastest way to or from a stage on this host."""
        return self._next_stage.same_host_fallback or self._payloads.same_host_fallback

    @property
    def hop_transport(self) -> cluster_pb2.HopTransport.ValueType:
        """How hidden states travel to the next stage."""
        return self._next_stage.hop_transport

    def start(self) -> None:
        """Start the task that resets the stage, dials the next one, and serves."""
        self._task = asyncio.create_task(self._run(), name=f"epoch-{self.epoch.number}")

    def fail_device(self, reason: str) -> None:
        """Report that the device has failed, unless the epoch has already ended."""
        self._fail(StepFault(StepFaultKind.DEVICE, reason))

    async def close(self) -> None:
        """End the epoch without a report; wait for its tasks, call and connection to end."""
        assert self._task is not None, "close before start"
        self._end(f"epoch {self.epoch.number} has ended")
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def accept(self, hello: forward_pb2.HopHello) -> None:
        """Accept the predecessor's only stream. Raises StaleStream or HandshakeMismatch without a change."""
        check_hop(hello, self.epoch, self._assignment)
        if self._over.done():
            raise StaleStream(self._over.result())
        if self._has_stream:
            raise StaleStream(
                f"stage {self._assignment.stage} has its stream of epoch {self.epoch.number} already"
            )
        self._has_stream = True
        self._wire_dtype = declared_dtype(hello, self._assignment)

    def accepted(self) -> forward_pb2.HopAccepted:
        """The answer to the accepted hello, with an offer for payloads."""
        accepted = forward_pb2.HopAccepted()
        max_bytes = self._executor.max_hidden_bytes(self._wire_dtype)
        self._payloads.expect(self.epoch, accepted, max_bytes=max_bytes)
        return accepted

    async def receive(self, messages: AsyncIterator[bytes]) -> None:
        """Feed the accepted stream into the stage until the stream ends. Raises StaleStream."""
        readers = [asyncio.create_task(self._read(messages))]
        if (damaged := self._payloads.damaged) is not None:
            readers.append(asyncio.create_task(self._refuse_damage(damaged)))
        ends: set[asyncio.Future[Any]] = {readers[0], self._over}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            self._payloads.close()
        if self._over.done():
            raise StaleStream(self._over.result())

    async def _read(self, messages: AsyncIterator[bytes]) -> None:
        """Take messages in order, so that every frame before a damaged message is computed."""
        assembler = FrameAssembler(
            max_payload_bytes=self._executor.max_hidden_bytes(self._wire_dtype),
            takes_hidden=not self._role.has_embeddings,
            exact_tensors=self._executor.exact_tensors,
            num_stages_before=self._assignment.stage,
            wire_dtype=self._wire_dtype,
            max_ahead_bytes=WORKER_POLICY.max_ahead_bytes,
        )
        frame_began_s: float | None = None
        await self._has_begun.wait()
        try:
            async for message in messages:
                began_s = time.monotonic()
                parts = assembler.add(message)
                if parts and isinstance(notice := parts[-1], PayloadNotice):
                    payload = await self._payloads.take(notice)
                    began_s = min(began_s, payload.began_s)
                    parts[-1] = assembler.add_payload(payload.data)
                at_s = time.monotonic()
                frame_began_s = frame_began_s or began_s
                await self._take_parts(parts, at_s, frame_began_s)
                if not assembler.is_inside_frame:
                    frame_began_s = None
            assembler.finish()
        except StepFault as fault:
            await self._refuse(fault)
        except Exception:
            if not self._over.done():
                log.exception(
                    "stream of steps ended by an error: stage=%d epoch=%d",
                    *(self._assignment.stage, self.epoch.number),
                )
            raise

    async def _refuse_damage(self, damaged: "asyncio.Future[StepFault]") -> None:
        await self._refuse(await damaged)

    async def _take_parts(
        self, parts: list[StepFrame | Frame | PayloadNotice], at_s: float, began_s: float
    ) -> None:
        """Prepare steps and compute frames; pass steps on at once, or with the output of this stage.

        A stage that computes passes a step on with its next output: the next stage has work until then.
        """
        is_idle = not self._num_queued
        steps = [part for part in parts if isinstance(part, StepFrame)]
        frames = [part for part in parts if isinstance(part, Frame)]
        if self._role.has_embeddings:
            frames = [step.without_hidden for step in steps]
        if not self._role.has_head:
            self._next_stage.forward([step.message for step in steps])
        if is_idle and not frames:
            self._next_stage.flush()
        self._num_unfinished += len(steps)
        for step in steps:
            self._backend.prepare(self._executor, step.step)
        for frame in frames:
            await self._take(ReceivedFrame(frame, at_s, began_s))
        if is_idle:
            self._next_stage.flush()
        await self._next_stage.room()

    async def _take(self, received: ReceivedFrame) -> None:
        """Compute at once if nothing is queued; send an immediate output without a task switch.

        Nothing is computed any longer once `_serve` has dropped steps that come before it.
        """
        if self._has_stopped:
            await asyncio.wait({self._over})
            return
        if self._num_queued:
            queued = _Queued(received)
            self._waiting.append(queued)
            self._submit_ahead()
            await self._queue(queued)
            return
        running = self._backend.submit(self._executor, received)
        if not running.done() or running.exception() is not None:
            queued = _Queued(received, running)
            self._running.append(queued)
            await self._queue(queued)
            return
        self._finished(received)
        try:
            await self._send(self._timed(running.result(), received), received)
        except StaleStream:
            # The next stage has ended its stream, whose watcher ends the epoch.
            await asyncio.wait({self._over})

    def _finished(self, received: ReceivedFrame) -> None:
        self._next_step_id = received.frame.step.step_id + 1
        self._num_unfinished -= 1

    def _submit_ahead(self) -> None:
        """Submit waiting frames until the device has as many steps as it takes."""
        while self._waiting and len(self._running) < self._executor.depth:
            queued = self._waiting.popleft()
            queued.running = self._backend.submit(self._executor, queued.received)
            self._running.append(queued)

    async def _queue(self, queued: "_Queued") -> None:
        self._num_queued += 1
        await self._inbox.put(queued)

    async def _refuse(self, fault: StepFault) -> None:
        await self._inbox.put(fault)
        await asyncio.wait({self._over})

    async def _run(self) -> None:
        try:
            await self._backend.begin_epoch(self._executor, self.epoch.number, stage=self._assignment.stage)
            await self._next_stage.dial()
            for observer in self._observers:
                observer.epoch_began(self._assignment, self.epoch.number)
            self.is_serving = True
            self._has_begun.set()
            self._on_ready()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._serve())
                tasks.create_task(self._next_stage.write())
                tasks.create_task(self._next_stage.watch())
                tasks.create_task(self._verify_when_idle())
        except* StepFault as faults:
            self._fail(_first(faults))
        except* StaleStream as ends:
            self._stop_quietly(str(_first(ends)))
        except* DeviceError as errors:
            self._fail(StepFault(StepFaultKind.DEVICE, str(_first(errors))))
        except* Exception as errors:
            log.exception(
                "unexpected error in epoch %d", self.epoch.number, exc_info=errors, extra=self._log_context()
            )
            self._fail(StepFault(StepFaultKind.INTERNAL, "unexpected error; the worker's log has the detail"))
        finally:
            self.is_serving = False
            for observer in self._observers:
                observer.epoch_over()
            await self._next_stage.close()

    async def _serve(self) -> None:
        """Finish frames in order; send each output while later frames are computed."""
        try:
            await self._finish_frames()
        finally:
            self._has_stopped = True
            self._waiting.clear()
            while self._running:
                _discard(self._running.popleft())

    async def _finish_frames(self) -> None:
        ready: tuple[TimedOutput, ReceivedFrame] | None = None
        while True:
            queued = await self._inbox.get()
            if isinstance(queued, StepFault):
                await self._send_if(ready)
                raise queued
            if isinstance(queued, _VerifyAccounting):
                await self._send_if(ready)
                ready = None
                await self._backend.verify_accounting(self._executor)
                continue
            await self._send_if(ready)
            ready = await self._finish_oldest(queued)
            if self._inbox.empty():
                await self._send_if(ready)
                ready = None
            self._num_queued -= 1
            if not self._num_queued:
                self._next_stage.flush()

    async def _finish_oldest(self, queued: _Queued) -> tuple[TimedOutput, ReceivedFrame]:
        """Wait for the oldest frame, and submit the next one before it is sent."""
        assert queued.running is not None, "all frames before are finished"
        ran = await queued.running
        self._running.popleft()
        self._submit_ahead()
        self._finished(queued.received)
        return self._timed(ran, queued.received), queued.received

    async def _verify_when_idle(self) -> None:
        while True:
            await asyncio.sleep(WORKER_POLICY.idle_check_interval_s)
            if self._executor.is_check_due and self.is_idle:
                await self._inbox.put(_VerifyAccounting())

    async def _send_if(self, ready: tuple[TimedOutput, ReceivedFrame] | None) -> None:
        if ready is not None:
            await self._send(*ready)

    async def _send(self, output: TimedOutput, received: ReceivedFrame) -> None:
        """Send the output, then call the observers, so that they do not delay the next stage."""
        await self._next_stage.send(output)
        sent_s = time.monotonic()
        for observer in self._observers:
            observer.step_done(received.frame, output, sent_s)

    def _timed(self, ran: RanStep, received: ReceivedFrame) -> TimedOutput:
        """The output with the times of all stages so far; unknown times stay unknown."""
        if self.epoch.is_check:
            self._keep(ran.output)
        frame, clock = received.frame, self._clock
        hop_us = 0
        if frame.ready_at_us:
            hop_us = clock.at_us(received.began_s) - frame.ready_at_us
        timing = StepTiming(
            received.began_s,
            received.at_s,
            ran.started_s,
            ran.ended_s,
            hop_us / 1e6 if frame.ready_at_us else None,
        )
        ready_at_us = clock.at_us(ran.ended_s)
        if len(frame.stage_times) != self._assignment.stage:
            return TimedOutput(ran.output, (), 0, timing)
        own = StageTime(
            wait_us=round((ran.started_s - received.at_s) * 1e6),
            compute_us=round((ran.ended_s - ran.started_s) * 1e6),
            hop_us=hop_us,
            receive_us=round((received.at_s - received.began_s) * 1e6),
        )
        return TimedOutput(ran.output, (*frame.stage_times, own), ready_at_us, timing)

    def _keep(self, output: StageOutput) -> None:
        num_kept = sum(view.shape[0] for view in self.handed_on)
        if isinstance(output, HandedOn) and output.hidden and num_kept < KEPT_TOKENS:
            # A copy, since the device reuses the memory of what it sends.
            first = output.hidden[0]
            self.handed_on.append(replace(first, data=bytes(first.data)))

    def _fail(self, fault: StepFault) -> None:
        """Report the first fault, unless the epoch was ended externally."""
        if self._over.done():
            return
        if fault.step_id is None:
            fault.step_id = self._next_step_id
        self._payloads.note_fault(fault)
        description = fault.describe(stage=self._assignment.stage)
        log.error(
            "epoch %d refused: %s",
            *(self.epoch.number, description),
            extra=self._log_context() | log_context(step=fault.step_id, request_ids=fault.request_ids),
        )
        report = FaultReport(
            epoch=self.epoch.number,
            step_id=fault.step_id,
            stage=self._assignment.stage,
            kind=fault.kind,
            message=fault.message,
            request_ids=fault.request_ids,
        )
        self._on_refused(report)
        self._end(f"epoch {self.epoch.number} is refused after a fault: {description}")

    def _stop_quietly(self, reason: str) -> None:
        if not self._over.done():
            log.info("epoch %d ends: %s", self.epoch.number, reason, extra=self._log_context())
            self._on_refused(None)
            self._end(f"epoch {self.epoch.number} has ended: {reason}")

    def _log_context(self) -> dict[str, object]:
        return log_context(epoch=self.epoch.number, stage=self._assignment.stage)

    def _end(self, reason: str) -> None:
        self._payloads.close()
        if not self._over.done():
            self._over.set_result(reason)


def _discard(queued: _Queued) -> None:
    """Discard the result or error of a submitted frame."""
    running = queued.running
    if running is not None and not running.cancel() and not running.cancelled():
        running.exception()


def _first(group: ExceptionGroup[E]) -> E:
    error: E | ExceptionGroup[E] = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
