"""LiteLLM's proxy in front of a gateway: answers, streams, and token counts that are the gateway's own."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from httpx2 import AsyncClient, HTTPError

from tests.clients.harness import MARKS, PROGRAM_TIMEOUT_S, Served, command_of
from tests.ports import unused_address

pytestmark = MARKS

STORY = [{"role": "user", "content": "Tell me a story."}]
PROVIDERS = ("openai", "anthropic")


@asynccontextmanager
async def proxy(served: Served, directory: Path) -> AsyncIterator[AsyncClient]:
    """Run the proxy with one model per provider."""
    bases = {"openai": f"{served.url}v1", "anthropic": served.url.rstrip("/")}
    models = [
        {
            "model_name": provider,
            "litellm_params": {
                "model": f"{provider}/{served.model}",
                "api_base": bases[provider],
                "api_key": "unused",
            },
        }
        for provider in PROVIDERS
    ]
    config = directory / "proxy.json"  # which is YAML, too
    config.write_text(json.dumps({"model_list": models}))
    key = f"sk-{secrets.token_hex(24)}"
    host, _, port = unused_address().rpartition(":")
    environment = {"LITELLM_MASTER_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
    with (directory / "proxy.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(command_of("proxy_litellm", "litellm"), "--config", config, "--host", host, "--port", port),
            stdout=log,
            stderr=log,
            cwd=directory,
            env={**os.environ, **environment},
        )
    headers = {"authorization": f"Bearer {key}"}
    try:
        async with AsyncClient(base_url=f"http://{host}:{port}", headers=headers, timeout=60) as http:
            await _until_live(http, process)
            yield http
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _until_live(http: AsyncClient, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(PROGRAM_TIMEOUT_S):
        while process.returncode is None:
            try:
                if (await http.get("/health/liveliness")).status_code == 200:
                    return
            except HTTPError:
                pass  # it does not listen yet
            await asyncio.sleep(0.2)
    pytest.fail(f"the proxy ended with {process.returncode}")


async def test_answers_streams_and_token_counts(served: Served, tmp_path: Path) -> None:
    async with AsyncClient(base_url=served.url, timeout=60) as gateway, proxy(served, tmp_path) as http:
        counted = await gateway.post("v1/messages/count_tokens", json={"messages": STORY})
        expected = counted.json()["input_tokens"]
        for provider in PROVIDERS:
            body = {"model": provider, "messages": STORY}
            found = (await http.post("/v1/messages/count_tokens", json=body)).json()
            assert (found["input_tokens"], found["litellm_count_source"]) == (expected, "provider"), found
            found = (await http.post("/utils/token_counter?call_endpoint=true", json=body)).json()
            assert (found["total_tokens"], found["count_source"]) == (expected, "provider"), found
            asked = {**body, "max_tokens": 12, "temperature": 0}
            answer = (await http.post("/v1/messages", json=asked)).json()
            assert answer["usage"]["input_tokens"] == expected and answer["content"][0]["text"], answer
            streamed = await http.post("/v1/chat/completions", json={**asked, "stream": True})
            chunks = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
            assert chunks[-1] == "[DONE]", streamed.text
            parts = [json.loads(chunk)["choices"] for chunk in chunks[:-1]]
            text = "".join(part[0]["delta"].get("content") or "" for part in parts if part)
            whole = (await http.post("/v1/chat/completions", json=asked)).json()
            assert text == whole["choices"][0]["message"]["content"] != "", whole
