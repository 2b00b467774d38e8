"""The `guidellm` tool: concurrent streams of synthetic prompts, none of which fails."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from httpx2 import AsyncClient

from builtin_model import MODEL_DIRECTORY
from stageline import Client
from tests.clients.harness import MARKS, Served, command_of, run
from tests.integration.metrics_cluster import Scraped

pytestmark = MARKS

PATHS = {"completions": "/v1/completions", "chat_completions": "/v1/chat/completions"}
ENDED = "stageline_gateway_requests_total"
IGNORED = "stageline_gateway_ignored_fields_total"
NUM_STREAMS = 64
NUM_REQUESTS = 160
PROMPT_TOKENS = {
    "prompt_tokens": 32,
    "prompt_tokens_stdev": 12,
    "prompt_tokens_min": 8,
    "prompt_tokens_max": 64,
}
OUTPUT_TOKENS = {
    "output_tokens": 40,
    "output_tokens_stdev": 8,
    "output_tokens_min": 24,
    "output_tokens_max": 56,
}


@pytest.mark.parametrize("endpoint", ["completions", "chat_completions"])
async def test_streams_have_text_and_usage_of_the_grpc_client(
    float32: Served, tmp_path: Path, endpoint: str
) -> None:
    before = await _scrape(float32)
    requests = await _load(float32, tmp_path, endpoint)
    after = await _scrape(float32)
    assert {status: len(found) for status, found in requests.items() if found} == {"successful": NUM_REQUESTS}
    for labels in ({"endpoint": endpoint}, {"endpoint": endpoint, "status": "200"}):
        assert after.get(ENDED, **labels) - before.get(ENDED, **labels) == NUM_REQUESTS
    assert after.has(IGNORED)
    assert after.get(IGNORED) == before.get(IGNORED)
    assert _peak(requests["successful"]) == NUM_STREAMS
    async with Client(float32.coordinator) as client:
        await asyncio.gather(*(_check(client, request) for request in requests["successful"]))


async def _load(served: Served, directory: Path, endpoint: str) -> dict[str, list[dict[str, Any]]]:
    """Run the tool; return its record of each request by outcome."""
    report = directory / "report.json"
    settings = {
        "backend": {
            "kind": "openai_http",
            "target": served.url,
            "model": served.model,
            "request_format": PATHS[endpoint],
            "extras": {"body": {"temperature": 0}},
        },
        "profile": {"kind": "concurrent", "streams": [NUM_STREAMS]},
        "constraints": [{"kind": "max_requests", "count": NUM_REQUESTS}],
        "tokenizer": {"kind": "huggingface_auto", "model": str(MODEL_DIRECTORY)},
        "data": [{"kind": "synthetic_text", **PROMPT_TOKENS, **OUTPUT_TOKENS}],
        "outputs": [{"kind": "json", "path": str(report)}],
    }
    config = directory / "config.json"
    config.write_text(json.dumps({"spec": settings}))
    print(
        await run(
            *(command_of("guidellm", "guidellm"), "run", "--config", config, "--disable-progress"),
            directory=directory,
            HF_HUB_OFFLINE="1",
            HF_HOME=str(directory / "cache"),
            GUIDELLM__MAX_WORKER_PROCESSES="2",
        )
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    return {status: found or [] for status, found in benchmark["requests"].items() if status != "total"}


async def _check(client: Client, request: dict[str, Any]) -> None:
    """Compare a streamed response with the gRPC client's completion of the same prompt."""
    body = json.loads(request["request_args"])["body"]
    assert body["stream"] is True
    num_tokens = body.get("max_completion_tokens") or body["max_tokens"]
    [completion] = await client.complete(_prompt(body), temperature=0, max_tokens=num_tokens, ignore_eos=True)
    usage = completion.usage
    found = (request["output"], request["prompt_tokens"], request["output_tokens"])
    assert found == (completion.text, usage.prompt_tokens, usage.completion_tokens)
    assert usage.completion_tokens == num_tokens


def _prompt(body: dict[str, Any]) -> Any:
    if "prompt" in body:
        return body["prompt"]
    return [
        {"role": message["role"], "content": "".join(part["text"] for part in message["content"])}
        for message in body["messages"]
    ]


def _peak(requests: list[dict[str, Any]]) -> int:
    """The most requests that were in progress at once."""
    times = [request["info"]["timings"] for request in requests]
    return max(
        sum(other["request_start"] <= time["request_start"] < other["request_end"] for other in times)
        for time in times
    )


async def _scrape(served: Served) -> Scraped:
    async with AsyncClient(base_url=served.url) as http:
        return Scraped((await http.get("/metrics")).text)
