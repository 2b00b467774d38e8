"""The Responses API by the `openai` package for Python, at two gateways of one coordinator."""

from __future__ import annotations

from pathlib import Path

from stageline import Client
from tests.clients.harness import MARKS, Served, check_client

pytestmark = MARKS

STORY = [{"role": "user", "content": "Tell me a story."}]


async def test_responses_of_the_openai_package(served: Served, tmp_path: Path) -> None:
    async with Client(served.coordinator) as client:
        [completion] = await client.complete(STORY, temperature=0, max_tokens=24, logprobs=0)
    expected = {
        "text": completion.text,
        "completion_tokens": completion.usage.completion_tokens,
        "logprobs": [row.logprob for row in completion.logprobs or ()],
    }
    facts = {"expected": expected, "other_url": served.other_url}
    await check_client("openai", "openai_responses.py", served, tmp_path, **facts)
