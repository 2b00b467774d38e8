"""Clusters of mock stages: real messages, real accounting and predictable tokens."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from coordinator.scheduler.scheduler import Scheduler
from stage_worker.backends.mock_spec import MockSpec
from stage_worker.config import WorkerConfig
from stage_worker.coordinator_client import JoinRefused
from stage_worker.server import Worker
from stageline.client.errors import InvalidRequest, StepFailed
from stageline_rpc.v1 import cluster_pb2
from tests.integration.alterations import flip_byte
from tests.integration.calls import until
from tests.integration.cluster import DEADLINE_S, Answer, Cluster, RequestCase
from tests.integration.request_cases import mixed_cases
from tests.mock_answers import mock_tokens
from wire.frames import Frame
from wire.steps import StepResult

VOCAB_SIZE = 512
TIMES = "step=500us,token=10us,context=20us"


class MockCluster(Cluster):
    """Workers w0, w1, ... take `times` in turn."""

    def __init__(self, times: Sequence[str], **settings: Any) -> None:
        self._times = [MockSpec.parse(text) for text in times]
        super().__init__(None, mock=self._times[0], **settings)

    def worker_config(self, name: str, *arguments: Any, **more: Any) -> WorkerConfig:
        config = super().worker_config(name, *arguments, **more)
        return replace(config, mock=self._times[int(name.removeprefix("w")) % len(self._times)])


def mock_cluster(num_stages: int, *times: str, **settings: Any) -> Cluster:
    """Two layers per mock stage; all stages take the same time by default."""
    return MockCluster(
        times or (TIMES,),
        layers=(2,) * num_stages,
        mock_model=f"layers={2 * num_stages},hidden=32,vocab={VOCAB_SIZE}",
        **{"max_kv_tokens": 4096, **settings},
    )


def check(answers: Sequence[Answer]) -> None:
    """Assert that all requests succeeded with the tokens of mock stages."""
    for answer in answers:
        assert answer.error is None, answer.error
        assert answer.succeeded
        assert answer.tokens == mock_tokens(answer.case.prompt, answer.case.max_tokens, vocab_size=VOCAB_SIZE)


def has_tokens(answers: Sequence[Answer], count: int) -> bool:
    return all(len(answer.tokens) >= count for answer in answers)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
async def test_concurrent_requests_get_the_predicted_tokens(num_stages: int) -> None:
    async with mock_cluster(num_stages) as cluster:
        check(await cluster.generate_all(mixed_cases(32, max_tokens=20, prompt_lengths=(1, 8, 23, 90))))
        status = await cluster.wait_drained()
        assert [worker.device for worker in status.workers] == ["mock"] * num_stages
        assert status.requests.finished == 32


async def test_each_stage_has_times_of_its_own() -> None:
    async with mock_cluster(3, "step=0ms", "step=3ms", "token=1us") as cluster:
        check(await cluster.generate_all(mixed_cases(6)))


async def test_several_choices_are_each_complete() -> None:
    async with mock_cluster(3) as cluster:
        prompt = [3, 1, 4, 1, 5]
        completions = await cluster.client.complete(prompt, n=3, max_tokens=12, temperature=1.0, seed=5)
        expected = mock_tokens(prompt, 12, vocab_size=VOCAB_SIZE)
        assert [list(completion.token_ids) for completion in completions] == [expected] * 3
        await cluster.wait_drained()


@pytest.mark.full
async def test_cancelled_requests_free_their_blocks_and_affect_no_other() -> None:
    async with mock_cluster(3) as cluster, asyncio.TaskGroup() as tasks:
        staying = [Answer(case) for case in mixed_cases(6, max_tokens=60)]
        for answer in staying:
            tasks.create_task(cluster.generate(answer.case, answer))
        leaving = [Answer(case) for case in mixed_cases(12, max_tokens=2000, seed=1)]
        running = [tasks.create_task(cluster.generate(answer.case, answer)) for answer in leaving]
        await until(partial(has_tokens, leaving, 3))
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await until(lambda: all(answer.succeeded for answer in staying))
        check(staying)
        status = await cluster.wait_drained()
        assert (status.requests.cancelled, status.requests.failed) == (12, 0)


@pytest.mark.full
async def test_few_blocks_preempt_and_change_no_token() -> None:
    async with mock_cluster(3, max_kv_tokens=128) as cluster:
        answers = await cluster.generate_all(mixed_cases(12, max_tokens=40))
        check(answers)
        assert sum(answer.usage.restarts for answer in answers if answer.usage) > 0
        await cluster.wait_drained()


async def test_prefixes_are_shared_as_by_real_stages() -> None:
    async with mock_cluster(2) as cluster:
        case = RequestCase(prompt=tuple(range(64)), max_tokens=4)
        check([await cluster.generate(case)])
        answer = await cluster.generate(case.again())
        check([answer])
        assert answer.usage is not None
        assert answer.usage.cached_tokens == 63


@pytest.mark.full
async def test_a_worker_loss_neither_repeats_nor_loses_a_token() -> None:
    async with mock_cluster(3) as cluster:
        epoch = cluster.epoch
        async with cluster.generating(mixed_cases(8, max_tokens=60)) as answers:
            await until(partial(has_tokens, answers, 5))
            await cluster.workers["w1"].stop()
            await cluster.start_worker("w1")
        check(answers)
        assert cluster.epoch > epoch
        await cluster.wait_drained()


async def test_a_mock_step_of_an_hour_is_overdue_and_its_worker_replaced() -> None:
    async with mock_cluster(2, "step=0ms", "step=3600s") as cluster:
        async with cluster.generating(mixed_cases(3)) as answers:
            await cluster.wait_status(lambda status: status.requests.steps_in_flight > 0)
            await cluster.workers["w1"].stop()
            await cluster.start_worker("w2")
        check(answers)


@pytest.mark.full
async def test_a_damaged_frame_changes_no_token() -> None:
    async with mock_cluster(3, hop_proxies=[1]) as cluster:
        cases = mixed_cases(9, max_tokens=40)
        async with cluster.generating(cases) as answers:
            await until(partial(has_tokens, answers, 3))
            injection = cluster.proxy(1).inject(flip_byte, when=_has_slices)
        assert len(injection.steps) == 1
        check(answers)


def _has_slices(frame: Frame) -> bool:
    return bool(frame.step.slices)


WORDS = (3, 1, 4, 1, 5)


async def test_mock_stages_sample_only_what_a_request_allows() -> None:
    async with mock_cluster(3) as cluster:
        allowed = [17, 300, 301, 302]
        (limited,) = await cluster.client.complete(WORDS, max_tokens=20, allowed_token_ids=allowed)
        assert set(limited.token_ids) <= set(allowed)
        assert len(limited.token_ids) == 20
        unasked = mock_tokens(WORDS, 20, vocab_size=VOCAB_SIZE)
        banned = [unasked[0], *range(0, VOCAB_SIZE, 2)]
        (without,) = await cluster.client.complete(
            WORDS, max_tokens=20, bad_word_ids=[[token] for token in banned]
        )
        assert not set(without.token_ids) & set(banned)
        (biased,) = await cluster.client.complete(WORDS, max_tokens=5, logit_bias={9: 100.0, 10: 1.0})
        assert list(biased.token_ids) == [9] * 5
        (pair,) = await cluster.client.complete(
            WORDS, max_tokens=6, allowed_token_ids=[7, 8], bad_word_ids=[[7, 7], [8, 8]]
        )
        assert list(pair.token_ids) in ([7, 8] * 3, [8, 7] * 3)
        await cluster.wait_drained()


@pytest.mark.full
async def test_constraints_of_a_sequence_survive_its_recomputation() -> None:
    options: dict[str, Any] = {
        "allowed_token_ids": [7, 8, 9],
        "bad_word_ids": [[7, 8], [8, 9], [9, 7], [7, 7]],
    }
    async with mock_cluster(2) as cluster:
        (undisturbed,) = await cluster.client.complete(WORDS, max_tokens=400, **options)
        task = asyncio.create_task(cluster.client.complete(WORDS, max_tokens=400, **options))
        await cluster.wait_status(lambda status: status.requests.decode > 0)
        await cluster.workers["w1"].stop()
        await cluster.start_worker("w1")
        (disturbed,) = await task
        assert disturbed.usage.restarts > 0
        assert disturbed.token_ids == undisturbed.token_ids


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"logprobs": 2}, "logprobs"),
        ({"prompt_logprobs": 0, "max_tokens": 0}, "prompt_logprobs"),
        ({"repetition_penalty": 1.5, "presence_penalty": 0.5}, "repetition_penalty and presence_penalty"),
        ({"frequency_penalty": -0.5}, "frequency_penalty"),
    ],
)
async def test_options_that_need_logits_are_rejected_before_a_mock_stage(
    options: dict[str, Any], option: str
) -> None:
    async with mock_cluster(1) as cluster:
        with pytest.raises(InvalidRequest, match=f"{option}: mock stages compute no logits"):
            await cluster.client.complete([1, 2, 3], **({"max_tokens": 4} | options))
        assert (await cluster.client.status()).requests.failed == 0


async def test_a_mock_model_has_neither_text_nor_structured_output() -> None:
    async with mock_cluster(2) as cluster:
        with pytest.raises(InvalidRequest, match="structured output is not served"):
            await cluster.client.complete([1, 2, 3], max_tokens=4, regex="a+")
        with pytest.raises(InvalidRequest, match="model mock has no tokenizer: pass token_ids"):
            await cluster.client.complete("Once", max_tokens=4)


async def test_mock_stages_of_a_model_with_weights_have_no_structured_output() -> None:
    async with Cluster(None, layers=(4, 4, 4), mock=MockSpec.parse(TIMES), has_text=True) as cluster:
        with pytest.raises(InvalidRequest, match="regex: mock stages compute no logits"):
            await cluster.client.complete("Once", max_tokens=4, regex="a+")
        (completion,) = await cluster.client.complete([5, 6, 7], max_tokens=30)
        model = await cluster.client.model()
        assert list(completion.token_ids) == mock_tokens(
            [5, 6, 7], 30, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids
        )


async def test_out_of_memory_makes_steps_smaller_and_fails_no_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    times = ("step=500us", "step=500us,oom_at=40")
    async with mock_cluster(2, *times, max_step_tokens=128) as cluster:
        cases = mixed_cases(12, max_tokens=20, prompt_lengths=(90, 120))
        check(await cluster.generate_all(cases))
        status = await cluster.wait_drained()
        assert status.requests.failed == 0
        limited = r"steps are limited to (\d+) tokens and \d+ sequences, because stage 1 ran out of memory"
        found = re.search(limited, status.detail)
        assert found is not None and int(found[1]) < 40
        assert re.search(limited, caplog.text)
        await cluster.workers["w0"].stop()
        await cluster.start_worker("w2")
        await cluster.wait_status(
            lambda now: now.epoch > status.epoch and now.state == cluster_pb2.CLUSTER_STATE_SERVING
        )
        caplog.clear()
        check(await cluster.generate_all(cases))
        status = await cluster.wait_drained()
        assert re.search(limited, status.detail)
        assert "OUT_OF_MEMORY" not in caplog.text
        await cluster.workers["w1"].stop()
        await cluster.start_worker("w4")
        await cluster.wait_status(lambda now: now.epoch > status.epoch and not now.detail)


@pytest.mark.full
async def test_memory_too_small_for_one_block_fails_only_the_request() -> None:
    async with mock_cluster(1, "step=500us,oom_at=8") as cluster:
        with pytest.raises(StepFailed, match="OUT_OF_MEMORY"):
            await cluster.client.complete(list(range(64)), max_tokens=2)
        check([await cluster.generate(RequestCase(prompt=(1, 2, 3), max_tokens=4))])


async def test_every_result_has_the_times_of_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[StepResult] = []
    complete = Scheduler.complete

    def recording(scheduler: Scheduler, result: StepResult, now_s: float) -> object:
        results.append(result)
        return complete(scheduler, result, now_s)

    monkeypatch.setattr(Scheduler, "complete", recording)
    async with mock_cluster(3, "step=1ms", "step=2ms", "step=3ms") as cluster:
        check(await cluster.generate_all(mixed_cases(9)))
    computed = [result.stage_times for result in results if result.results]
    assert len(computed) > 20
    for times in computed:
        assert [stage_times.compute_us for stage_times in times] == [1000, 2000, 3000]
    assert all(len(result.stage_times) == 3 for result in results)
    # Steps wait before the slowest stage, not before the others.
    waits = [sorted(times[stage].wait_us for times in computed) for stage in range(3)]
    assert waits[2][-1] > 0


async def test_a_step_of_records_only_takes_a_mock_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[StepResult] = []
    complete = Scheduler.complete
    monkeypatch.setattr(
        Scheduler,
        "complete",
        lambda scheduler, result, now_s: results.append(result) or complete(scheduler, result, now_s),
    )
    async with mock_cluster(2, "step=2ms") as cluster:
        check([await cluster.generate(RequestCase(prompt=(1, 2), max_tokens=3))])
        await cluster.wait_drained()
    last = results[-1]
    assert last.results == ()
    assert [times.compute_us for times in last.stage_times] == [0] * len(last.stage_times)


@pytest.mark.parametrize(
    ("model", "has_mocks", "reason"),
    [
        ("layers=2", True, "expected a mock stage, for a mock model, got a real stage"),
        (None, True, "expected a mock stage, as worker w0 is, got a real stage"),
        (None, False, "expected a real stage, as worker w0 is, got a mock stage"),
    ],
)
async def test_mock_and_real_stages_are_never_in_one_cluster(
    model: str | None, has_mocks: bool, reason: str
) -> None:
    layers = (1, 1) if model else (6, 6)
    mock = MockSpec.parse(TIMES) if has_mocks else None
    async with Cluster(
        None, layers=layers, mock=mock, mock_model=model, num_workers=1, waits=False
    ) as cluster:
        await cluster.wait_status(lambda status: len(status.workers) == 1)
        stranger = Worker(_config(cluster.address, None if has_mocks else MockSpec()))
        await stranger.start()
        try:
            async with asyncio.timeout(DEADLINE_S):
                with pytest.raises(JoinRefused, match=reason):
                    await stranger.run()
        finally:
            await stranger.stop()
        assert [worker.name for worker in (await cluster.client.status()).workers] == ["w0"]


def _config(coordinator: str, mock: MockSpec | None) -> WorkerConfig:
    return WorkerConfig(
        coordinator=coordinator,
        device="cpu",
        memory_bytes=1 << 30,
        name="stranger",
        listen="127.0.0.1:0",
        advertise=None,
        model_directory=None,
        num_threads=None,
        mock=mock,
    )


async def test_status_marks_mock_workers() -> None:
    async with mock_cluster(2) as cluster:
        status = await cluster.wait_state(cluster_pb2.CLUSTER_STATE_SERVING)
        assert (status.model, status.num_stages) == ("mock", 2)
        assert all(worker.device == "mock" for worker in status.workers)
        assert all((worker.weight_bytes, worker.kv_bytes) == (0, 0) for worker in status.workers)
        assert (await cluster.client.model()).name == "mock"
