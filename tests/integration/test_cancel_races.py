"""Races of a cancel with the end of its request or another cancel: one terminal state, counted once."""

import asyncio
from pathlib import Path

import pytest

from coordinator.scheduler.sequence import SequenceState
from stage_worker.backends.mock_spec import MockSpec
from stageline_rpc.v1 import cluster_pb2
from tests.integration.calls import Caller, StatusCode, again, message, message_of, until
from tests.integration.cluster import Cluster
from tests.integration.gate import Gate
from tests.integration.request_cases import SoloRuns, mixed_cases
from wire.frames import Frame
from wire.ids import id_text
from wire.steps import Decode, Prefill

pytestmark = pytest.mark.full

LAYERS = (1, 1, 1)
LONG_PROMPT = tuple(index * 7 % 128 for index in range(200))


@pytest.fixture(scope="module")
def solo(varied_llama: Path) -> SoloRuns:
    return SoloRuns(varied_llama)


def counts(status: cluster_pb2.GetStatusResponse) -> tuple[int, int, int]:
    """Finished, cancelled and failed requests."""
    return status.requests.finished, status.requests.cancelled, status.requests.failed


async def test_a_cancel_during_the_last_token(varied_llama: Path) -> None:
    def computes_the_last_token(frame: Frame) -> bool:
        return any(step_slice.inference_step == Decode(3 + 10 - 2) for step_slice in frame.step.slices)

    async with (
        Cluster(varied_llama, layers=LAYERS, hop_proxies=[0]) as cluster,
        Caller(cluster.address) as caller,
    ):
        request = message([3, 1, 4], 10)
        undisturbed = await caller.run(request)
        gate = Gate(cluster, stops=computes_the_last_token)
        gate.close()
        reader = caller.generate(again(request))
        await reader.until(9)
        await gate.wait_quiet()
        assert await caller.cancel(reader.received.request_id) is StatusCode.OK
        gate.open()
        assert await reader.end() is StatusCode.CANCELLED
        # The step is computed and its token dropped.
        assert reader.received.tokens == undisturbed.tokens[:9]
        assert counts(await cluster.wait_drained()) == (1, 1, 0)


@pytest.mark.full
async def test_a_cancel_takes_effect_before_the_end_or_not_at_all(varied_llama: Path) -> None:
    num_requests, num_tokens = 60, 12

    async with Cluster(varied_llama, layers=LAYERS) as cluster, Caller(cluster.address) as caller:

        async def race(index: int) -> tuple[StatusCode, StatusCode]:
            reader = caller.generate(message([index, 1, 4], num_tokens, n=1 + index // 6 % 2))
            await reader.until(num_tokens if index % 6 == 5 else num_tokens - 1)
            await asyncio.sleep(0.001 * (index % 6))  # a different moment per request, not a wait
            cancelling = asyncio.create_task(caller.cancel(reader.received.request_id))
            ended = await reader.end()
            return await cancelling, ended

        outcomes = []
        for begin in range(0, num_requests, 6):
            outcomes += await asyncio.gather(*(race(index) for index in range(begin, begin + 6)))
        assert set(outcomes) == {
            (StatusCode.OK, StatusCode.CANCELLED),
            (StatusCode.NOT_FOUND, StatusCode.OK),
        }
        num_cancelled = outcomes.count((StatusCode.OK, StatusCode.CANCELLED))
        assert counts(await cluster.wait_drained()) == (num_requests - num_cancelled, num_cancelled, 0)


async def test_a_cancel_between_prompt_chunks(varied_llama: Path) -> None:
    def is_in_the_middle(frame: Frame) -> bool:
        steps = (step_slice.inference_step for step_slice in frame.step.slices)
        return any(isinstance(step, Prefill) and step.start >= 64 for step in steps)

    async with (
        Cluster(varied_llama, layers=LAYERS, hop_proxies=[0]) as cluster,
        Caller(cluster.address) as caller,
    ):
        undisturbed = await caller.run(message(LONG_PROMPT, 5, cache_salt="a"))
        gate = Gate(cluster, stops=is_in_the_middle)
        gate.close()
        reader = caller.generate(message(LONG_PROMPT, 5, n=2, cache_salt="b"))
        reading = asyncio.create_task(reader.end())
        await gate.wait_quiet()
        assert await caller.cancel(reader.received.request_id) is StatusCode.OK
        assert await reading is StatusCode.CANCELLED
        assert reader.num_messages == 0
        gate.open()
        assert counts(await cluster.wait_drained()) == (1, 1, 0)
        # Its cached blocks are complete.
        after = await caller.run(message(LONG_PROMPT, 5, cache_salt="b"))
        assert after.tokens == undisturbed.tokens


@pytest.mark.full
async def test_a_cancel_of_a_preempted_request(varied_llama: Path, solo: SoloRuns) -> None:
    cases = mixed_cases(16, max_tokens=40)

    async with (
        Cluster(varied_llama, layers=LAYERS, max_kv_tokens=128) as cluster,
        Caller(cluster.address) as caller,
    ):
        readers = {case.request_id: caller.generate(message_of(case)) for case in cases}
        ends = [asyncio.create_task(reader.end()) for reader in readers.values()]

        def preempted() -> list[bytes]:
            live = cluster.server.engine.live_sequences
            return [sequence.key.request_id for sequence in live if sequence.state is SequenceState.PREEMPTED]

        cancelled = []
        for _ in range(4):
            await until(lambda: bool(preempted()))
            cancelled.append(preempted()[-1])
            assert await caller.cancel(id_text(cancelled[-1])) is StatusCode.OK
        codes = dict(zip(readers, await asyncio.gather(*ends), strict=True))
        assert [index for index in codes if codes[index] is StatusCode.CANCELLED] == sorted(cancelled)
        for case in cases:
            tokens, expected = readers[case.request_id].received.tokens, solo.tokens(case)
            if case.request_id in cancelled:
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected
        assert counts(await cluster.wait_drained()) == (12, 4, 0)


@pytest.mark.parametrize("num_cancels", [2, 8])
async def test_concurrent_cancels_count_once(varied_llama: Path, num_cancels: int) -> None:
    async with Cluster(varied_llama, layers=LAYERS) as cluster, Caller(cluster.address) as caller:
        reader = caller.generate(message([3, 1, 4], 400, n=2))
        await reader.until(3)
        cancels = (caller.cancel(reader.received.request_id) for _ in range(num_cancels))
        codes = await asyncio.gather(*cancels)
        assert sorted(codes, key=codes.count) == [StatusCode.OK, *[StatusCode.NOT_FOUND] * (num_cancels - 1)]
        assert await reader.end() is StatusCode.CANCELLED
        assert counts(await cluster.wait_drained()) == (0, 1, 0)


async def test_concurrent_cancel_disconnect_and_deadline_end_a_request_once(varied_llama: Path) -> None:
    timeout_s = 2.0
    slow = MockSpec(step=0.01)  # no request finishes before its deadline
    async with Cluster(varied_llama, layers=LAYERS, mock=slow) as cluster, Caller(cluster.address) as caller:
        now = asyncio.get_running_loop().time

        async def end_by_all(index: int) -> StatusCode:
            deadline_s = now() + timeout_s
            reader = caller.generate(message([index, 1, 4], 400), timeout_s=timeout_s)
            await reader.next()
            if index % 4 < 2:
                await asyncio.sleep(deadline_s - now() - 0.002 * index)
            cancelling = asyncio.create_task(caller.cancel(reader.received.request_id))
            if index % 2:
                # It may find the deadline, too.
                await asyncio.wait([cancelling], timeout=max(0, deadline_s - now()))
            reader.cancel()
            return await cancelling

        codes = await asyncio.gather(*(end_by_all(index) for index in range(16)))
        assert set(codes) <= {StatusCode.OK, StatusCode.NOT_FOUND}
        assert counts(await cluster.wait_drained()) == (0, 16, 0)


async def test_a_cancel_without_a_pipeline(varied_llama: Path) -> None:
    async with Cluster(varied_llama, layers=LAYERS) as cluster, Caller(cluster.address) as caller:
        readers = [caller.generate(message([index, 1, 4], 60)) for index in range(2)]
        for reader in readers:
            await reader.until(3)
        await cluster.workers["w1"].stop()
        assert await caller.cancel(readers[0].received.request_id) is StatusCode.OK
        assert await readers[0].end() is StatusCode.CANCELLED
        await cluster.start_worker("w1")
        assert await readers[1].end() is StatusCode.OK
        assert counts(await cluster.wait_drained()) == (1, 1, 0)


@pytest.mark.full
async def test_a_cancel_ends_the_unfinished_choices(varied_llama: Path) -> None:
    async with Cluster(varied_llama, layers=LAYERS) as cluster, Caller(cluster.address) as caller:
        free = await caller.run(message([3, 1, 4], 40, seed=9, n=3))
        # A token that only one choice generates early.
        choices = [choice.tokens for _, choice in sorted(free.choices.items())]
        early = next(token for token in choices[0][:10] if token not in choices[1] + choices[2])
        reader = caller.generate(message([3, 1, 4], 400, seed=9, n=3, stop_token_ids=[early]))
        while not reader.received.choices[0].is_ended:
            await reader.next()
        assert reader.received.choices[0].tokens == choices[0][: choices[0].index(early) + 1]
        assert await caller.cancel(reader.received.request_id) is StatusCode.OK
        assert await reader.end() is StatusCode.CANCELLED
        assert counts(await cluster.wait_drained()) == (1, 1, 0)
