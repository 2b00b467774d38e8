"""Token ids, texts and usage that the Python client gets from a coordinator."""

from __future__ import annotations

import pytest

from builtin_model import MODEL_DIRECTORY
from stageline import InvalidRequest
from tests.integration.cluster import Cluster
from text.tokenizer import load_text_codec

PROMPT = "Once upon a time"
QUESTION = [{"role": "user", "content": "Tell me a story."}]


async def test_a_client_gets_the_ids_and_the_times_of_what_it_generates() -> None:
    codec = load_text_codec(MODEL_DIRECTORY)
    async with Cluster(None, layers=(12,), has_text=True) as cluster:
        client = cluster.client
        ids = await client.tokenize(PROMPT)
        assert ids == codec.encode(PROMPT)
        (echoed,) = await client.complete(PROMPT, max_tokens=3, echo=True)
        assert echoed.token_ids[: len(ids)] == ids
        usage = echoed.usage
        assert usage.queue_time_s is not None and usage.first_token_time_s is not None
        assert 0 <= usage.queue_time_s < usage.first_token_time_s
        assert usage.decode_time_s is not None and usage.decode_time_s > 0
        (scored,) = await client.complete(PROMPT, max_tokens=0, prompt_logprobs=0)
        assert scored.usage.queue_time_s is not None
        assert (scored.usage.first_token_time_s, scored.usage.decode_time_s) == (None, None)


async def test_a_client_gets_the_text_of_ids() -> None:
    codec = load_text_codec(MODEL_DIRECTORY)
    async with Cluster(None, layers=(12,), has_text=True) as cluster:
        client = cluster.client
        ids = await client.tokenize(QUESTION)
        (asked,) = await client.complete(QUESTION, max_tokens=1)
        assert len(ids) == asked.usage.prompt_tokens
        for skips in (True, False):
            expected = codec.decode(ids, skip_special_tokens=skips)
            assert await client.detokenize(ids, skip_special_tokens=skips) == expected
        assert "Tell me a story." in await client.detokenize(ids)
        with pytest.raises(InvalidRequest, match="outside the vocabulary"):
            await client.detokenize([1 << 30])


async def test_a_model_without_a_tokenizer_has_neither() -> None:
    async with Cluster(None, layers=(12,)) as cluster:
        with pytest.raises(InvalidRequest, match="has no tokenizer"):
            await cluster.client.tokenize(PROMPT)
        with pytest.raises(InvalidRequest, match="has no tokenizer"):
            await cluster.client.detokenize([1, 2])
