"""A faulty frame: the stage computes nothing, reports the fault and ends the epoch; the next one works."""

from pathlib import Path

import grpc
import pytest

from stage_worker.assignment import Assignment
from stageline_rpc.internal.v1 import forward_pb2
from tests.frame_messages import encode_frame
from tests.integration.doubles import PredecessorDouble, StreamEnded
from tests.integration.fault_cases import FRAME_FAULTS, FrameFault
from tests.integration.scenario import (
    REQUESTS,
    Comparable,
    ScriptedLog,
    assert_same,
    expected_outputs,
    run_frame,
    run_scenario,
)
from tests.integration.stage_bench import StageBench, hidden_for, new_assignment, stage_bench
from wire.errors import StepFaultKind
from wire.step_codec import encode_step
from wire.steps import FaultReport, Step

FIRST, MIDDLE, LAST = 0, 1, 2

LOST_STATUS = "Internal error from Core"
"""Message of grpc.aio, in place of the server's status, when a write races the end of the stream."""


@pytest.fixture(scope="module", params=[MIDDLE, LAST], ids=["MIDDLE", "LAST"])
def assignment(request: pytest.FixtureRequest, tiny_llama: Path) -> Assignment:
    return new_assignment(tiny_llama, stage=request.param)


@pytest.fixture(scope="module")
def expected(assignment: Assignment) -> list[Comparable]:
    return expected_outputs(assignment)


async def in_second_step(bench: StageBench) -> tuple[PredecessorDouble, ScriptedLog]:
    """Begin an epoch and complete its first step."""
    log = ScriptedLog(bench.assignment, await bench.begin_epoch())
    predecessor = await bench.predecessor()
    await run_frame(bench, predecessor, *log.next_frame())
    return predecessor, log


async def assert_refused(bench: StageBench, predecessor: PredecessorDouble) -> FaultReport:
    """Assert that the fault is reported, nothing computed, the stream ended and a new one rejected."""
    report = await bench.link.fault()
    assert (report.epoch, report.stage) == (bench.epoch, bench.assignment.stage)
    ended = await predecessor.end()
    if ended.details != LOST_STATUS:
        assert ended.code is grpc.StatusCode.ABORTED
        for expected_text in (report.kind.name, f"stage {report.stage}", f"step {report.step_id}"):
            assert expected_text in ended.details
    with pytest.raises(StreamEnded, match="refused after a fault") as again:
        await bench.predecessor()
    assert again.value.code is grpc.StatusCode.ABORTED
    assert not bench.has_output
    await predecessor.close()
    return report


@pytest.mark.matrix(2, full=8)
@pytest.mark.parametrize("case", FRAME_FAULTS, ids=str)
async def test_a_faulty_frame_is_rejected_and_the_next_epoch_works(
    assignment: Assignment, expected: list[Comparable], case: FrameFault
) -> None:
    async with stage_bench(assignment) as bench:
        predecessor, log = await in_second_step(bench)
        step, hidden = log.next_frame()
        assert hidden
        await predecessor.send(case.messages(step, hidden))
        following, hidden = log.next_frame()
        await predecessor.send(encode_frame(encode_step(following), following.step_id, hidden))

        report = await assert_refused(bench, predecessor)
        assert report.kind is case.kind, report
        assert report.step_id == case.reported_step
        assert {REQUESTS[index] for index in case.names} <= set(report.request_ids)
        assert case.names or not report.request_ids
        for expected_text in case.expected_texts:
            assert expected_text in report.message

        assert_same(await run_scenario(bench), expected)
        assert (await bench.link.next_heartbeat()).kv.blocks_active > 0
        assert bench.link.answers.empty(), "a fault was reported twice"


async def test_a_stream_that_ends_inside_a_frame_is_a_fault(
    assignment: Assignment, expected: list[Comparable]
) -> None:
    async with stage_bench(assignment) as bench:
        predecessor, log = await in_second_step(bench)
        step, hidden = log.next_frame()
        ahead, message = encode_frame(encode_step(step), step.step_id, hidden)
        message.hidden_states.is_last = False
        await predecessor.send([ahead, message])
        await predecessor.done_writing()
        report = await assert_refused(bench, predecessor)
        assert (report.kind, report.step_id) == (StepFaultKind.UNDECODABLE, 1)
        assert_same(await run_scenario(bench), expected)


async def test_bytes_that_do_not_parse_are_a_fault(
    assignment: Assignment, expected: list[Comparable]
) -> None:
    async with stage_bench(assignment) as bench:
        predecessor, _ = await in_second_step(bench)
        await predecessor.send_raw(b"\xff\xff\xff\xff")
        report = await assert_refused(bench, predecessor)
        assert (report.kind, report.step_id) == (StepFaultKind.UNDECODABLE, 1)
        assert_same(await run_scenario(bench), expected)


async def test_a_step_without_slices_takes_no_hidden_states(assignment: Assignment) -> None:
    async with stage_bench(assignment) as bench:
        predecessor, log = await in_second_step(bench)
        step, hidden = log.next_frame()
        empty = Step(epoch=step.epoch, step_id=step.step_id, digest=step.digest)
        await predecessor.send(encode_frame(encode_step(empty), empty.step_id, hidden))
        report = await assert_refused(bench, predecessor)
        assert report.kind is StepFaultKind.HIDDEN_STATES_UNEXPECTED


async def test_a_step_without_slices_is_valid_and_forwarded(assignment: Assignment) -> None:
    async with stage_bench(assignment) as bench:
        predecessor, log = await in_second_step(bench)
        step, _ = log.next_frame()
        empty = Step(epoch=step.epoch, step_id=step.step_id, digest=step.digest)
        await predecessor.send(encode_frame(encode_step(empty), empty.step_id, None))
        if assignment.role.has_head:
            result = await bench.coordinator.result()
            assert (result.step_id, result.results) == (1, ())
        else:
            frame = await bench.next_stage.frame()
            assert frame.step == empty
            assert not frame.hidden


async def test_frames_before_the_faulty_one_are_computed(assignment: Assignment) -> None:
    async with stage_bench(assignment) as bench:
        log = ScriptedLog(assignment, await bench.begin_epoch())
        predecessor = await bench.predecessor()
        messages: list[forward_pb2.ForwardRequest] = []
        for _ in range(2):
            step, hidden = log.next_frame()
            messages += encode_frame(encode_step(step), step.step_id, hidden)
        messages[-1].hidden_states.checksum ^= 1
        await predecessor.send(messages)
        report = await bench.link.fault()
        assert (report.kind, report.step_id) == (StepFaultKind.CHECKSUM, 1)


async def test_the_first_stage_takes_no_hidden_states(tiny_llama: Path) -> None:
    assignment = new_assignment(tiny_llama, stage=FIRST)
    async with stage_bench(assignment) as bench:
        predecessor, log = await in_second_step(bench)
        step, _ = log.next_frame()
        await predecessor.send(encode_frame(encode_step(step), step.step_id, hidden_for(step, 64)))
        report = await bench.link.fault()
        assert report.kind is StepFaultKind.HIDDEN_STATES_UNEXPECTED
        await predecessor.close()
        await bench.output()
        assert_same(await run_scenario(bench), expected_outputs(assignment))
