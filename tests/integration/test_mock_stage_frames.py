"""One mock stage between doubles: times in frames, and the steps computed before a failure."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from stage_worker.backends.mock_backend import MockBackend
from stage_worker.backends.mock_spec import MockSpec
from stage_worker.next_stage_stream import NextStageStream
from stageline_rpc.internal.v1 import forward_pb2
from tests.frame_messages import encode_frame
from tests.integration.doubles import DEADLINE_S, CoordinatorDouble, NextStageDouble
from tests.integration.stage_bench import Log, StageBench, assign_message, running_worker, worker_config
from tests.unit.stage_worker.backends.mock_stages import HIDDEN_SIZE, VOCAB_SIZE, mock_assignment
from wire.errors import StepFault, StepFaultKind
from wire.ids import new_incarnation
from wire.step_codec import encode_step
from wire.steps import StageTime, Step
from wire.tensors import HiddenStates, TensorView

FIRST, MIDDLE, LAST = 0, 1, 2
BEFORE = (StageTime(11, 12), StageTime(21, 22), StageTime(31, 32))


@asynccontextmanager
async def mock_bench(stage: int, times: str = "step=2ms") -> AsyncIterator[StageBench]:
    """A mock worker that has loaded stage `stage` of three, in epoch 1."""
    assignment = mock_assignment(stage=stage)
    message = assign_message(assignment)
    message.model.hidden_size, message.model.vocab_size = HIDDEN_SIZE, VOCAB_SIZE
    coordinator, next_stage = CoordinatorDouble(), NextStageDouble()
    await coordinator.start()
    await next_stage.start()
    try:
        config = worker_config(coordinator.address)
        async with running_worker(replace(config, num_threads=None, mock=MockSpec.parse(times))) as worker:
            link = await coordinator.link()
            link.send(assign=message)
            await link.answer("loaded")
            bench = StageBench(worker, coordinator, link, next_stage, assignment, new_incarnation())
            await bench.begin_epoch()
            yield bench
    finally:
        await next_stage.stop()
        await coordinator.stop()


class Steps:
    """Valid steps for the stage: one decoding sequence."""

    def __init__(self, bench: StageBench) -> None:
        self._log = Log(bench.assignment)
        self._log.begin(1)
        self._log.add((1, 2, 3))
        self.step = self._log.step()

    def after(self, step: Step) -> Step:
        """An empty step after `step`."""
        return Step(epoch=1, step_id=step.step_id + 1, digest=step.digest)


def messages_of(step: Step, stage: int, times: Sequence[StageTime] = ()) -> list[forward_pb2.ForwardRequest]:
    hidden: HiddenStates = ()
    if stage != FIRST and step.slices:
        size = step.num_tokens * HIDDEN_SIZE * 2
        dtype = mock_assignment(stage=stage).dtype
        hidden = (TensorView(dtype, (step.num_tokens, HIDDEN_SIZE), bytes(size)),)
    return list(encode_frame(encode_step(step), step.step_id, hidden, times, to_first=stage == FIRST))


@pytest.mark.parametrize("stage", [FIRST, MIDDLE])
async def test_a_stage_appends_its_times_to_the_received_ones(stage: int) -> None:
    async with mock_bench(stage) as bench:
        step = Steps(bench).step
        predecessor = await bench.predecessor()
        await predecessor.send(messages_of(step, stage, BEFORE[:stage]))
        times = (await bench.next_stage.frame()).stage_times
        assert times[:-1] == BEFORE[:stage]
        assert times[-1].compute_us == 2000
        await predecessor.close()


async def test_a_result_has_the_times_of_all_stages() -> None:
    async with mock_bench(LAST) as bench:
        step = Steps(bench).step
        predecessor = await bench.predecessor()
        await predecessor.send(messages_of(step, LAST, BEFORE[:2]))
        result = await bench.coordinator.result()
        assert result.stage_times[:2] == BEFORE[:2]
        assert [times.compute_us for times in result.stage_times[2:]] == [2000]
        await predecessor.close()


async def test_a_busy_stage_passes_steps_on_with_its_output() -> None:
    """In one message: a step ahead costs no message of its own where the next stage has work anyway."""
    async with mock_bench(MIDDLE, "step=100ms") as bench:
        steps = Steps(bench)
        first, second = steps.step, steps.after(steps.step)
        predecessor = await bench.predecessor()
        await predecessor.send(messages_of(first, MIDDLE))
        assert (await bench.next_stage.step()).step == first
        ahead, hidden = messages_of(second, MIDDLE)
        await predecessor.send([ahead])
        assert bench.next_stage.frames.empty()
        assert (await bench.next_stage.step()).step == second
        assert (await bench.next_stage.frame()).step == first
        await predecessor.send([hidden])
        assert (await bench.next_stage.frame()).step == second
        assert bench.next_stage.num_messages == 4 - 1
        await predecessor.close()


@pytest.mark.parametrize("stage", [MIDDLE, LAST])
async def test_missing_stage_times_stay_unknown(stage: int) -> None:
    async with mock_bench(stage) as bench:
        predecessor = await bench.predecessor()
        await predecessor.send(messages_of(Steps(bench).step, stage))
        if stage == LAST:
            assert (await bench.coordinator.result()).stage_times == ()
        else:
            assert (await bench.next_stage.frame()).stage_times == ()
        await predecessor.close()


@pytest.mark.parametrize(("stage", "num_times"), [(MIDDLE, 2), (LAST, 1), (LAST, 3)])
async def test_times_of_another_number_of_stages_are_rejected(stage: int, num_times: int) -> None:
    async with mock_bench(stage) as bench:
        step = Steps(bench).step
        predecessor = await bench.predecessor()
        await predecessor.send(messages_of(step, stage, BEFORE[:num_times]))
        fault = await bench.link.fault()
        assert (fault.kind, fault.step_id, fault.stage) == (StepFaultKind.UNDECODABLE, 0, stage)
        expected = f"stage times have {8 + 16 * num_times} bytes, expected {8 + 16 * stage}: 8, and 16 per"
        assert expected in fault.message
        assert fault.request_ids == step.request_ids
        assert not bench.has_output
        await predecessor.close()


async def test_a_waiting_step_reports_its_queue_time() -> None:
    """Two frames at once: the second waits for the first."""
    async with mock_bench(FIRST, "step=50ms") as bench:
        steps = Steps(bench)
        first = steps.step
        predecessor = await bench.predecessor()
        await predecessor.send([*messages_of(first, FIRST), *messages_of(steps.after(first), FIRST)])
        one, two = await bench.next_stage.frame(), await bench.next_stage.frame()
        assert one.stage_times[0].compute_us == 50_000
        assert two.stage_times[0].compute_us == 0
        assert 0 < two.stage_times[0].wait_us <= 50_000
        await predecessor.close()


def _garbled(step: Step, stage: int) -> list[forward_pb2.ForwardRequest]:
    messages = messages_of(step, stage)
    messages[0].steps[0].checksum ^= 1
    return messages


@pytest.mark.parametrize(
    ("break_frame", "kind"),
    [
        (_garbled, StepFaultKind.CHECKSUM),
        (lambda step, stage: messages_of(replace(step, step_id=9), stage), StepFaultKind.STEP_ID),
        (lambda step, stage: messages_of(replace(step, digest=1), stage), StepFaultKind.KV_DIVERGENCE),
    ],
)
async def test_steps_before_a_faulty_frame_are_still_forwarded(break_frame: Any, kind: StepFaultKind) -> None:
    async with mock_bench(FIRST, "step=50ms") as bench:
        steps = Steps(bench)
        predecessor = await bench.predecessor()
        broken = break_frame(steps.after(steps.step), FIRST)
        await predecessor.send([*messages_of(steps.step, FIRST), *broken])
        frame = await bench.next_stage.frame()
        assert frame.step == steps.step
        assert (await bench.link.fault()).kind is kind
        await predecessor.close()


class Submissions:
    """Counts what is submitted to mock backends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._count = 0
        self._news = asyncio.Event()
        submit = MockBackend.submit

        def counting(backend: MockBackend, *arguments: Any) -> Any:
            self._count += 1
            self._news.set()
            return submit(backend, *arguments)

        monkeypatch.setattr(MockBackend, "submit", counting)

    async def wait(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self._count < count:
                self._news.clear()
                await self._news.wait()


@pytest.mark.parametrize("is_second_faulty", [True, False])
async def test_a_failed_send_while_a_step_is_computed_leaks_nothing(
    is_second_faulty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    submissions = Submissions(monkeypatch)

    async def failing(hop: NextStageStream, output: object) -> None:
        await submissions.wait(2)
        raise StepFault(StepFaultKind.NEIGHBOUR, "made up")

    monkeypatch.setattr(NextStageStream, "send", failing)
    async with mock_bench(FIRST, "step=300ms") as bench:
        steps = Steps(bench)
        following = steps.after(steps.step)
        if is_second_faulty:
            following = replace(following, step_id=9)
        predecessor = await bench.predecessor()
        await predecessor.send([*messages_of(steps.step, FIRST), *messages_of(following, FIRST)])
        fault = await bench.link.fault()
        assert (fault.kind, fault.message) == (StepFaultKind.NEIGHBOUR, "made up")
        await predecessor.close()
        gc.collect()
        await bench.link.next_heartbeat()
    assert errors == []
