"""Clusters that are not ready, cannot serve a model, or reject a worker."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from stageline_rpc.internal.v1 import forward_pb2, join_pb2, join_pb2_grpc
from stageline_rpc.v1 import cluster_pb2
from tests.checkpoints import make_checkpoint
from tests.integration.cluster import DEADLINE_S, TEST_POLICY, Cluster, RequestCase
from tests.integration.request_cases import SoloRuns, mixed_cases
from wire.channels import PROTOCOL_VERSION
from wire.ids import new_incarnation
from wire.transport import PLAIN

LAYERS = (1, 1, 1)
IMPATIENT = replace(TEST_POLICY, recovery_timeout_s=0.5)


@pytest.fixture(scope="module")
def solo(varied_llama: Path) -> SoloRuns:
    return SoloRuns(varied_llama)


async def test_requests_that_arrive_before_the_workers_wait_and_are_served(
    varied_llama: Path, solo: SoloRuns
) -> None:
    async with Cluster(varied_llama, layers=LAYERS, num_workers=0, waits=False) as cluster:
        async with cluster.generating(mixed_cases(4)) as answers:
            status = await cluster.client.status()
            assert status.state == cluster_pb2.CLUSTER_STATE_WAITING_FOR_WORKERS
            for name in ("w2", "w0", "w1"):
                await cluster.start_worker(name)
        solo.check(answers)


async def test_too_few_workers_are_unavailable_with_the_reason(varied_llama: Path) -> None:
    async with Cluster(varied_llama, layers=LAYERS, num_workers=2, waits=False, policy=IMPATIENT) as cluster:
        await cluster.wait_status(lambda status: len(status.workers) == 2)
        answer = await cluster.generate(RequestCase(prompt=(1,), max_tokens=4))
        assert answer.error is not None
        assert answer.error.code == "UNAVAILABLE"
        assert "2 of 3 workers joined" in answer.error.message


@pytest.mark.full
async def test_too_little_memory_of_survivors_fails_requests_with_the_numbers(varied_llama: Path) -> None:
    """One worker lacks the memory of three; the error states how much."""
    policy = replace(TEST_POLICY, recovery_timeout_s=2.0, rejoin_grace_s=0.1)
    async with Cluster(varied_llama, layers=LAYERS, policy=policy, worker_memory_bytes=880_000) as cluster:
        async with cluster.generating(mixed_cases(2, max_tokens=120)) as answers:
            async with asyncio.timeout(DEADLINE_S):
                while not all(answer.tokens for answer in answers):
                    await asyncio.sleep(0.002)
            for name in ("w1", "w2"):
                await cluster.workers[name].stop()
            await cluster.wait_state(cluster_pb2.CLUSTER_STATE_BLOCKED)
            answers.append(await cluster.generate(RequestCase(prompt=(1,), max_tokens=4)))
        for answer in answers:
            assert answer.error is not None
            assert answer.error.code == "UNAVAILABLE"
            assert re.search(r"layers 0-2 need .*KiB.* w0 has 859\.4 KiB", answer.error.message)
        for name in ("w1", "w2"):
            await cluster.start_worker(name)
        await cluster.wait_state(cluster_pb2.CLUSTER_STATE_SERVING)
        again = await cluster.generate(RequestCase(prompt=(1,), max_tokens=4))
        assert again.error is None


@pytest.mark.full
async def test_live_requests_fail_when_a_worker_stays_away(varied_llama: Path, solo: SoloRuns) -> None:
    policy = replace(IMPATIENT, rejoin_grace_s=DEADLINE_S)
    async with Cluster(varied_llama, layers=LAYERS, policy=policy) as cluster:
        async with cluster.generating(mixed_cases(4, max_tokens=120)) as answers:
            async with asyncio.timeout(DEADLINE_S):
                while not all(answer.tokens for answer in answers):
                    await asyncio.sleep(0.002)
            await cluster.workers["w1"].stop()
        for answer in answers:
            assert answer.error is not None
            assert answer.error.code == "UNAVAILABLE"
            assert "w1" in answer.error.message
            assert answer.tokens == solo.tokens(answer.case)[: len(answer.tokens)]
        await cluster.start_worker("w1")
        await cluster.wait_state(cluster_pb2.CLUSTER_STATE_SERVING)
        solo.check(await cluster.generate_all(mixed_cases(2)))
        await cluster.wait_drained()


async def test_a_model_that_does_not_fit_blocks_with_the_numbers(varied_llama: Path) -> None:
    async with Cluster(
        varied_llama, layers=LAYERS, waits=False, policy=IMPATIENT, worker_memory_bytes=100_000
    ) as cluster:
        status = await cluster.wait_state(cluster_pb2.CLUSTER_STATE_BLOCKED)
        assert re.search(r"\d+(\.\d+)? KiB", status.detail)
        answer = await cluster.generate(RequestCase(prompt=(1,), max_tokens=4))
        assert answer.error is not None
        assert answer.error.code == "UNAVAILABLE"
        assert status.detail in answer.error.message


async def test_a_second_worker_with_a_live_name_is_rejected(varied_llama: Path, solo: SoloRuns) -> None:
    async with Cluster(varied_llama, layers=LAYERS) as cluster:
        epoch, before = cluster.epoch, cluster.incarnations()
        error = await refusal(cluster.address, hello(name="w1"))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        assert cluster.workers["w1"].worker.advertised_address in str(error.details())
        solo.check(await cluster.generate_all(mixed_cases(2)))
        assert (cluster.epoch, cluster.incarnations()) == (epoch, before)


async def test_a_worker_with_another_protocol_version_is_rejected_and_logged(
    varied_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Cluster(varied_llama, layers=LAYERS, num_workers=0, waits=False) as cluster:
        error = await refusal(cluster.address, hello(protocol_version=PROTOCOL_VERSION + 1))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        expected = f"expected {PROTOCOL_VERSION}, got {PROTOCOL_VERSION + 1}"
        assert expected in str(error.details())
        assert not (await cluster.client.status()).workers
        (line,) = [text for text in caplog.messages if text.startswith("refused a worker: ")]
        assert expected in line and line.endswith(", host=127.0.0.1")


async def test_a_worker_with_another_model_is_named_with_both_fingerprints(
    varied_llama: Path, tmp_path: Path
) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", num_layers=3, hidden_size=32)
    async with Cluster(varied_llama, layers=LAYERS, num_workers=2, waits=False, policy=IMPATIENT) as cluster:
        await cluster.start_worker("w2", model_directory=other)
        status = await cluster.wait_state(cluster_pb2.CLUSTER_STATE_BLOCKED)
        (failed,) = [
            worker for worker in status.workers if worker.state == cluster_pb2.WORKER_STATE_QUARANTINED
        ]
        assert failed.name == "w2"
        got, expected = re.findall(r"(?:has the fingerprint|expected) ([0-9a-f-]+)", failed.detail)
        assert expected == status.fingerprint != got
        answer = await cluster.generate(RequestCase(prompt=(1,), max_tokens=4))
        assert answer.error is not None
        assert answer.error.code == "UNAVAILABLE"
        assert expected in answer.error.message


def other_version(message: forward_pb2.HopHello) -> None:
    message.protocol_version += 1


def other_fingerprint(message: forward_pb2.HopHello) -> None:
    message.fingerprint = "of-another-model"


def other_dtype(message: forward_pb2.HopHello) -> None:
    message.dtype = cluster_pb2.DTYPE_BF16


def other_layers(message: forward_pb2.HopHello) -> None:
    message.layer_end += 1


def other_block_size(message: forward_pb2.HopHello) -> None:
    message.block_size = 16


@pytest.mark.matrix(1, full=4)
@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.full), 1, pytest.param(2, marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    ("alter", "values"),
    [
        (other_version, (f"expected {PROTOCOL_VERSION}", f"got {PROTOCOL_VERSION + 1}")),
        (other_fingerprint, ("fingerprint", "expected ", "got of-another-model")),
        (other_dtype, ("dtype", "expected f32", "got bf16")),
        (other_layers, ("layer range", "expected begin ", "got begin ")),
        (other_block_size, ("block size", "expected 8", "got 16")),
    ],
    ids=["version", "fingerprint", "dtype", "layers", "block-size"],
)
async def test_a_mismatching_neighbour_is_rejected_with_both_values(
    varied_llama: Path,
    solo: SoloRuns,
    stage: int,
    alter: Callable[[forward_pb2.HopHello], None],
    values: tuple[str, ...],
) -> None:
    async with Cluster(varied_llama, layers=LAYERS, hop_proxies=[stage], waits=False) as cluster:
        proxy = cluster.proxy(stage)
        proxy.alter_hello = alter
        await cluster.wait_state(cluster_pb2.CLUSTER_STATE_SERVING)
        code, details = proxy.refusals[0]
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert all(value in details for value in values), details
        # The hello of the next epoch is valid.
        solo.check(await cluster.generate_all(mixed_cases(2)))


def hello(*, name: str = "stranger", protocol_version: int = PROTOCOL_VERSION) -> join_pb2.WorkerHello:
    return join_pb2.WorkerHello(
        protocol_version=protocol_version,
        name=name,
        incarnation=new_incarnation(),
        address="127.0.0.1:9",
        device="cpu",
        memory_bytes=1 << 26,
        pid=1,
    )


async def test_the_status_has_the_gpu_of_a_workers_hello_and_its_memory(varied_llama: Path) -> None:
    message = hello()
    gpu = cluster_pb2.Gpu(
        model="NVIDIA H100", uuid="GPU-0", compute_capability="9.0", memory_bytes=80 << 30, driver="580.95.05"
    )
    message.gpu.CopyFrom(gpu)
    async with (
        Cluster(varied_llama, layers=LAYERS, num_workers=0, waits=False) as cluster,
        PLAIN.channel(cluster.address) as channel,
    ):
        call = join_pb2_grpc.MembershipServiceStub(channel).Join(timeout=DEADLINE_S)
        await call.write(join_pb2.JoinRequest(hello=message))
        assert (await call.read()).WhichOneof("message") == "welcome"
        status = await cluster.wait_status(lambda status: len(status.workers) == 1)
        assert status.workers[0].gpu == gpu
        assert not status.workers[0].HasField("device_memory")
        assert not status.workers[0].HasField("cuda_graphs")
        memory = cluster_pb2.DeviceMemory(
            allocated_bytes=4, reserved_bytes=5, free_bytes=6, peak_bytes=7, pinned_bytes=8
        )
        graphs = cluster_pb2.CudaGraphs(
            num_replayed=9,
            eager=[cluster_pb2.EagerSteps(reason=cluster_pb2.EAGER_REASON_FIRST, num_steps=1)],
            sizes=[cluster_pb2.GraphSize(num_tokens=8, num_graphs=1)],
            pool_bytes=10,
        )
        heartbeat = join_pb2.Heartbeat(device_memory=memory, cuda_graphs=graphs)
        await call.write(join_pb2.JoinRequest(heartbeat=heartbeat))
        status = await cluster.wait_status(lambda status: status.workers[0].device_memory == memory)
        assert status.workers[0].cuda_graphs == graphs
        call.cancel()


async def test_a_gpu_of_unprintable_text_is_refused(varied_llama: Path) -> None:
    message = hello()
    message.gpu.model = "two\nlines"
    async with Cluster(varied_llama, layers=LAYERS, num_workers=0, waits=False) as cluster:
        refused = await refusal(cluster.address, message)
        assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "'two\\nlines'" in (refused.details() or "")


async def refusal(coordinator: str, message: join_pb2.WorkerHello) -> grpc.aio.AioRpcError:
    """Status of a `Join` that begins with `message`."""

    async def requests() -> AsyncIterator[join_pb2.JoinRequest]:
        yield join_pb2.JoinRequest(hello=message)

    async with PLAIN.channel(coordinator) as channel:
        call = join_pb2_grpc.MembershipServiceStub(channel).Join(requests(), timeout=DEADLINE_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    return caught.value


async def test_requests_waiting_for_a_pipeline_are_bounded_and_counted(varied_llama: Path) -> None:
    cases = mixed_cases(7)
    async with Cluster(varied_llama, layers=LAYERS, num_workers=0, waits=False, queue_size=4) as cluster:
        async with cluster.generating(cases) as answers:
            await cluster.wait_status(lambda status: status.requests.waiting == 4)
            async with asyncio.timeout(DEADLINE_S):
                while sum(answer.error is not None for answer in answers) < 3:
                    await asyncio.sleep(0.002)
            refused = [answer.error.code for answer in answers if answer.error]
            assert refused == ["RESOURCE_EXHAUSTED"] * 3
            await cluster.server.controller.close()
        waited = [answer.error for answer in answers if answer.error and answer.error.code == "UNAVAILABLE"]
        assert [error.message for error in waited] == ["the coordinator is stopping"] * 4


async def test_a_join_without_a_hello_is_rejected(varied_llama: Path) -> None:
    policy = replace(TEST_POLICY, hello_timeout_s=0.1)
    async with (
        Cluster(varied_llama, layers=LAYERS, num_workers=0, waits=False, policy=policy) as cluster,
        PLAIN.channel(cluster.address) as channel,
    ):
        call = join_pb2_grpc.MembershipServiceStub(channel).Join(timeout=DEADLINE_S)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.details() == "no hello within 0.1 s"


@pytest.mark.parametrize("method", ["Inference/Generate", "Inference/Cancel", "Cluster/GetStatus"])
async def test_bytes_that_do_not_parse_are_an_invalid_request(varied_llama: Path, method: str) -> None:
    async with (
        Cluster(varied_llama, layers=LAYERS, num_workers=0, waits=False) as cluster,
        PLAIN.channel(cluster.address) as channel,
    ):
        call = channel.unary_unary(f"/stageline.v1.{method}")(b"\xff\xff\xff", timeout=DEADLINE_S)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "cannot be decoded" in (refused.value.details() or "")
