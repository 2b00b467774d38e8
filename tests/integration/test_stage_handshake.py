"""Both ends of a hop agree before the first frame, or the stream is rejected. A stale one changes nothing."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from stage_worker import next_stage_stream, service, stage_manager
from stage_worker.assignment import Assignment
from stage_worker.policy import WORKER_POLICY
from stage_worker.stage_manager import MAX_PER_HOST
from stageline_rpc.internal.v1 import forward_pb2
from stageline_rpc.v1 import cluster_pb2
from tests.integration.doubles import DEADLINE_S, PredecessorDouble, StreamEnded
from tests.integration.scenario import assert_same, expected_outputs, run_scenario
from tests.integration.stage_bench import StageBench, hop_secret, new_assignment, stage_bench
from wire.channels import PROTOCOL_VERSION
from wire.errors import StepFaultKind
from wire.ids import new_incarnation
from wire.peer_secrets import MAX_TRIES

Change = Callable[[forward_pb2.HopHello], None]


@pytest.fixture
def assignment(tiny_llama: Path) -> Assignment:
    return new_assignment(tiny_llama, stage=1)


def setting(**fields: object) -> Change:
    def change(hello: forward_pb2.HopHello) -> None:
        for name, value in fields.items():
            setattr(hello, name, value)

    return change


async def refusal(bench: StageBench, change: Change) -> StreamEnded:
    hello = bench.hello()
    change(hello)
    predecessor = PredecessorDouble(bench.worker.advertised_address)
    with pytest.raises(StreamEnded) as ended:
        await predecessor.hello(hello)
    await predecessor.close()
    return ended.value


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("change", "details"),
    [
        (setting(protocol_version=99), f"protocol version mismatch: expected {PROTOCOL_VERSION}, got 99"),
        (setting(fingerprint="other"), "got other"),
        (setting(dtype=cluster_pb2.DTYPE_BF16), "dtype mismatch: expected f32, got bf16"),
        (
            setting(kv_dtype=cluster_pb2.DTYPE_I8),
            "dtype of keys and values mismatch: expected the run dtype, got int8",
        ),
        (setting(dtype=55), "dtype mismatch: expected f32, got number 55"),
        (setting(layer_end=2), "layer range mismatch: expected begin 1, got begin 2"),
        (setting(block_size=16), "block size mismatch: expected 4, got 16"),
        (setting(num_blocks=31), "number of blocks mismatch: expected 32, got 31"),
    ],
    ids=[
        "protocol",
        "fingerprint",
        "dtype",
        "kv-dtype",
        "unknown-dtype",
        "layers",
        "block-size",
        "num-blocks",
    ],
)
async def test_a_mismatch_is_rejected_with_both_values(
    assignment: Assignment, change: Change, details: str
) -> None:
    async with stage_bench(assignment) as bench:
        await bench.begin_epoch()
        ended = await refusal(bench, change)
        assert ended.code is grpc.StatusCode.FAILED_PRECONDITION
        assert details in ended.details
        predecessor = await bench.predecessor()
        await predecessor.close()
        assert bench.link.answers.empty(), "a rejected stream was reported as a fault of the epoch"


@pytest.mark.parametrize(
    ("change", "details"),
    [
        (setting(epoch=1), "epoch 1, the current epoch is 2"),
        (setting(sender_stage=-1), "from stage -1, the predecessor of stage 1 is stage 0"),
        (setting(sender_incarnation=bytes(16)), "incarnation of stage 0"),
        (setting(coordinator_incarnation=bytes(16)), "coordinator incarnation"),
    ],
    ids=["old-epoch", "other-stage", "other-predecessor", "other-coordinator"],
)
async def test_a_stale_stream_is_rejected_and_changes_nothing(
    assignment: Assignment, change: Change, details: str
) -> None:
    async with stage_bench(assignment) as bench:
        await bench.begin_epoch()
        await bench.begin_epoch()
        ended = await refusal(bench, change)
        assert ended.code is grpc.StatusCode.ABORTED
        assert details in ended.details
        predecessor = await bench.predecessor()
        await predecessor.close()
        assert bench.link.answers.empty()


@pytest.mark.parametrize("secret", [b"", hop_secret(2, 2), b"\0" * 32], ids=["none", "next-hop", "guess"])
async def test_without_the_secret_nothing_else_is_compared_or_disclosed(
    assignment: Assignment, secret: bytes
) -> None:
    async with stage_bench(assignment) as bench:
        await bench.begin_epoch()
        await bench.begin_epoch()
        for change in (setting(secret=secret), setting(secret=secret, epoch=1, fingerprint="", num_blocks=0)):
            ended = await refusal(bench, change)
            assert (ended.code, ended.details) == (
                grpc.StatusCode.PERMISSION_DENIED,
                "hop secret does not match",
            )
        predecessor = await bench.predecessor()
        await predecessor.close()
        assert bench.link.answers.empty()


async def test_the_secret_of_an_earlier_epoch_does_not_count_as_wrong(assignment: Assignment) -> None:
    async with stage_bench(assignment) as bench:
        await bench.begin_epoch()
        await bench.begin_epoch()
        ended = await refusal(bench, setting(secret=hop_secret(1, 1), epoch=1))
        assert (ended.code, ended.details) == (
            grpc.StatusCode.ABORTED,
            "the stream belongs to an earlier epoch",
        )


async def test_a_right_secret_passes_after_many_wrong_ones_from_its_host(
    assignment: Assignment, caplog: pytest.LogCaptureFixture
) -> None:
    async with stage_bench(assignment) as bench:
        await bench.begin_epoch()
        details = [(await refusal(bench, setting(secret=b"x" * 32))).details for _ in range(MAX_TRIES + 2)]
        assert details[-1] == "hop secret does not match; 10 earlier attempts from this host failed too"
        predecessor = await bench.predecessor()
        await predecessor.close()
    assert sum("hop secret" in line for line in caplog.messages) == MAX_TRIES


async def test_a_second_stream_in_an_epoch_is_rejected_and_the_first_continues(
    assignment: Assignment,
) -> None:
    async with stage_bench(assignment) as bench:
        await bench.begin_epoch()
        first = await bench.predecessor()
        ended = await refusal(bench, setting())
        assert ended.code is grpc.StatusCode.ABORTED
        assert "has its stream of epoch 1 already" in ended.details
        assert bench.link.answers.empty()
        await first.close()
        assert_same(await run_scenario(bench), expected_outputs(assignment))


async def test_a_stream_without_hello_is_rejected(assignment: Assignment) -> None:
    async with stage_bench(assignment) as bench:
        await bench.begin_epoch()
        predecessor = PredecessorDouble(bench.worker.advertised_address)
        await predecessor.send([forward_pb2.ForwardRequest(steps=[forward_pb2.StepFrame()])])
        ended = await predecessor.end()
        assert (ended.code, "hello" in ended.details) == (grpc.StatusCode.FAILED_PRECONDITION, True)
        await predecessor.close()


async def test_bytes_that_do_not_parse_are_rejected_as_hello(assignment: Assignment) -> None:
    async with stage_bench(assignment) as bench:
        await bench.begin_epoch()
        predecessor = PredecessorDouble(bench.worker.advertised_address)
        await predecessor.connected()
        await predecessor.send_raw(b"\xff\xff\xff\xff")
        ended = await predecessor.end()
        await predecessor.close()
        assert ended.code is grpc.StatusCode.FAILED_PRECONDITION
        assert "expected hello, got bytes that are no message" in ended.details


async def test_a_hello_that_is_too_large_is_rejected_unparsed(assignment: Assignment) -> None:
    async with stage_bench(assignment) as bench:
        predecessor = PredecessorDouble(bench.worker.advertised_address)
        await predecessor.connected()
        await predecessor.send_raw(b"\x7a\x00" * 50_000)
        ended = await predecessor.end()
        await predecessor.close()
        assert ended.code is grpc.StatusCode.INVALID_ARGUMENT
        assert ended.details == "message has 100000 bytes, the limit is 65536"


async def test_a_stream_that_sends_no_hello_is_ended(
    assignment: Assignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "WORKER_POLICY", replace(WORKER_POLICY, hello_timeout_s=0.05))
    async with stage_bench(assignment) as bench:
        predecessor = PredecessorDouble(bench.worker.advertised_address)
        ended = await predecessor.end()
        assert (ended.code, ended.details) == (grpc.StatusCode.ABORTED, "no hello within 0.05 s")
        await predecessor.close()


async def test_a_stream_whose_epoch_never_begins_is_ended(
    assignment: Assignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_manager, "WORKER_POLICY", replace(WORKER_POLICY, epoch_wait_s=0.05))
    async with stage_bench(assignment) as bench:
        ended = await refusal(bench, setting(epoch=5))
        assert ended.code is grpc.StatusCode.ABORTED
        assert "epoch 5 has not begun on this stage within 0.05 s" in ended.details


async def test_a_stream_ahead_of_begin_epoch_waits_for_it(assignment: Assignment) -> None:
    async with stage_bench(assignment) as bench:
        hello = bench.hello()
        hello.epoch, hello.secret = 1, hop_secret(1, 1)
        predecessor = PredecessorDouble(bench.worker.advertised_address)
        accepted = asyncio.create_task(predecessor.hello(hello))
        await bench.link.next_heartbeat()
        assert not accepted.done()
        await bench.begin_epoch()
        await asyncio.wait_for(accepted, DEADLINE_S)
        await predecessor.close()


async def fill_waiting_streams(bench: StageBench, stack: AsyncExitStack) -> StreamEnded:
    """Open streams of an epoch that never begins, as many as may wait and one more; return its rejection."""
    hello = bench.hello()
    hello.epoch, hello.secret = 99, b"x" * 32
    tasks = []
    for _ in range(MAX_PER_HOST + 1):
        stranger = PredecessorDouble(bench.worker.advertised_address)
        stack.push_async_callback(stranger.close)
        tasks.append(asyncio.create_task(stranger.hello(hello)))
    stack.callback(lambda: [task.cancel() for task in tasks])
    (refused,), _ = await asyncio.wait(tasks, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
    error = refused.exception()
    assert isinstance(error, StreamEnded)
    return error


async def test_streams_waiting_for_their_epoch_are_bounded(
    assignment: Assignment, caplog: pytest.LogCaptureFixture
) -> None:
    async with stage_bench(assignment) as bench, AsyncExitStack() as stack:
        ended = await fill_waiting_streams(bench, stack)
        assert ended.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "4 streams of this host wait for epochs that have not begun on this stage" in ended.details
        assert any("the limit is 4, host=127.0.0.1 tries=1" in line for line in caplog.messages)
        await bench.begin_epoch()
        predecessor = await bench.predecessor()
        await predecessor.close()


async def test_the_predecessor_is_accepted_while_a_stranger_has_all_places(
    assignment: Assignment, caplog: pytest.LogCaptureFixture
) -> None:
    async with stage_bench(assignment) as bench, AsyncExitStack() as stack:
        await fill_waiting_streams(bench, stack)
        hello = bench.hello()
        hello.epoch, hello.secret = 1, hop_secret(1, 1)
        before = next_stage_stream.stream_to_stage(1, bench.worker.advertised_address, hello)
        stack.push_async_callback(before.close)
        dialled = asyncio.create_task(before.dial())
        async with asyncio.timeout(DEADLINE_S):
            while not any("tries=2" in line for line in caplog.messages):
                await asyncio.sleep(0.01)
        assert not dialled.done()
        await bench.begin_epoch()
        await asyncio.wait_for(dialled, DEADLINE_S)


async def test_the_stage_sends_hello_to_the_next_stage(assignment: Assignment) -> None:
    async with stage_bench(assignment) as bench:
        await bench.begin_epoch()
        hello = await asyncio.wait_for(bench.next_stage.hellos.get(), DEADLINE_S)
        expected = bench.hello()
        expected.sender_stage = 1
        expected.sender_incarnation = bench.link.hello.incarnation
        expected.layer_end = 2
        expected.secret = hop_secret(1, 2)
        assert hello == expected


async def test_the_last_stage_sends_hello_to_the_coordinator(tiny_llama: Path) -> None:
    async with stage_bench(new_assignment(tiny_llama, stage=2)) as bench:
        await bench.begin_epoch()
        hello = await asyncio.wait_for(bench.coordinator.hop_hellos.get(), DEADLINE_S)
        assert (hello.sender_stage, hello.layer_end) == (2, 3)
        assert hello.sender_incarnation == bench.link.hello.incarnation


async def test_a_next_stage_that_rejects_the_stream_is_reported(assignment: Assignment) -> None:
    async with stage_bench(assignment) as bench:
        bench.next_stage.refusal = (grpc.StatusCode.FAILED_PRECONDITION, "dtype mismatch: ...")
        bench.epoch += 1
        bench.link.send(begin_epoch=bench.begin_message())
        report = await bench.link.fault()
        assert (report.kind, report.stage, report.epoch) == (StepFaultKind.NEIGHBOUR, 1, 1)
        for expected_text in ("stage 2", bench.next_stage.address, "FAILED_PRECONDITION", "dtype mismatch"):
            assert expected_text in report.message
        bench.next_stage.refusal = None
        assert_same(await run_scenario(bench), expected_outputs(assignment))


async def test_an_unreachable_next_stage_is_reported(
    assignment: Assignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage_bench(assignment) as bench:
        monkeypatch.setattr(next_stage_stream, "WORKER_POLICY", replace(WORKER_POLICY, dial_timeout_s=0.2))
        address, bench.next_stage.address = bench.next_stage.address, "127.0.0.1:1"
        bench.epoch += 1
        bench.link.send(begin_epoch=bench.begin_message())
        report = await bench.link.fault()
        assert report.kind is StepFaultKind.NEIGHBOUR
        assert "127.0.0.1:1 did not accept the stream within 0.2 s" in report.message
        monkeypatch.undo()
        bench.next_stage.address = address
        assert_same(await run_scenario(bench), expected_outputs(assignment))


async def test_begin_epoch_naming_another_process_is_rejected(assignment: Assignment) -> None:
    async with stage_bench(assignment) as bench:
        bench.epoch += 1
        message = bench.begin_message()
        message.stages[1].incarnation = new_incarnation()
        bench.link.send(begin_epoch=message)
        report = await bench.link.fault()
        assert (report.kind, report.epoch) == (StepFaultKind.EPOCH, 1)
        assert "another process as stage 1" in report.message
