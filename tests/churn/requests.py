"""Requests of the churn: every way to start, read and end one."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from httpx2 import AsyncClient

from stageline import Client, Detach, InvalidRequest, RequestNotFound
from stageline.client.errors import Cancelled, DeadlineExceeded
from tests.mock_answers import mock_tokens
from wire.ids import id_text, new_request_id

VOCAB_SIZE = 32_000
KEEP_S = 10.0
"""Detached requests keep their output for this long: short, so that the number kept is soon constant."""

_SHARED_PREFIX = tuple(range(1, 65))


@dataclass(frozen=True, slots=True)
class Target:
    """Target of requests."""

    client: Client
    dashboard_url: str


@dataclass(frozen=True, slots=True)
class Kind:
    """`weight` is its relative frequency."""

    name: str
    run: Callable[[Target, random.Random], Awaitable[None]]
    weight: float


def prompt_of(generator: random.Random) -> list[int]:
    """Random tokens; every third prompt begins like the others."""
    prefix = _SHARED_PREFIX if generator.random() < 1 / 3 else ()
    return [*prefix, *(generator.randrange(VOCAB_SIZE) for _ in range(generator.randint(1, 160)))]


async def short(target: Target, generator: random.Random) -> None:
    await _whole(target.client, prompt_of(generator), generator.randint(1, 8))


async def long(target: Target, generator: random.Random) -> None:
    await _whole(target.client, prompt_of(generator), generator.randint(32, 64))


async def several_choices(target: Target, generator: random.Random) -> None:
    completions = await target.client.complete(
        prompt_of(generator), max_tokens=8, n=2, temperature=1.0, seed=generator.randrange(2**32)
    )
    assert [len(completion.token_ids) for completion in completions] == [8, 8]


async def stopped(target: Target, generator: random.Random) -> None:
    """Ends with a stop token, as mock stages sample it."""
    prompt = prompt_of(generator)
    expected = mock_tokens(prompt, 5, vocab_size=VOCAB_SIZE)
    [completion] = await target.client.complete(prompt, max_tokens=64, stop_token_ids=[expected[-1]])
    assert completion.token_ids[-1] == expected[-1]
    assert completion.finish_reason == "stop"


async def cancelled(target: Target, generator: random.Random) -> None:
    """Cancelled by another call after its first token."""
    request_id = id_text(new_request_id())
    outputs = target.client.generate(prompt_of(generator), max_tokens=500, request_id=request_id)
    async with aclosing(outputs):
        await anext(outputs)
        await target.client.cancel(request_id)
        try:
            async for _ in outputs:
                pass
        except Cancelled:
            return
    raise AssertionError("a cancelled request went on to its end")


async def left(target: Target, generator: random.Random) -> None:
    """Its client leaves after the first token."""
    outputs = target.client.generate(prompt_of(generator), max_tokens=500)
    async with aclosing(outputs):
        await anext(outputs)


async def late(target: Target, generator: random.Random) -> None:
    """Its deadline passes before its end."""
    try:
        await target.client.complete(prompt_of(generator), max_tokens=3000, timeout_s=0.5)
    except DeadlineExceeded:
        return
    raise AssertionError("3000 tokens came within half a second")


async def detached(target: Target, generator: random.Random) -> None:
    """Continues without its client, which reattaches and reads the rest."""
    prompt, request_id = prompt_of(generator), id_text(new_request_id())
    expected = mock_tokens(prompt, 24, vocab_size=VOCAB_SIZE)
    outputs = target.client.generate(
        prompt, max_tokens=24, request_id=request_id, on_disconnect=Detach(keep_s=KEEP_S)
    )
    async with aclosing(outputs):
        tokens = list((await anext(outputs)).token_ids)
    async with aclosing(target.client.attach(request_id, from_token=len(tokens))) as rest:
        async for output in rest:
            tokens += output.token_ids
    assert tokens == expected


async def forgotten(target: Target, generator: random.Random) -> None:
    """Detached, and never attached to again."""
    outputs = target.client.generate(prompt_of(generator), max_tokens=16, on_disconnect=Detach(keep_s=KEEP_S))
    async with aclosing(outputs):
        await anext(outputs)


async def too_long(target: Target, generator: random.Random) -> None:
    await _refused(target.client, prompt_of(generator), max_tokens=10_000_000)


async def not_a_token(target: Target, generator: random.Random) -> None:
    await _refused(target.client, [*prompt_of(generator), VOCAB_SIZE], max_tokens=4)


async def unknown(target: Target, generator: random.Random) -> None:
    """The request id is unknown."""
    secret = generator.randbytes(32).hex()
    for call in (_attach, _cancel):
        try:
            await call(target.client, id_text(new_request_id()), secret)
        except RequestNotFound:
            continue
        raise AssertionError("a request that never was is there")


async def looked_at(target: Target, generator: random.Random) -> None:
    """Status, activity and traces, as read by a dashboard."""
    await target.client.status()
    await target.client.activity()
    await target.client.traces(20)
    async with AsyncClient(base_url=target.dashboard_url) as client:
        for path in ("api/status", "api/activity", "api/traces", "metrics"):
            (await client.get(path)).raise_for_status()


KINDS = (
    Kind("short", short, 6),
    Kind("long", long, 2),
    Kind("several choices", several_choices, 2),
    Kind("stopped", stopped, 2),
    Kind("cancelled", cancelled, 1),
    Kind("left", left, 1),
    Kind("late", late, 0.5),
    Kind("detached", detached, 1),
    Kind("forgotten", forgotten, 1),
    Kind("too long", too_long, 0.5),
    Kind("not a token", not_a_token, 0.5),
    Kind("unknown", unknown, 0.5),
    Kind("looked at", looked_at, 1),
)


async def _whole(client: Client, prompt: list[int], max_tokens: int) -> None:
    [completion] = await client.complete(prompt, max_tokens=max_tokens)
    assert list(completion.token_ids) == mock_tokens(prompt, max_tokens, vocab_size=VOCAB_SIZE)


async def _refused(client: Client, prompt: list[int], *, max_tokens: int) -> None:
    try:
        await client.complete(prompt, max_tokens=max_tokens)
    except InvalidRequest:
        return
    raise AssertionError("a request that cannot be served was not refused")


async def _attach(client: Client, request_id: str, secret: str | None = None) -> None:
    async with aclosing(client.attach(request_id, secret=secret)) as outputs:
        async for _ in outputs:
            pass


async def _cancel(client: Client, request_id: str, secret: str | None = None) -> None:
    await client.cancel(request_id, secret=secret)
