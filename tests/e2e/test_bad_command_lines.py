"""What a user gets wrong is told in one line, with an exit code, and no traceback."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest

from tests.e2e.clusters import Served, make_checkpoint
from tests.e2e.commands import Finished, run_stageline

pytestmark = pytest.mark.asyncio(loop_scope="package")

BAD_USAGE = {
    "coordinator --stages 0": "0 is not in the range",
    "coordinator --stages 2 --layers 1,2,3": "layers 1,2,3 are for 3 stages, but there are 2",
    "coordinator --stages 1 --listen here": "'here' is not HOST:PORT",
    "coordinator --stages 1 --model /no/such/model": "'/no/such/model' does not exist",
    "coordinator --stages 1 --dtype int8": "dtype 'int8' is none of bf16, f16, f32",
    "coordinator": "Missing option '--stages'",
    "worker --coordinator 127.0.0.1:0": "port 0",
    "worker --memory much": "'much'",
    "worker --device tpu": "device 'tpu'",
    "worker --name a/b": "name 'a/b'",
    "worker --model /no/such/model": "'/no/such/model' does not exist",
    "worker --threads 0": "0 is not in the range",
    "generate": "Missing argument 'PROMPT'",
    "generate --token-ids 1,x": "'1,x' is not a list of token ids",
    "generate hello --temperature -1": "-1.0 is not in the range",
    "plan --workers": "requires an argument",
    "up --workers 2 --device cuda:0": "2 workers share cuda:0: say with --memory",
    "launch": "No such command 'launch'",
}


async def _run_all(lines: list[str]) -> list[Finished]:
    # Two at a time: each takes its time to start, not to fail.
    slots = asyncio.Semaphore(2)

    async def run(line: str) -> Finished:
        async with slots:
            return await run_stageline(*line.split())

    return await asyncio.gather(*(run(line) for line in lines))


async def test_bad_flags_are_refused_with_exit_code_2() -> None:
    finished = await _run_all(list(BAD_USAGE))
    for (line, text), run in zip(BAD_USAGE.items(), finished, strict=True):
        assert run.code == 2, line
        assert text in run.the_error(), line


async def test_a_client_without_a_coordinator_says_so_soon(free_address: str) -> None:
    start = time.monotonic()
    for command in (("status",), ("generate", "hello"), ("chat",)):
        run = await run_stageline(*command, "--coordinator", free_address)
        assert run.code == 1
        assert f"no coordinator at {free_address}" in run.the_error()
    assert time.monotonic() - start < 25


async def test_a_port_in_use_is_refused(served: Served) -> None:
    for command in (
        ("coordinator", "--stages", "1", "--listen", served.address),
        ("worker", "--coordinator", served.address, "--listen", served.address),
        ("up", "--workers", "1", "--listen", served.address),
    ):
        run = await run_stageline(*command)
        assert run.code == 1
        assert f"cannot listen on {served.address}: the port is in use" in run.stderr
        assert "Traceback" not in run.stderr
        if command[0] != "up":
            run.the_error()


async def test_a_folder_that_is_no_checkpoint_is_refused_by_what_is_missing(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    pickled = make_checkpoint(tmp_path / "pickled", "llama", num_layers=1)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    for directory, text in ((empty, "config.json"), (pickled, "safetensors")):
        run = await run_stageline("coordinator", "--stages", "1", "--model", str(directory))
        assert run.code == 1
        assert text in run.the_error()
        assert str(directory) in run.the_error()


async def test_text_and_chat_are_refused_for_a_model_without_a_tokenizer(served: Served) -> None:
    text = await run_stageline("generate", "hello", "--coordinator", served.address)
    assert text.code == 1
    assert re.search("model .* has no tokenizer: give token ids with --token-ids", text.the_error())
    chat = await run_stageline("chat", "--coordinator", served.address, stdin="hello\n")
    assert chat.code == 1
    assert "has no chat template; use `stageline generate`" in chat.the_error()
    long = await run_stageline(
        "generate", "--token-ids", "1,2", "--max-tokens", "1000000000", "--coordinator", served.address
    )
    assert long.code == 1
    assert "1000000002 tokens, more than the 4096 that fit" in long.the_error()
    outside = await run_stageline("generate", "--token-ids", "1,128", "--coordinator", served.address)
    assert outside.code == 1
    assert "token id 128 is outside the vocabulary [0, 128)" in outside.the_error()
