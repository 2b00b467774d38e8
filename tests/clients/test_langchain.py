"""The `langchain-openai` package."""

from __future__ import annotations

from pathlib import Path

from tests.clients.harness import MARKS, Served, check_client

pytestmark = MARKS


async def test_structured_output_tools_and_streams(served: Served, tmp_path: Path) -> None:
    await check_client("langchain", "langchain_chat.py", served, tmp_path)
