"""Hostile bodies: each is refused with an error of the one shape, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc

import pytest

from gateway.api.body import MAX_VALUES, check_size
from gateway.api.errors import ApiError
from tests.hostile_bodies import HOSTILE_BODIES, HostileBody
from tests.unit.gateway.fake_upstream import Served, serve

MAX_RESPONSE_BYTES = 4096
MAX_LEFT_BYTES = 1_000_000


async def post(served: Served, hostile: HostileBody) -> None:
    response = await served.client.post(
        hostile.path, content=hostile.body, headers={"content-type": "application/json"}
    )
    assert 400 <= response.status_code < 500
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    num_header_bytes = sum(len(name) + len(value) for name, value in response.headers.raw)
    assert len(response.content) + num_header_bytes < MAX_RESPONSE_BYTES
    assert not served.upstream.streams


@pytest.mark.parametrize("hostile", HOSTILE_BODIES.values(), ids=HOSTILE_BODIES.keys())
async def test_a_hostile_body_is_refused_with_a_short_error(hostile: HostileBody) -> None:
    async with serve() as served:
        await post(served, hostile)


@pytest.mark.full
async def test_hostile_bodies_leave_nothing_in_memory() -> None:
    left = []
    async with serve() as served:
        tracemalloc.start()
        for _ in range(2):
            for hostile in HOSTILE_BODIES.values():
                await post(served, hostile)
            left.append(await _settled_bytes())
        tracemalloc.stop()
    assert left[1] - left[0] < MAX_LEFT_BYTES


async def test_a_long_prompt_with_quotes_and_commas_is_read() -> None:
    text = 'say "a, b, c\\\\", ' * 60_000
    check_size(json.dumps({"prompt": text}).encode(), max_values=MAX_VALUES)
    with pytest.raises(ApiError, match="more than 10 values"):
        check_size(b'{"prompt": [' + b"1," * 11 + b"1]}", max_values=10)


async def _settled_bytes() -> int:
    """The least traced memory within a second: a thread lets go of its last body after it has answered."""
    found = []
    for _ in range(20):
        gc.collect()
        found.append(tracemalloc.get_traced_memory()[0])
        await asyncio.sleep(0.05)
    return min(found)
