"""Command lines that conflict with a running cluster are rejected in one line with an exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.clusters import Served
from tests.e2e.commands import run_stageline

pytestmark = pytest.mark.asyncio(loop_scope="package")


@pytest.mark.full
async def test_a_port_in_use_is_rejected(served: Served, tmp_path: Path) -> None:
    commands: tuple[tuple[str, ...], ...] = (
        ("coordinator", "--stages", "1", "--listen", served.address, "--no-http"),
        ("worker", "--coordinator", served.address, "--listen", served.address),
        ("up", "--workers", "1", "--listen", served.address),
    )
    for command in commands:
        run = await run_stageline(*command, TMPDIR=str(tmp_path))
        assert run.code == 1
        assert f"cannot listen on {served.address}: Address already in use" in run.stderr
        assert "Traceback" not in run.stderr
        if command[0] != "up":
            run.the_error()


@pytest.mark.full
async def test_text_and_chat_are_rejected_for_a_model_without_a_tokenizer(served: Served) -> None:
    text = await run_stageline("generate", "hello", "--coordinator", served.address)
    assert text.code == 1
    assert "has no tokenizer (tokenizer.json): give token ids with --token-ids" in text.the_error()
    chat = await run_stageline("chat", "--coordinator", served.address, stdin="hello\n")
    assert chat.code == 1
    assert "has no tokenizer (tokenizer.json), which a chat needs" in chat.the_error()
    long = await run_stageline(
        "generate", "--token-ids", "1,2", "--max-tokens", "1000000000", "--coordinator", served.address
    )
    assert long.code == 1
    assert "1000000002 tokens, more than the 4096 that fit" in long.the_error()
    outside = await run_stageline("generate", "--token-ids", "1,128", "--coordinator", served.address)
    assert outside.code == 1
    assert "token id 128 is outside the vocabulary [0, 128)" in outside.the_error()
