"""Concurrent requests on a whole cluster: each ends like its solo run, and nothing is leaked."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc
import pytest

from stageline.client.client import Client
from stageline.client.errors import Overloaded, RequestExists, StagelineError
from stageline_rpc.v1 import cluster_pb2, inference_pb2, inference_pb2_grpc
from tests.integration.cluster import DEADLINE_S, Answer, Cluster, RequestCase
from tests.integration.request_cases import SoloRuns, mixed_cases
from wire.ids import id_text
from wire.steps import Decode, Step
from wire.transport import PLAIN

LAYERS = (1, 1, 1)
LONG_PROMPT = tuple(index * 7 % 128 for index in range(200))


@pytest.fixture(scope="module")
def solo(varied_llama: Path) -> SoloRuns:
    return SoloRuns(varied_llama)


async def until(holds: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.002)


def num_decodes(step: Step) -> int:
    return sum(isinstance(step_slice.inference_step, Decode) for step_slice in step.slices)


@pytest.mark.matrix(1, full=1)
@pytest.mark.parametrize("count", [16, 64, 1, 4])
async def test_concurrent_requests_generate_the_tokens_of_solo_runs(
    varied_llama: Path, solo: SoloRuns, count: int
) -> None:
    async with Cluster(varied_llama, layers=LAYERS, max_kv_tokens=8192) as cluster:
        solo.check(await cluster.generate_all(mixed_cases(count, max_tokens=16)))
        await cluster.wait_drained()


@pytest.mark.full
async def test_requests_join_and_leave_at_any_step(varied_llama: Path, solo: SoloRuns) -> None:
    cases = [
        RequestCase(prompt=case.prompt, max_tokens=1 + 5 * index % 23, seed=case.seed)
        for index, case in enumerate(mixed_cases(24))
    ]
    answers = [Answer(case) for case in cases]
    async with Cluster(varied_llama, layers=LAYERS) as cluster, asyncio.TaskGroup() as tasks:
        for before, answer in zip([None, *answers], answers, strict=False):
            if before is not None:
                await until(partial(_has_tokens, before))
            tasks.create_task(cluster.generate(answer.case, answer))
    solo.check(answers)


def _has_tokens(answer: Answer) -> bool:
    return bool(answer.tokens or answer.error)


async def test_long_prompts_go_in_chunks_beside_decodes(varied_llama: Path, solo: SoloRuns) -> None:
    async with Cluster(varied_llama, layers=LAYERS, max_step_tokens=16, hop_proxies=[1]) as cluster:
        async with cluster.generating(mixed_cases(4, max_tokens=60)) as decoding:
            await until(lambda: all(answer.tokens for answer in decoding))
            long = [RequestCase(prompt=(index, *LONG_PROMPT), max_tokens=8) for index in range(3)]
            solo.check(await cluster.generate_all(long))
        solo.check(decoding)
        assert any(0 < num_decodes(step) < len(step.slices) for step in cluster.proxy(1).steps.values())


@pytest.mark.full
async def test_several_steps_are_in_flight_under_load(varied_llama: Path, solo: SoloRuns) -> None:
    async with Cluster(varied_llama, layers=LAYERS, hop_proxies=[0]) as cluster:
        most = 0
        async with cluster.generating(mixed_cases(9, max_tokens=40)) as answers:
            await until(lambda: all(answer.tokens for answer in answers))
            for _ in range(10):
                most = max(most, (await cluster.client.status()).requests.steps_in_flight)
            # Sequences that arrived together do not stay in one step.
            decodes = [num_decodes(step) for step in cluster.proxy(0).steps.values()]
        solo.check(answers)
        assert most >= len(LAYERS)
        assert max(decodes) <= 3


@pytest.mark.matrix(0, full=1)
@pytest.mark.parametrize("count", [6, 16])
async def test_frequent_preemptions_change_no_token(varied_llama: Path, solo: SoloRuns, count: int) -> None:
    async with Cluster(varied_llama, layers=LAYERS, max_kv_tokens=128) as cluster:
        answers = await cluster.generate_all(mixed_cases(count, max_tokens=40))
        solo.check(answers)
        restarts = [answer.usage.restarts for answer in answers if answer.usage]
        assert sum(restarts) > 0
        await cluster.wait_drained()


@pytest.mark.full
async def test_a_full_queue_rejects_new_requests_and_serves_its_own(
    varied_llama: Path, solo: SoloRuns
) -> None:
    async with Cluster(varied_llama, layers=LAYERS, max_kv_tokens=64, queue_size=4) as cluster:
        answers = await cluster.generate_all(mixed_cases(24, max_tokens=12))
        refused = [answer for answer in answers if isinstance(answer.error, Overloaded)]
        assert refused
        assert all("4 sequences are waiting" in str(answer.error) for answer in refused)
        solo.check([answer for answer in answers if answer not in refused])
        solo.check(await cluster.generate_all([answer.case for answer in refused[:4]]))


async def test_an_id_is_rejected_while_its_request_is_live(varied_llama: Path, solo: SoloRuns) -> None:
    (case,) = mixed_cases(1, max_tokens=60)
    async with Cluster(varied_llama, layers=LAYERS) as cluster:
        async with cluster.generating([case]) as answers:
            await until(lambda: bool(answers[0].tokens))
            twin = await cluster.generate(case)
            assert isinstance(twin.error, RequestExists)
        solo.check(answers)


@pytest.mark.full
async def test_an_id_can_be_reused_when_its_request_has_ended(varied_llama: Path, solo: SoloRuns) -> None:
    first, second = mixed_cases(2, max_tokens=30)
    second = RequestCase(prompt=second.prompt, max_tokens=30, seed=5, request_id=first.request_id)
    async with Cluster(varied_llama, layers=LAYERS) as cluster:
        epoch = cluster.epoch
        async with cluster.generating(mixed_cases(3, max_tokens=60)) as others:
            for _ in range(3):
                # Cancelled with steps in flight, whose results must not be attributed to its successor.
                await abandon(cluster, first, after=2, how="cancel")
                answer = await cluster.generate(second)
                solo.check([answer])
                assert answer.usage is not None
                assert answer.usage.restarts == 0
        solo.check(others)
        assert cluster.epoch == epoch
        await cluster.wait_drained()


async def test_of_two_concurrent_requests_with_one_id_one_is_served(
    varied_llama: Path, solo: SoloRuns
) -> None:
    (case,) = mixed_cases(1, max_tokens=30)
    async with Cluster(varied_llama, layers=LAYERS) as cluster:
        answers = await cluster.generate_all([case] * 8)
        assert [answer.error is None for answer in answers].count(True) == 1
        assert all(isinstance(answer.error, RequestExists) for answer in answers if answer.error)
        solo.check([answer for answer in answers if answer.error is None])
        await cluster.wait_drained()


async def test_a_common_prefix_is_computed_once(varied_llama: Path, solo: SoloRuns) -> None:
    async with Cluster(varied_llama, layers=LAYERS) as cluster:
        first = await cluster.generate(RequestCase(prompt=LONG_PROMPT[:50], max_tokens=8))
        second = await cluster.generate(RequestCase(prompt=(*LONG_PROMPT[:50], 5), max_tokens=8, seed=7))
        same = await cluster.generate(RequestCase(prompt=LONG_PROMPT[:48], max_tokens=8))
        other = await cluster.generate(RequestCase(prompt=(1, *LONG_PROMPT[:50]), max_tokens=8))
        answers = [first, second, same, other]
        solo.check(answers)
        # Blocks of 8; the last token of a prompt is always computed, for its logits.
        assert [answer.usage.cached_tokens for answer in answers if answer.usage] == [0, 48, 47, 0]
        await cluster.wait_drained()


@pytest.mark.full
async def test_a_slow_reader_delays_no_other_request(varied_llama: Path, solo: SoloRuns) -> None:
    async with Cluster(varied_llama, layers=LAYERS) as cluster, PLAIN.channel(cluster.address) as channel:
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[3]), max_tokens=100)
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=DEADLINE_S)
        first = await call.read()
        assert isinstance(first, inference_pb2.GenerateResponse)
        # No further read until the other requests have ended.
        solo.check(await cluster.generate_all(mixed_cases(6)))
        tokens = list(first.token_ids)
        while (response := await call.read()) and isinstance(response, inference_pb2.GenerateResponse):
            tokens += response.token_ids
        assert tokens == solo.tokens(RequestCase(prompt=(3,), max_tokens=100))
        await cluster.wait_drained()


async def abandon(cluster: Cluster, case: RequestCase, *, after: int, how: str) -> StagelineError | None:
    """Abandon a request after `after` tokens; with 0 as soon as it is queued or in prefill."""
    answer = Answer(case)
    task = asyncio.create_task(cluster.generate(case, answer))
    if after:
        await until(lambda: len(answer.tokens) >= after or task.done())
    else:
        await until(lambda: _is_live(cluster, case) or task.done())
    assert not task.done(), f"it ended before {how}"
    if how == "cancel":
        await cluster.client.cancel(id_text(case.request_id))
        await task
    else:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return answer.error


def _is_live(cluster: Cluster, case: RequestCase) -> bool:
    return any(
        sequence.key.request_id == case.request_id for sequence in cluster.server.engine.live_sequences
    )


@pytest.mark.matrix(1, full=1)
@pytest.mark.parametrize("how", ["cancel", "disconnect"])
@pytest.mark.parametrize("after", [0, 3], ids=["prefill", "decode"])
async def test_abandoned_requests_leave_no_blocks(
    varied_llama: Path, solo: SoloRuns, how: str, after: int
) -> None:
    async with Cluster(varied_llama, layers=LAYERS, max_step_tokens=8) as cluster:
        async with cluster.generating(mixed_cases(3, max_tokens=40)) as others:
            given_up = [RequestCase(prompt=(index, *LONG_PROMPT), max_tokens=200) for index in range(3)]
            errors = [await abandon(cluster, case, after=after, how=how) for case in given_up]
        solo.check(others)
        if how == "cancel":
            assert [error.code for error in errors if error] == ["CANCELLED"] * 3
        status = await cluster.wait_drained()
        assert status.requests.cancelled == 3


@pytest.mark.parametrize("tokens", [1, 300], ids=["prefill", "decode"])
async def test_a_deadline_that_passes_leaves_no_blocks(varied_llama: Path, tokens: int) -> None:
    prompt = LONG_PROMPT * 2 if tokens == 1 else (3,)
    async with Cluster(varied_llama, layers=LAYERS, max_step_tokens=8) as cluster:
        await cluster.generate(RequestCase(prompt=(1,), max_tokens=1))
        async with PLAIN.channel(cluster.address) as channel:
            request = inference_pb2.GenerateRequest(
                token_ids=inference_pb2.TokenIds(ids=prompt), max_tokens=tokens
            )
            call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=0.03)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await cluster.wait_drained()


async def test_a_disconnected_client_leaves_no_blocks(varied_llama: Path, solo: SoloRuns) -> None:
    async with Cluster(varied_llama, layers=LAYERS) as cluster:
        async with PLAIN.channel(cluster.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[3]), max_tokens=400)
            calls = [stub.Generate(request, timeout=DEADLINE_S) for _ in range(4)]
            for call in calls:
                await call.read()
        status = await cluster.wait_drained()
        assert status.requests.cancelled == 4
        solo.check(await cluster.generate_all(mixed_cases(2)))


@pytest.mark.full
async def test_a_storm_of_aborts_leaves_nothing(varied_llama: Path, solo: SoloRuns) -> None:
    async with Cluster(varied_llama, layers=LAYERS, max_kv_tokens=2048) as cluster:
        async with cluster.generating(mixed_cases(3, max_tokens=40)) as others:
            storm = [RequestCase(prompt=case.prompt, max_tokens=400, seed=1) for case in mixed_cases(32)]
            async with asyncio.TaskGroup() as tasks:
                for index, case in enumerate(storm):
                    how = "cancel" if index % 2 else "disconnect"
                    tasks.create_task(abandon(cluster, case, after=index % 5, how=how))
        solo.check(others)
        status = await cluster.wait_drained()
        assert status.requests.cancelled == 32


@pytest.mark.full
async def test_a_second_request_on_a_connection_works(varied_llama: Path, solo: SoloRuns) -> None:
    async with Cluster(varied_llama, layers=LAYERS) as cluster:
        for case in mixed_cases(6):
            solo.check([await cluster.generate(case)])
        async with Client(cluster.address) as other:
            model = await other.model()
        assert model.vocab_size == 128


async def test_one_stage_serves_too(varied_llama: Path, solo: SoloRuns) -> None:
    async with Cluster(varied_llama, layers=(3,)) as cluster:
        solo.check(await cluster.generate_all(mixed_cases(6)))
        status = await cluster.wait_drained()
        assert [worker.role for worker in status.workers] == [cluster_pb2.STAGE_ROLE_ONLY]
