"""Prefix cache as seen by clients: cached, read and reported blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stageline_rpc.v1 import cluster_pb2_grpc, kv_events_pb2
from tests.integration.cluster import Cluster
from tests.integration.test_kv_events import Router
from wire.transport import PLAIN

LAYERS = (1, 2)
PREFIX = list(range(1, 65))


def new_cluster(directory: Path, **settings: Any) -> Cluster:
    return Cluster(directory, layers=LAYERS, block_size=16, max_kv_tokens=12 * 16, **settings)


async def cached_tokens(cluster: Cluster, prompt: list[int], **options: Any) -> int:
    (completion,) = await cluster.client.complete(prompt, max_tokens=1, **options)
    return completion.usage.cached_tokens


async def scores(cluster: Cluster, prompt: list[int], **options: Any) -> list[float]:
    (completion,) = await cluster.client.complete(prompt, max_tokens=1, prompt_logprobs=0, **options)
    assert completion.usage.cached_tokens == 0
    assert completion.prompt_logprobs is not None
    return [token.logprob for token in completion.prompt_logprobs]


async def test_scored_prompts_share_their_blocks_and_are_computed_in_full(tiny_llama: Path) -> None:
    async with new_cluster(tiny_llama) as cluster:
        await cached_tokens(cluster, [*PREFIX, 1])
        prompts = [[*PREFIX, *[number] * 17] for number in range(2, 8)]
        with_cache = [await scores(cluster, prompt) for prompt in prompts]
        assert await cached_tokens(cluster, [*PREFIX, 9]) == 64
        assert await cached_tokens(cluster, PREFIX) == 63
        # Blocks of a scored prompt serve other requests, too.
        assert await cached_tokens(cluster, [*prompts[-1][:80], 9]) == 80
        for prompt, scored in zip(prompts[::3], with_cache[::3], strict=True):
            assert scored == pytest.approx(await scores(cluster, prompt, prefix_cache=False), abs=1e-5)


async def test_a_request_without_prefix_cache_neither_reads_nor_caches_blocks(tiny_llama: Path) -> None:
    async with new_cluster(tiny_llama) as cluster, PLAIN.channel(cluster.address) as channel:
        call = cluster_pb2_grpc.ClusterStub(channel).WatchKvEvents(
            kv_events_pb2.WatchKvEventsRequest(with_token_ids=True)
        )
        router = Router(call)
        await router.read_snapshot()
        await cached_tokens(cluster, PREFIX, prefix_cache=False)
        assert await cached_tokens(cluster, [*PREFIX, 1]) == 0
        for _ in range(3):
            assert await cached_tokens(cluster, [*PREFIX, 1], prefix_cache=False) == 0
        assert await cached_tokens(cluster, [*PREFIX, 1]) == 64
        status = await cluster.wait_drained()
        assert status.kv.prefix_cache
        assert [worker.kv.blocks_inactive for worker in status.workers] == [4, 4]
        await router.read_until(cluster.server.engine.kv_events.subscribe().snapshot.next_event_id)
        assert len(router.cached) == 4
        assert router.token_ids == PREFIX


async def test_a_coordinator_without_prefix_cache_shares_nothing(tiny_llama: Path) -> None:
    async with new_cluster(tiny_llama, prefix_cache=False) as cluster:
        assert [await cached_tokens(cluster, [*PREFIX, 1]) for _ in range(2)] == [0, 0]
        # A request cannot enable it if the coordinator has none.
        assert await cached_tokens(cluster, [*PREFIX, 1], prefix_cache=True) == 0
        status = await cluster.wait_drained()
        assert not status.kv.prefix_cache
        assert [worker.kv.blocks_inactive for worker in status.workers] == [0, 0]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("num_output_tokens", [15, 16, 17, 18])
async def test_a_second_turn_hits_every_block_of_the_first(tiny_llama: Path, num_output_tokens: int) -> None:
    async with new_cluster(tiny_llama) as cluster:
        prompt = PREFIX[:16]
        (first,) = await cluster.client.complete(prompt, max_tokens=num_output_tokens, ignore_eos=True)
        num_computed = len(prompt) + num_output_tokens - 1  # the last token was sampled, not computed
        second = [*prompt, *first.token_ids, 5, 6, 7]
        assert await cached_tokens(cluster, second) == num_computed // 16 * 16
