"""Concurrent requests generate the same tokens as alone."""

from __future__ import annotations

import asyncio

import pytest

from stageline import Client, FinishReason, GenerateOutput
from tests.e2e.clusters import Served, is_idle, random_prompt, tokens_of, wait_for_status

pytestmark = pytest.mark.asyncio(loop_scope="package")

NUM_TOKENS = 12


@pytest.mark.matrix(1)
@pytest.mark.parametrize("num_requests", [1, 4, 16, 64])
async def test_each_of_many_requests_equals_its_solo_run(served: Served, num_requests: int) -> None:
    # Lengths from one token to more than a chunk, and no prompt cached by an earlier test.
    prompts = [random_prompt(1 + 5 * i % 97, seed=num_requests + i) for i in range(num_requests)]
    async with Client(served.address) as client:
        together = await asyncio.gather(*(tokens_of(client, prompt, NUM_TOKENS) for prompt in prompts))
        alone = [await tokens_of(client, prompt, NUM_TOKENS) for prompt in prompts]
    assert together == alone
    assert len(set(map(tuple, alone))) == num_requests
    await wait_for_status(served.address, is_idle)


async def test_a_repeated_prompt_is_served_from_the_cache(served: Served) -> None:
    prompt = random_prompt(50, seed=1)
    async with Client(served.address) as client:
        first, second = [await _last_and_tokens(client, prompt) for _ in range(2)]
    assert second[1] == first[1]
    assert first[0].usage is not None
    assert second[0].usage is not None
    assert first[0].usage.cached_tokens == 0
    assert second[0].usage.cached_tokens == 48, "all full blocks of 16 in 50 tokens"
    assert second[0].finish_reason is FinishReason.LENGTH


async def test_a_seed_reproduces_its_tokens_in_any_batch(served: Served) -> None:
    prompt = random_prompt(9, seed=2)
    hot = {"temperature": 2.0, "top_k": 50, "top_p": 0.95}
    async with Client(served.address) as client:
        first = await tokens_of(client, prompt, 32, seed=11, **hot)
        again = await tokens_of(client, prompt, 32, seed=11, **hot)
        other_seed = await tokens_of(client, prompt, 32, seed=12, **hot)
        crowd = [tokens_of(client, random_prompt(3 + i), 40, seed=i, **hot) for i in range(12)]
        beside, *_ = await asyncio.gather(tokens_of(client, prompt, 32, seed=11, **hot), *crowd)
    assert first == again == beside
    assert other_seed != first


async def test_a_generated_seed_is_returned_and_reproduces_the_tokens(served: Served) -> None:
    prompt = random_prompt(5, seed=3)
    async with Client(served.address) as client:
        last, tokens = await _last_and_tokens(client, prompt, temperature=3.0)
        assert last.usage is not None
        assert await tokens_of(client, prompt, NUM_TOKENS, temperature=3.0, seed=last.usage.seed) == tokens


async def _last_and_tokens(
    client: Client, prompt: list[int], temperature: float | None = None
) -> tuple[GenerateOutput, list[int]]:
    tokens: list[int] = []
    outputs = client.generate(prompt, max_tokens=NUM_TOKENS, temperature=temperature)
    async for output in outputs:
        tokens += output.token_ids
    return output, tokens
