"""An epoch that ends while steps arrive: none of them is computed out of order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from stage_worker.backends.backend import StageBackend
from stage_worker.backends.contract import ReceivedFrame
from stage_worker.backends.mock_compute import MockCompute
from stage_worker.epoch_session import EpochSession
from stage_worker.executor import StepExecutor
from stage_worker.handshake import Epoch
from stage_worker.hop_payloads import IncomingPayloads
from stage_worker.next_stage_stream import NextStageStream
from tests.frame_messages import step_message
from tests.unit.stage_worker.backends.mock_stages import mock_assignment
from wire.clock import ClusterClock
from wire.errors import StaleStream
from wire.ids import Incarnation
from wire.step_codec import encode_step
from wire.steps import Step

DEADLINE_S = 10.0


class Backend:
    """Computes nothing; steps that are submitted stay unfinished."""

    def __init__(self) -> None:
        self.prepared: list[int] = []
        self.submitted: list[int] = []

    async def begin_epoch(self, executor: StepExecutor, number: int, *, stage: int) -> None:
        executor.begin_epoch(number, stage=stage)

    def prepare(self, executor: StepExecutor, step: Step) -> None:
        self.prepared.append(step.step_id)

    def submit(self, executor: StepExecutor, received: ReceivedFrame) -> asyncio.Future[Any]:
        self.submitted.append(received.frame.step.step_id)
        return asyncio.get_running_loop().create_future()


class NextStage:
    """A next stage that ends its stream, whose writes take time to end."""

    def __init__(self) -> None:
        self.ends = asyncio.Event()
        self.is_cancelled = asyncio.Event()
        self.written = asyncio.Event()

    async def dial(self) -> None:
        return

    async def write(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.is_cancelled.set()
            await self.written.wait()

    async def watch(self) -> None:
        await self.ends.wait()
        raise StaleStream("the next stage has ended the stream")

    def forward(self, steps: object) -> None:
        return

    def flush(self) -> None:
        return

    async def room(self) -> None:
        return

    async def close(self) -> None:
        return


class Payloads:
    """No way beside the stream."""

    damaged = None

    def close(self) -> None:
        return


class Stream:
    """Messages from the coordinator."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[bytes] = asyncio.Queue()

    def put(self, step: Step) -> None:
        self._messages.put_nowait(step_message(encode_step(step)).SerializeToString())

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            yield await self._messages.get()


def _steps(count: int) -> list[Step]:
    """The first steps of epoch 1, without slices."""
    return [Step.of([], epoch=1, step_id=step_id) for step_id in range(count)]


async def _until(condition: Any) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0)


def _session(backend: Backend, next_stage: NextStage) -> EpochSession:
    assignment = mock_assignment(stage=0)
    return EpochSession(
        epoch=Epoch(plan_id=1, number=1, coordinator_incarnation=Incarnation(bytes(16)), peers=()),
        assignment=assignment,
        executor=StepExecutor(assignment, MockCompute(assignment)),
        backend=cast(StageBackend, backend),
        next_stage=cast(NextStageStream, next_stage),
        on_ready=lambda: None,
        on_refused=lambda report: None,
        clock=ClusterClock(),
        payloads=cast(IncomingPayloads, Payloads()),
    )


async def test_a_step_that_arrives_while_the_epoch_ends_is_not_computed() -> None:
    """Steps that waited are dropped then: it would be computed in the place of the first of them."""
    backend, next_stage = Backend(), NextStage()
    session = _session(backend, next_stage)
    session.start()
    stream, steps = Stream(), _steps(4)
    receiving = asyncio.create_task(session.receive(aiter(stream)))
    for step in steps[:3]:
        stream.put(step)
    await _until(lambda: len(backend.prepared) == 3)
    assert backend.submitted == [0]  # the others wait for the device
    next_stage.ends.set()
    await asyncio.wait_for(next_stage.is_cancelled.wait(), DEADLINE_S)
    stream.put(steps[3])
    for _ in range(20):
        await asyncio.sleep(0)
    assert backend.submitted == [0]
    next_stage.written.set()
    with pytest.raises(StaleStream, match="the next stage has ended the stream"):
        await asyncio.wait_for(receiving, DEADLINE_S)
    await session.close()


async def test_an_unexpected_error_that_ends_a_stream_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Backend):
        def prepare(self, executor: StepExecutor, step: Step) -> None:
            raise RuntimeError("no such codec")

    next_stage = NextStage()
    next_stage.written.set()
    session = _session(Broken(), next_stage)
    session.start()
    stream = Stream()
    stream.put(_steps(1)[0])
    await asyncio.wait_for(session.receive(aiter(stream)), DEADLINE_S)
    (record,) = [record for record in caplog.records if record.name == "stage_worker.epoch_session"]
    assert record.getMessage() == "stream of steps ended by an error: stage=0 epoch=1"
    assert record.exc_info is not None
    assert "no such codec" in str(record.exc_info[1])
    await session.close()
