"""The `anthropic` package."""

from __future__ import annotations

from pathlib import Path

from stageline import Client
from tests.clients.harness import MARKS, Served, check_client

pytestmark = MARKS

STORY = [{"role": "user", "content": "Tell me a story."}]


async def test_messages_of_the_anthropic_package(served: Served, tmp_path: Path) -> None:
    async with Client(served.coordinator) as client:
        [completion] = await client.complete(STORY, temperature=0, max_tokens=24)
    facts = {"text": completion.text, "completion_tokens": completion.usage.completion_tokens}
    await check_client("anthropic", "anthropic_messages.py", served, tmp_path, **facts)
