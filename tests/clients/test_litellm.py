"""The `litellm` package."""

from __future__ import annotations

from pathlib import Path

from tests.clients.harness import MARKS, Served, check_client

pytestmark = MARKS


async def test_chats_completions_and_errors(served: Served, tmp_path: Path) -> None:
    await check_client("litellm", "litellm_chat.py", served, tmp_path)
