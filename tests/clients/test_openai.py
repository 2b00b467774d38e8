"""The `openai` package for Python gets from a gateway what the gRPC client gets from the coordinator."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from deploy import LocalCluster, LocalClusterConfig
from stageline import Client
from tests.e2e.clusters import START_TIMEOUT_S
from tests.e2e.commands import ENVIRONMENT, Shell
from tests.fake_processes import ROOT

pytestmark = pytest.mark.clients

PYTHON = ROOT / ".venv" / "clients" / "bin" / "python"
CHECKS = ROOT / "tests" / "clients" / "openai_python.py"
STORY = [{"role": "user", "content": "Tell me a story."}]
SAMPLED = {"seed": 7, "temperature": 0.8, "max_tokens": 24}
GREEDY = {"temperature": 0, "max_tokens": 24}
"""Of each case: whether it is a chat, arguments of both clients, and those that they call differently."""


async def test_answers_equal_those_of_the_grpc_client(tmp_path: Path) -> None:
    config = LocalClusterConfig(num_workers=2, environment=ENVIRONMENT, log_directory=tmp_path)
    async with LocalCluster(config) as cluster, Shell(tmp_path) as shell:
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        gateway = await shell.start(
            "gateway", "gateway", "--coordinator", cluster.address, "--listen", "127.0.0.1:0"
        )
        address = await gateway.listening_address(timeout_s=60)
        async with Client(cluster.address) as client:
            cases = [await _case(client, *case) for case in CASES]
            model = (await client.model()).name
        written = tmp_path / "cases.json"
        written.write_text(json.dumps({"model": model, "cases": cases}))
        checks = await asyncio.create_subprocess_exec(PYTHON, CHECKS, f"http://{address}/", written)
        assert await checks.wait() == 0


CASES: tuple[tuple[str, Any, dict[str, Any], dict[str, Any], dict[str, Any]], ...] = (
    ("greedy completion", "Once upon a time", GREEDY, {}, {}),
    ("sampled completion", "Once upon a time", SAMPLED, {}, {}),
    ("three sampled choices", "Once upon a time", {**SAMPLED, "n": 3}, {}, {}),
    ("completion with logprobs", "The bird", {**GREEDY, "logprobs": 2}, {}, {}),
    ("echo with logprobs", "The bird", {**GREEDY, "logprobs": 1, "echo": True}, {}, {}),
    ("token ids", [387, 389, 272], SAMPLED, {}, {}),
    (
        "penalties and filters",
        "Once",
        {**SAMPLED, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"extra_body": {"top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1, "return_token_ids": True}},
        {"top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1},
    ),
    ("chat", STORY, GREEDY, {}, {}),
    ("three chats", STORY, {**SAMPLED, "n": 3}, {}, {}),
    (
        "chat with logprobs",
        STORY,
        GREEDY,
        {"logprobs": True, "top_logprobs": 2},
        {"logprobs": 2},
    ),
)


async def _case(
    client: Client, name: str, prompt: Any, both: dict[str, Any], openai: dict[str, Any], grpc: dict[str, Any]
) -> dict[str, Any]:
    is_chat = prompt is STORY
    completions = await client.complete(prompt, **both, **grpc)
    return {
        "name": name,
        "is_chat": is_chat,
        "arguments": {"messages" if is_chat else "prompt": prompt, **both, **openai},
        "expected": [
            {
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
                "completion_tokens": completion.usage.completion_tokens,
                "logprobs": [row.logprob for row in completion.logprobs or ()],
            }
            for completion in completions
        ],
    }
