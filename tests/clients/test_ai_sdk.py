"""The AI SDK for Node with its default provider, which speaks Responses and refers to stored items."""

from __future__ import annotations

from pathlib import Path

from tests.clients.harness import MARKS, Served, run_node, write_facts
from tests.clients.scripted import ANSWER_TEXT, TEXT

pytestmark = MARKS


async def test_two_turns_with_tools(scripted: Served, tmp_path: Path) -> None:
    facts = {"model": scripted.model, "answer": ANSWER_TEXT, "text": TEXT.format("weather")}
    print(await run_node("ai_sdk", "ai_sdk.mjs", tmp_path, scripted.url, write_facts(tmp_path, facts)))
