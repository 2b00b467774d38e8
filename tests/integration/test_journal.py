"""A coordinator that crashes, and one that restores its requests from the journal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stageline.client.errors import Unavailable
from stageline.client.output import Completion, Completions, GenerateOutput
from stageline_rpc.v1 import cluster_pb2
from tests.integration.calls import SECRET
from tests.integration.cluster import DEADLINE_S, TEST_POLICY, Cluster
from tests.unit.coordinator.journal.journals import crashed
from wire.ids import id_text, new_request_id

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CASES: Mapping[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7},
    "several choices": {"temperature": 1.0, "seed": 8, "n": 3},
    "log-probabilities": {"logprobs": 3, "prompt_logprobs": 2},
    "an echo with log-probabilities": {"echo": True, "logprobs": 1, "temperature": 1.0, "seed": 9},
    "a stop string": {"stop": ["race"], "temperature": 0.7, "seed": 10},
    "bad words": {"bad_words": ["was", "girl"], "repetition_penalty": 1.3},
    "a JSON schema": {"json_schema": SCHEMA, "temperature": 1.0, "seed": 1},
    "a detached request": {"on_disconnect": "detach", "priority": "high"},
}
PROMPT = "Once upon a time, there was"
NUM_TOKENS = 48


class RestoredRequest:
    """Output of one request over both coordinators."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.request_id = id_text(new_request_id())
        self.positions: dict[int, int] = {}
        self.completions = Completions()
        self._options = options
        self._is_whole = False

    def begin(self, cluster: Cluster) -> AsyncGenerator[GenerateOutput, None]:
        return cluster.client.generate(
            PROMPT,
            max_tokens=NUM_TOKENS,
            request_id=self.request_id,
            attach_secret=SECRET,
            timeout_s=DEADLINE_S,
            **self._options,
        )

    def take(self, output: GenerateOutput) -> None:
        self.completions.add(output)
        end = output.first_token_index + len(output.token_ids)
        self.positions[output.choice] = end

    async def read_some(self, cluster: Cluster, stack: AsyncExitStack) -> None:
        """Read a few messages; the call stays open."""
        outputs = await stack.enter_async_context(aclosing(self.begin(cluster)))
        for _ in range(6):
            self.take(await anext(outputs))

    async def read_rest(self, cluster: Cluster) -> list[Completion]:
        attached = cluster.client.attach(
            self.request_id, secret=SECRET, positions=self.positions, timeout_s=DEADLINE_S
        )
        async with aclosing(attached) as outputs:
            async for output in outputs:
                self.take(output)
        return self.completions.in_order()


def new_cluster(journal: Path | None) -> Cluster:
    return Cluster(None, layers=(6, 6), has_text=True, max_kv_tokens=4096, journal=journal)


async def undisturbed(cluster: Cluster, options: dict[str, Any]) -> list[Completion]:
    restored = RestoredRequest(options)
    async for output in restored.begin(cluster):
        restored.take(output)
    return restored.completions.in_order()


@pytest.mark.full
async def test_clients_that_reattach_get_the_output_of_an_undisturbed_run(tmp_path: Path) -> None:
    requests = {name: RestoredRequest(options) for name, options in CASES.items()}
    async with new_cluster(tmp_path / "j.db") as first:
        alone = {name: await undisturbed(first, options) for name, options in CASES.items()}
        epoch = first.epoch
        async with AsyncExitStack() as stack:
            await asyncio.gather(*(restored.read_some(first, stack) for restored in requests.values()))
            journal = crashed(tmp_path / "j.db", tmp_path / "after")
    async with new_cluster(journal) as second:
        assert second.epoch > epoch
        wholes = await asyncio.gather(*(restored.read_rest(second) for restored in requests.values()))
        status = await second.wait_drained()
        assert (status.requests.failed, status.requests.cancelled, status.requests.orphaned) == (0, 0, 0)
    for name, whole in zip(requests, wholes, strict=True):
        assert_same(whole, alone[name])


def assert_same(got: list[Completion], expected: list[Completion]) -> None:
    assert len(got) == len(expected)
    for completion, wanted in zip(got, expected, strict=True):
        assert (completion.token_ids, completion.text, completion.finish_reason) == (
            wanted.token_ids,
            wanted.text,
            wanted.finish_reason,
        )
        for mine, theirs in (
            (completion.logprobs, wanted.logprobs),
            (completion.prompt_logprobs, wanted.prompt_logprobs),
        ):
            assert [token.token_id for token in mine or ()] == [token.token_id for token in theirs or ()]
            assert [token.logprob or 0.0 for token in mine or ()] == pytest.approx(
                [token.logprob or 0.0 for token in theirs or ()], abs=1e-3
            )


@pytest.mark.full
async def test_a_generated_seed_survives_a_restart(tmp_path: Path) -> None:
    restored = RestoredRequest({"temperature": 1.0})
    async with new_cluster(tmp_path / "j.db") as first, AsyncExitStack() as stack:
        await restored.read_some(first, stack)
        journal = crashed(tmp_path / "j.db", tmp_path / "after")
    async with new_cluster(journal) as second:
        [whole] = await restored.read_rest(second)
        assert whole.usage is not None
        [again] = await undisturbed(second, {"temperature": 1.0, "seed": whole.usage.seed})
    assert whole.token_ids == again.token_ids


@pytest.mark.full
async def test_requests_restored_without_workers_wait_and_then_fail(tmp_path: Path) -> None:
    restored = RestoredRequest({})
    async with new_cluster(tmp_path / "j.db") as first, AsyncExitStack() as stack:
        await restored.read_some(first, stack)
        journal = crashed(tmp_path / "j.db", tmp_path / "after")
    policy = replace(TEST_POLICY, recovery_timeout_s=10.0)
    second = Cluster(
        None, layers=(6, 6), num_workers=0, waits=False, has_text=True, journal=journal, policy=policy
    )
    async with second:
        status = await second.wait_status(lambda status: status.requests.failed == 1)
        assert status.requests.waiting == 0
        with pytest.raises(
            Unavailable, match="no pipeline within 10 s: 0 of 2 workers joined; layers 0-5 need"
        ):
            await restored.read_rest(second)


@pytest.mark.full
async def test_a_restarted_coordinator_serves_with_fewer_workers(tmp_path: Path) -> None:
    """Two of three workers remain and serve as after a loss; health reports it."""
    restored = RestoredRequest({})
    fast = replace(TEST_POLICY, rejoin_grace_s=0.05)
    layers = (4, 4, 4)
    first = Cluster(None, layers=layers, has_text=True, journal=tmp_path / "j.db", policy=fast)
    async with first, AsyncExitStack() as stack:
        await restored.read_some(first, stack)
        journal = crashed(tmp_path / "j.db", tmp_path / "after")
    second = Cluster(
        None, layers=layers, num_workers=2, waits=False, has_text=True, journal=journal, policy=fast
    )
    async with second:
        assert (await second.client.status()).health == cluster_pb2.HEALTH_DEGRADED
        [whole] = await restored.read_rest(second)
        assert whole.usage is not None and whole.usage.completion_tokens == NUM_TOKENS
        status = await second.client.status()
        assert (status.health, status.requests.failed) == (cluster_pb2.HEALTH_SERVING, 0)
