"""Several choices of one prompt, and none at all."""

import asyncio
from pathlib import Path

import pytest

from tests.integration.calls import LENGTH, STOP, Caller, Received, StatusCode, again, message, message_of
from tests.integration.cluster import Cluster
from tests.integration.request_cases import SoloRuns, mixed_cases

LAYERS = (1, 1, 1)
PROMPT = tuple(index * 7 % 128 for index in range(21))
"""Two blocks of 8 and a tail of 5."""


@pytest.fixture(scope="module")
def solo(varied_llama: Path) -> SoloRuns:
    return SoloRuns(varied_llama)


def tokens_of(received: Received) -> list[list[int]]:
    """Tokens per choice."""
    return [choice.tokens for _, choice in sorted(received.choices.items())]


async def test_choices_differ_and_do_not_depend_on_the_batch(varied_llama: Path, solo: SoloRuns) -> None:
    request = message(PROMPT, 12, seed=3, n=4)
    async with (
        Cluster(varied_llama, layers=LAYERS, max_kv_tokens=4096) as cluster,
        Caller(cluster.address) as caller,
    ):
        alone = await caller.run(request)
        choices = tokens_of(alone)
        assert [len(tokens) for tokens in choices] == [12] * 4
        assert len(set(map(tuple, choices))) == 4
        # Fewer choices are a prefix of more choices; other requests change nothing.
        async with cluster.generating(mixed_cases(6)) as others:
            fewer = [again(request) for _ in range(3)]
            for num_choices, variant in enumerate(fewer, 1):
                variant.sampling.n = num_choices
            received = await asyncio.gather(*map(caller.run, [again(request), *fewer]))
        assert [tokens_of(completion) for completion in received] == [
            choices,
            choices[:1],
            choices[:2],
            choices[:3],
        ]
        solo.check(others)
        assert {choice.usage.seed for choice in alone.choices.values()} == {3}
        status = await cluster.wait_drained()
        # Requests are counted, not choices.
        assert status.requests.finished == 1 + 4 + 6


async def test_a_generated_seed_is_returned_and_applies_to_all_choices(
    varied_llama: Path,
) -> None:
    async with Cluster(varied_llama, layers=LAYERS) as cluster, Caller(cluster.address) as caller:
        unseeded = await caller.run(message(PROMPT, 12, temperature=1.0, n=3))
        (seed,) = {choice.usage.seed for choice in unseeded.choices.values()}
        seeded = await caller.run(message(PROMPT, 12, seed=seed, n=3))
        assert tokens_of(seeded) == tokens_of(unseeded)


async def test_choices_share_the_blocks_of_the_prompt(varied_llama: Path) -> None:
    async with Cluster(varied_llama, layers=LAYERS) as cluster, Caller(cluster.address) as caller:
        received = await caller.run(message(PROMPT, 12, seed=3, n=4))
        usages = [choice.usage for _, choice in sorted(received.choices.items())]
        assert [usage.prompt_tokens for usage in usages] == [21] * 4
        assert [usage.cached_tokens for usage in usages] == [0, 16, 16, 16]
        requests = (await cluster.wait_drained()).requests
        assert (requests.prompt_tokens, requests.cached_tokens) == (4 * 21, 3 * 16)


async def test_choices_that_end_in_the_same_step_have_all_their_tokens(
    varied_llama: Path, solo: SoloRuns
) -> None:
    # More choices than steps in flight: each step has several.
    (case,) = mixed_cases(1, max_tokens=12)
    async with Cluster(varied_llama, layers=LAYERS) as cluster, Caller(cluster.address) as caller:
        received = await caller.run(message_of(case, n=8))
        assert tokens_of(received) == [solo.tokens(case)] * 8
        assert {choice.finish_reason for choice in received.choices.values()} == {LENGTH}
        # Also when they stop at the same token.
        stops = solo.tokens(case)[:6]
        stopped = await caller.run(message(case.prompt, 12, n=8, stop_token_ids=stops[5:]))
        end = stops.index(stops[5]) + 1
        assert tokens_of(stopped) == [stops[:end]] * 8
        assert {choice.finish_reason for choice in stopped.choices.values()} == {STOP}
        assert (await cluster.wait_drained()).requests.finished == 2


@pytest.mark.full
async def test_choices_are_preempted_one_by_one(varied_llama: Path) -> None:
    request = message(PROMPT, 40, seed=3, n=6)
    async with Cluster(varied_llama, layers=LAYERS) as cluster, Caller(cluster.address) as caller:
        undisturbed = await caller.run(request)
    async with (
        Cluster(varied_llama, layers=LAYERS, max_kv_tokens=128) as cluster,
        Caller(cluster.address) as caller,
    ):
        crowded = await caller.run(again(request))
        assert tokens_of(crowded) == tokens_of(undisturbed)
        assert sum(choice.usage.restarts for choice in crowded.choices.values()) > 0
        await cluster.wait_drained()


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_without_tokens_to_generate_the_prompt_is_computed_and_counted(
    varied_llama: Path, num_choices: int
) -> None:
    async with Cluster(varied_llama, layers=LAYERS) as cluster, Caller(cluster.address) as caller:
        reader = caller.generate(message(PROMPT, 0, n=num_choices))
        assert await reader.end() is StatusCode.OK
        assert reader.num_messages == num_choices
        assert reader.received.outputs == [([], "", LENGTH)] * num_choices
        usage = reader.received.choices[0].usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (21, 0, 0)
        # The prompt is cached now.
        after = await caller.run(message(PROMPT, 5))
        assert after.choices[0].usage.cached_tokens == 16
        echoed = await caller.run(message(PROMPT, 0, n=num_choices, echo=True))
        assert tokens_of(echoed) == [list(PROMPT)] * num_choices
        assert (await cluster.wait_drained()).requests.finished == 3
