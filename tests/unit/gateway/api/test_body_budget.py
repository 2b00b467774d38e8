"""Bytes of bodies that are read at the same time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

import pytest
from httpx2 import ASGITransport, AsyncClient

from gateway.api import body_budget, call, completions, conversation, tokenize
from gateway.api.app import make_app
from gateway.api.body_budget import BODIES, BODIES_PER_OWNER, FREE_BYTES, SLOW_S, BodyBudget
from gateway.api.errors import ApiError
from gateway.api.responses import endpoints as responses
from tests.unit.gateway.fake_upstream import Served, serve

MAX_BODY = 100_000
PATH = "/v1/completions"
JSON = {"content-type": "application/json"}


def test_a_host_and_all_hosts_have_a_number_of_bytes() -> None:
    budget = BodyBudget(MAX_BODY)
    for number in range(BODIES // BODIES_PER_OWNER):
        held = budget.body_of(f"host 10.0.0.{number}")
        held.add(FREE_BYTES + BODIES_PER_OWNER * MAX_BODY)
        with pytest.raises(ApiError, match=rf"of host 10.0.0.{number} .* exceed 400000 bytes") as refused:
            budget.body_of(f"host 10.0.0.{number}").add(FREE_BYTES + 1)
        assert (refused.value.status, refused.value.headers["retry-after"]) == (503, "1")
    another = budget.body_of("10.0.1.0")
    another.add(FREE_BYTES)
    with pytest.raises(ApiError, match=r"of all clients .* exceed 1600000 bytes"):
        another.add(1)
    with held:
        pass
    another.add(1)


def test_a_refused_body_gives_back_what_it_had() -> None:
    budget = BodyBudget(MAX_BODY)
    for _ in range(3):
        with budget.body_of("a") as held:
            held.add(FREE_BYTES + BODIES_PER_OWNER * MAX_BODY)
            with pytest.raises(ApiError):
                held.add(1)
    budget.body_of("a").add(FREE_BYTES + BODIES_PER_OWNER * MAX_BODY)


async def test_slow_bodies_of_the_host_or_else_the_oldest_make_room() -> None:
    now_s = 0.0
    budget = BodyBudget(MAX_BODY, now_s=lambda: now_s)
    ended = []

    async def read(host: str, name: str) -> None:
        with budget.body_of(host) as held:
            try:
                async with asyncio.timeout(None) as patience:
                    held.read_within(patience)
                    held.add(FREE_BYTES + MAX_BODY)
                    await asyncio.Event().wait()
            except TimeoutError:
                ended.append(name)

    hosts = [f"10.0.0.{number // BODIES_PER_OWNER}" for number in range(BODIES)]
    readers = [asyncio.create_task(read(host, f"{number}")) for number, host in enumerate(hosts)]
    await asyncio.sleep(0)
    now_s = SLOW_S - 1
    for host in ("10.0.0.1", "10.0.9.9"):
        with pytest.raises(ApiError, match="exceed"):
            budget.body_of(host).add(FREE_BYTES + MAX_BODY)
    now_s = SLOW_S
    readers.append(asyncio.create_task(read("10.0.0.1", "new of a host")))
    readers.append(asyncio.create_task(read("10.0.9.9", "new of another")))
    while len(ended) < 2:
        await asyncio.sleep(0)
    assert ended == ["4", "0"]
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)


async def test_a_slow_body_that_made_room_is_refused_and_the_new_one_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serve(max_body_bytes=MAX_BODY) as served:
        size = MAX_BODY - 1000
        events = [asyncio.Event() for _ in range(BODIES_PER_OWNER * MAX_BODY // (size - FREE_BYTES))]
        calls = [asyncio.create_task(_unfinished(served, begun, size)) for begun in events]
        await asyncio.gather(*(begun.wait() for begun in events))
        large = {"prompt": "a" * size, "max_tokens": 1}
        while (await served.client.post(PATH, json=large)).status_code != 503:
            await asyncio.sleep(0)  # until the bodies have arrived
        monkeypatch.setattr(body_budget, "SLOW_S", 0.0)
        response = await served.client.post(PATH, json=large)
        assert response.json()["error"]["code"] == "context_length_exceeded", "it was not read"
        done, _ = await asyncio.wait(calls, return_when="FIRST_COMPLETED")
        assert {call.result() for call in done} == {503}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def _unfinished(served: Served, begun: asyncio.Event, size: int) -> int:
    async def parts() -> AsyncIterator[bytes]:
        yield b'{"prompt": "' + b"a" * size
        begun.set()
        await asyncio.Event().wait()

    return (await served.client.post(PATH, content=parts(), headers=JSON)).status_code


async def test_unfinished_bodies_have_a_bound_together_and_small_requests_go_on() -> None:
    """The budget is full of bodies that do not end, until their connections do."""
    async with serve(max_body_bytes=MAX_BODY) as served:
        events = [asyncio.Event() for _ in range(40)]
        size = MAX_BODY - 1000
        calls = [asyncio.create_task(_unfinished(served, begun, size)) for begun in events]
        refused = 40 - BODIES_PER_OWNER * MAX_BODY // (size - FREE_BYTES)
        while sum(call.done() for call in calls) < refused - 1:
            await asyncio.wait([call for call in calls if not call.done()], return_when="FIRST_COMPLETED")
        assert {call.result() for call in calls if call.done()} == {503}
        response = await served.client.post(PATH, json={"prompt": "a", "max_tokens": 1})
        assert response.status_code == 200
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        large = await served.client.post(PATH, json={"prompt": "a" * size, "max_tokens": 1})
        assert large.json()["error"]["code"] == "context_length_exceeded", "it was not read"


def _body(path: str, text: str) -> dict[str, Any]:
    """A large request whose output has a form."""
    form = {"type": "json_schema", "schema": {"type": "object", "title": "u" * 20_000}}
    messages = [{"role": "user", "content": text}]
    match path:
        case "/v1/completions":
            return {"prompt": text, "max_tokens": 1, "guided_json": form["schema"]}
        case "/v1/chat/completions":
            return {"messages": messages, "max_tokens": 1, "guided_json": form["schema"]}
        case "/v1/messages":
            return {"messages": messages, "max_tokens": 1, "output_config": {"format": form}}
        case "/v1/responses":
            return {
                "input": text,
                "max_output_tokens": 1,
                "store": False,
                "text": {"format": {**form, "name": "a"}},
            }
    return {"messages": messages, "chat_template_kwargs": {"title": "u" * 20_000}}


@pytest.mark.parametrize(
    ("path", "module", "name"),
    [
        ("/v1/completions", call, "check_size"),
        ("/v1/completions", completions, "_prompts"),
        ("/v1/completions", completions, "sampling_message"),
        ("/v1/chat/completions", conversation, "sampling_message"),
        ("/v1/messages", conversation, "sampling_message"),
        ("/v1/responses", conversation, "sampling_message"),
        ("/v1/responses", responses, "_conversation"),
        ("/tokenize", tokenize, "_encode"),
    ],
)
async def test_slow_work_for_a_host_holds_up_no_other_host(
    monkeypatch: pytest.MonkeyPatch, path: str, module: ModuleType, name: str
) -> None:
    gate, working, work = threading.Event(), threading.Event(), getattr(module, name)

    def slow(*arguments: Any, **more: Any) -> Any:
        if "flood" in repr(arguments):
            working.set()
            assert gate.wait(20)
        return work(*arguments, **more)

    monkeypatch.setattr(module, name, slow)
    async with serve(max_body_bytes=1 << 20) as served:
        app = make_app(served.gateway)

        async def ask(host: str, prompt: str) -> int:
            async with AsyncClient(
                transport=ASGITransport(app, client=(host, 1)), base_url="http://gateway"
            ) as client:
                return (await client.post(path, json=_body(path, prompt))).status_code

        flood = [asyncio.create_task(ask("10.0.0.1", "flood")) for _ in range(8)]
        try:
            assert await asyncio.to_thread(working.wait, 20)
            assert await asyncio.wait_for(ask("10.0.0.2", "a bird"), 10) == 200
            assert not any(task.done() for task in flood)
            assert {owner.client for owner in served.upstream.owners} <= {"10.0.0.2"}
        finally:
            gate.set()
            assert await asyncio.gather(*flood) == [200] * len(flood)
