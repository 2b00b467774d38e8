"""Epochs begin and end on the coordinator's command in any state of the stage, and leak nothing."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stage_worker.assignment import Assignment
from stage_worker.model.decoder import DecoderStage
from stageline_rpc.internal.v1 import join_pb2
from tests.frame_messages import encode_frame
from tests.integration.doubles import DEADLINE_S, PredecessorDouble
from tests.integration.scenario import (
    ScriptedLog,
    assert_same,
    expected_outputs,
    run_frame,
    run_scenario,
)
from tests.integration.stage_bench import StageBench, new_assignment, stage_bench
from wire.errors import StepFaultKind
from wire.step_codec import encode_step
from wire.transport import PLAIN


@pytest.fixture(params=[1, 2], ids=["MIDDLE", "LAST"])
def assignment(request: pytest.FixtureRequest, tiny_llama: Path) -> Assignment:
    return new_assignment(tiny_llama, stage=request.param)


class Gate:
    """Holds the compute thread inside a step."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        self.open.set()

    def pass_through(self) -> None:
        self.entered.set()
        assert self.open.wait(DEADLINE_S)

    async def wait_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, DEADLINE_S)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    forward = DecoderStage.forward

    def gated(*args, **kwargs):  # type: ignore[no-untyped-def]
        gate.pass_through()
        return forward(*args, **kwargs)

    monkeypatch.setattr(DecoderStage, "forward", gated)
    yield gate
    gate.open.set()


async def one_step(bench: StageBench) -> tuple[PredecessorDouble, ScriptedLog]:
    log = ScriptedLog(bench.assignment, await bench.begin_epoch())
    predecessor = await bench.predecessor()
    await run_frame(bench, predecessor, *log.next_frame())
    return predecessor, log


async def test_end_epoch_ends_the_streams_without_a_fault(assignment: Assignment) -> None:
    async with stage_bench(assignment) as bench:
        predecessor, _ = await one_step(bench)
        bench.link.send(end_epoch=join_pb2.EndEpoch(epoch=bench.epoch))
        ended = await predecessor.end()
        assert (ended.code, ended.details) == (grpc.StatusCode.ABORTED, "epoch 1 has ended")
        assert (await bench.link.next_heartbeat()).epoch == 0
        await predecessor.close()
        assert_same(await run_scenario(bench), expected_outputs(assignment))
        assert bench.link.answers.empty()


async def test_end_epoch_of_another_epoch_changes_nothing(assignment: Assignment) -> None:
    async with stage_bench(assignment) as bench:
        predecessor, log = await one_step(bench)
        bench.link.send(end_epoch=join_pb2.EndEpoch(epoch=bench.epoch + 1))
        await bench.link.next_heartbeat()
        await run_frame(bench, predecessor, *log.next_frame())
        await predecessor.close()


async def test_begin_epoch_does_not_wait_for_a_running_step(assignment: Assignment, gate: Gate) -> None:
    async with stage_bench(assignment) as bench:
        predecessor, log = await one_step(bench)
        gate.entered.clear()
        gate.open.clear()
        step, hidden = log.next_frame()
        await predecessor.send(encode_frame(encode_step(step), step.step_id, hidden))
        await gate.wait_entered()

        bench.epoch += 1
        bench.link.send(begin_epoch=bench.begin_message())
        ended = await predecessor.end()
        assert ended.details == "epoch 1 has ended"
        await bench.link.next_heartbeat()
        assert bench.link.answers.empty(), "ready before the old step has ended"
        gate.open.set()
        assert (await bench.link.answer("epoch_ready")).epoch == 2
        assert not bench.has_output, "the step of the old epoch was forwarded"
        await predecessor.close()
        assert_same(await run_scenario(bench), expected_outputs(assignment))


async def test_begin_epoch_does_not_wait_for_an_unaccepted_stream(assignment: Assignment) -> None:
    async with stage_bench(assignment) as bench:
        following = bench.coordinator if assignment.role.has_head else bench.next_stage
        hellos = bench.coordinator.hop_hellos if assignment.role.has_head else bench.next_stage.hellos
        following.num_ignored = 1
        bench.epoch += 1
        bench.link.send(begin_epoch=bench.begin_message())
        await asyncio.wait_for(hellos.get(), DEADLINE_S)
        assert_same(await run_scenario(bench), expected_outputs(assignment))
        assert bench.link.answers.empty()


async def test_an_epoch_that_is_not_newer_is_rejected(assignment: Assignment) -> None:
    async with stage_bench(assignment) as bench:
        await bench.begin_epoch()
        bench.link.send(begin_epoch=bench.begin_message())
        report = await bench.link.fault()
        assert (report.kind, report.message) == (StepFaultKind.EPOCH, "epoch 1 begins after epoch 1")


async def test_an_epoch_of_another_plan_is_rejected(assignment: Assignment) -> None:
    async with stage_bench(assignment) as bench:
        bench.epoch += 1
        message = bench.begin_message()
        message.plan_id = 9
        bench.link.send(begin_epoch=message)
        report = await bench.link.fault()
        assert "plan 9, loaded is 1" in report.message


async def test_a_fault_also_ends_the_stream_to_the_next_stage(tiny_llama: Path) -> None:
    async with stage_bench(new_assignment(tiny_llama, stage=1)) as bench:
        predecessor, log = await one_step(bench)
        assert not bench.next_stage.stream_ended.is_set()
        step, hidden = log.next_frame()
        await predecessor.send(encode_frame(encode_step(step)[:-1], step.step_id, hidden))
        await bench.link.fault()
        await asyncio.wait_for(bench.next_stage.stream_ended.wait(), DEADLINE_S)
        await predecessor.close()


async def test_the_next_stage_breaking_the_stream_is_reported(tiny_llama: Path) -> None:
    assignment = new_assignment(tiny_llama, stage=1)
    async with stage_bench(assignment) as bench:
        bench.next_stage.breaks_with = grpc.StatusCode.UNAVAILABLE
        predecessor, _ = await one_step(bench)
        report = await bench.link.fault()
        assert (report.kind, report.step_id) == (StepFaultKind.NEIGHBOUR, 1)
        assert "UNAVAILABLE: broken by the test" in report.message
        assert (await predecessor.end()).code is grpc.StatusCode.ABORTED
        await predecessor.close()
        bench.next_stage.breaks_with = None
        assert_same(await run_scenario(bench), expected_outputs(assignment))


async def test_a_fault_already_reported_by_the_next_stage_is_not_reported_again(tiny_llama: Path) -> None:
    assignment = new_assignment(tiny_llama, stage=1)
    async with stage_bench(assignment) as bench:
        bench.next_stage.breaks_with = grpc.StatusCode.ABORTED
        predecessor, _ = await one_step(bench)
        ended = await predecessor.end()
        assert "broken by the test" in ended.details
        await predecessor.close()
        bench.next_stage.breaks_with = None
        assert_same(await run_scenario(bench), expected_outputs(assignment))
        assert bench.link.answers.empty()


async def test_worker_health_is_serving_only_while_the_coordinator_is(assignment: Assignment) -> None:
    async with stage_bench(assignment) as bench, PLAIN.channel(bench.worker.advertised_address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        serving, not_serving = (
            health_pb2.HealthCheckResponse.SERVING,
            health_pb2.HealthCheckResponse.NOT_SERVING,
        )

        async def status() -> int:
            async with asyncio.timeout(DEADLINE_S):
                return int((await watch.read()).status)

        def serve(epoch: int, *, is_serving: bool = True) -> None:
            bench.link.send(serving=join_pb2.Serving(epoch=epoch, is_serving=is_serving))

        assert await status() == not_serving
        await bench.begin_epoch()
        serve(bench.epoch - 1)
        serve(bench.epoch)
        assert await status() == serving
        serve(bench.epoch, is_serving=False)
        assert await status() == not_serving
        serve(bench.epoch)
        assert await status() == serving
        bench.link.send(end_epoch=join_pb2.EndEpoch(epoch=bench.epoch))
        assert await status() == not_serving
        predecessor, log = await one_step(bench)
        serve(bench.epoch)
        assert await status() == serving
        step, hidden = log.next_frame()
        await predecessor.send(encode_frame(encode_step(step)[:-1], step.step_id, hidden))
        await bench.link.fault()
        assert await status() == not_serving
        watch.cancel()
        await predecessor.close()


@pytest.mark.full
async def test_epochs_leak_no_tasks_and_no_sessions(assignment: Assignment) -> None:
    async with stage_bench(assignment) as bench:
        counts = []
        for _ in range(4):
            await run_scenario(bench)
            bench.link.send(end_epoch=join_pb2.EndEpoch(epoch=bench.epoch))
            assert (await bench.link.next_heartbeat()).epoch == 0
            gc.collect()
            tasks = [task for task in asyncio.all_tasks() if not task.done()]
            channels = [obj for obj in gc.get_objects() if type(obj) is grpc.aio.Channel]
            counts.append((len(tasks), len(channels)))
        assert len(set(counts[1:])) == 1, counts
