"""Pipelines of mock stages: everything is real but the computation, so every token is known beforehand."""

from __future__ import annotations

import grpc
import pytest

from stage_worker.mock.compute import mock_token
from stage_worker.mock.spec import MockSpec
from stageline.errors import StagelineError
from stageline_rpc.v1 import cluster_pb2, cluster_pb2_grpc
from tests.integration.cluster import Answer, Ask, Cluster
from wire.channels import PROTOCOL_VERSION, client_channel
from wire.ids import new_incarnation

VOCAB_SIZE = 100
MODEL = "layers={layers},hidden=16,heads=2,kv_heads=1,head_dim=8,ffn=32,vocab=100,max_len=256"
INSTANT = MockSpec()


def mock_cluster(num_stages: int, *, mock: MockSpec = INSTANT, **settings: int) -> Cluster:
    return Cluster(
        None, layers=(1,) * num_stages, mock=mock, mock_model=MODEL.format(layers=num_stages), **settings
    )


def known_tokens(ask: Ask) -> list[int]:
    """What mock stages generate: each token follows from the one before and where that is."""
    tokens = list(ask.prompt)
    for _ in range(ask.max_tokens):
        tokens.append(mock_token(tokens[-1], len(tokens) - 1, vocab_size=VOCAB_SIZE))
    return tokens[len(ask.prompt) :]


def asks(count: int, *, max_tokens: int = 20) -> list[Ask]:
    """Prompts of one token, of several blocks and of several chunks."""
    lengths = (1, 7, 8, 9, 33, 70)
    return [
        Ask(
            prompt=tuple(
                (3 * number + index) % VOCAB_SIZE for index in range(lengths[number % len(lengths)])
            ),
            max_tokens=max_tokens,
        )
        for number in range(count)
    ]


def check(answers: list[Answer]) -> None:
    for answer in answers:
        assert answer.error is None
        assert answer.tokens == known_tokens(answer.ask)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
async def test_many_requests_get_the_tokens_that_are_known(num_stages: int) -> None:
    async with mock_cluster(num_stages) as cluster:
        check(await cluster.generate_all(asks(24)))
        status = await cluster.wait_drained()
        assert [worker.device for worker in status.workers] == ["mock"] * num_stages


async def test_a_few_blocks_preempt_all_the_time_and_change_no_token() -> None:
    async with mock_cluster(3, max_kv_tokens=160) as cluster:
        answers = await cluster.generate_all(asks(12, max_tokens=60))
        check(answers)
        assert sum(answer.usage.restarts for answer in answers if answer.usage) > 0
        await cluster.wait_drained()


async def test_a_stage_that_leaves_and_comes_back_costs_no_token() -> None:
    async with mock_cluster(3, mock=MockSpec(step=0.002)) as cluster:
        async with cluster.generating(asks(9, max_tokens=40)) as answers:
            await cluster.wait_status(lambda status: status.requests.decode > 3)
            await cluster.workers["w1"].stop()
            await cluster.start_worker("w1")
        check(answers)
        await cluster.wait_drained()


async def test_what_needs_probabilities_fails_and_nothing_else_suffers() -> None:
    async with mock_cluster(2) as cluster:
        async with cluster.generating(asks(6, max_tokens=60)) as answers:
            with pytest.raises(StagelineError, match="mock stages have no log-probabilities"):
                await cluster.client.complete([1, 2, 3], max_tokens=4, logprobs=2)
            with pytest.raises(StagelineError, match="mock stages have no prompt log-probabilities"):
                await cluster.client.complete([1, 2, 3], max_tokens=0, prompt_logprobs=1)
        check(answers)
        assert (await cluster.wait_drained()).epoch == 1


async def test_every_stage_says_how_long_it_took() -> None:
    async with mock_cluster(3, mock=MockSpec(step=0.003)) as cluster:
        check(await cluster.generate_all(asks(4)))
        times = cluster.server.engine.scheduler.times
        slowest_us, total_us = times.slowest.decode_us(0), times.total.decode_us(0)
        assert slowest_us == pytest.approx(3_000, rel=0.01)
        assert total_us == pytest.approx(9_000, rel=0.01)


@pytest.mark.parametrize("is_mock", [True, False])
async def test_mock_and_real_stages_are_never_in_one_cluster(is_mock: bool) -> None:
    cluster = mock_cluster(1) if is_mock else Cluster(None, layers=(12,), worker_memory_bytes=1 << 30)
    async with cluster, client_channel(cluster.address) as channel:
        call = cluster_pb2_grpc.ClusterStub(channel).Join()
        hello = cluster_pb2.WorkerHello(
            protocol_version=PROTOCOL_VERSION,
            name="other",
            incarnation=new_incarnation(),
            address="127.0.0.1:1",
            device="cpu" if is_mock else "mock",
            memory_bytes=1 << 30,
            is_mock=not is_mock,
        )
        await call.write(cluster_pb2.WorkerMessage(hello=hello))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "mock stage" in (raised.value.details() or "")
