"""Tool calls that a grammar forces, through a gateway, with a model that has never seen a tool."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from httpx2 import ASGITransport, AsyncClient

from gateway.api.app import make_app
from gateway.api.call import Gateway
from gateway.config import GatewayConfig
from gateway.metrics import GatewayMetrics
from gateway.parsers.families import choose_parsers
from gateway.upstream.link import CoordinatorLink
from tests.integration.cluster import DEADLINE_S, Cluster
from text.tokenizer import load_text_codec

PATH = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Oslo", "Rome"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "clock",
            "parameters": {
                "type": "object",
                "properties": {"utc": {"type": "boolean"}},
                "required": ["utc"],
                "additionalProperties": False,
            },
        },
    },
]
NAMED = {"type": "function", "function": {"name": "clock"}}


@asynccontextmanager
async def served() -> AsyncIterator[tuple[AsyncClient, Gateway]]:
    """A gateway of the built-in model, and a client of it."""
    async with Cluster(None, layers=(6, 6), has_text=True) as cluster:
        link = CoordinatorLink(cluster.address)
        await link.start()
        assert link.tokenizer_directory is not None
        gateway = Gateway(
            config=GatewayConfig(listen="127.0.0.1:0"),
            upstream=link,
            codec=load_text_codec(link.tokenizer_directory),
            metrics=GatewayMetrics(),
        )
        try:
            transport = ASGITransport(make_app(gateway))
            async with AsyncClient(
                transport=transport, base_url="http://gateway", timeout=DEADLINE_S
            ) as client:
                yield client, gateway
            await cluster.wait_drained()
        finally:
            gateway.close()
            await link.stop()


def fits(name: str, arguments: dict[str, Any]) -> bool:
    if name == "weather":
        return (
            arguments.keys() == {"city", "days"}
            and arguments["city"] in ("Oslo", "Rome")
            and arguments["days"] in range(1, 10)
        )
    return name == "clock" and arguments.keys() == {"utc"} and isinstance(arguments["utc"], bool)


async def test_required_calls_fit_their_schemas() -> None:
    async with served() as (client, gateway):
        for seed, tool_parser in enumerate(("auto", "hermes")):
            gateway.parsers = choose_parsers(tool_parser, "none", chat_template=None)
            is_named = tool_parser == "hermes"
            body = request_body(seed, tool_choice=NAMED if is_named else "required")
            choice = (await client.post(PATH, json=body)).json()["choices"][0]
            assert choice["finish_reason"] == ("stop" if is_named else "tool_calls"), choice
            (call,) = choice["message"]["tool_calls"]
            function = call["function"]
            assert fits(function["name"], json.loads(function["arguments"]))
            assert function["name"] == "clock" or not is_named

            events = (await client.post(PATH, json={**body, "stream": True})).text.split("\n\n")
            parts = [
                part
                for event in events
                if event.startswith("data: {")
                for part in json.loads(event[6:])["choices"][0]["delta"].get("tool_calls", ())
            ]
            assert parts[0]["function"]["name"] == function["name"]
            assert "".join(part["function"]["arguments"] for part in parts) == function["arguments"]


@pytest.mark.full
async def test_an_answer_beside_tools_follows_its_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"rain": {"type": "boolean"}},
        "required": ["rain"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}
    async with served() as (client, gateway):
        assert gateway.codec is not None
        gateway.parsers = choose_parsers("hermes", "none", chat_template=None)
        (begins_call,) = gateway.codec.encode("<", add_special_tokens=False)
        for seed, bias in enumerate((100, -100, 0)):
            body = request_body(seed, response_format=form, logit_bias={str(begins_call): bias})
            message = (await client.post(PATH, json=body)).json()["choices"][0]["message"]
            calls = message.get("tool_calls", ())
            for call in calls:
                assert fits(call["function"]["name"], json.loads(call["function"]["arguments"]))
            if not calls:
                assert json.loads(message["content"]).keys() == {"rain"}, message
            assert bias == 0 or bool(calls) == (bias > 0)


def request_body(seed: int, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "Will it rain?"}],
        "tools": TOOLS,
        "parallel_tool_calls": False,
        "seed": seed,
        "max_tokens": 150,
        **more,
    }
