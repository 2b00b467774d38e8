"""Requests at a gateway, one after the other on each of several connections, until a file exists.

Prints one JSON line per request: its text. A request that fails ends the program with an error.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from httpx2 import AsyncClient

NUM_STREAMS = 2
PROMPT = "Once upon a time"
MAX_TOKENS = 24


async def ask(client: AsyncClient, url: str) -> str:
    """The text of one greedy answer. Raises AssertionError, or errors of httpx."""
    body = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    response = await client.post(f"{url}/v1/completions", json=body)
    answer = response.json()
    assert response.status_code == 200, answer
    assert answer["choices"][0]["finish_reason"] == "length", answer
    text: str = answer["choices"][0]["text"]
    return text


async def _stream(client: AsyncClient, url: str, end: Path) -> None:
    while not end.exists():
        print(json.dumps({"text": await ask(client, url)}), flush=True)


async def main(url: str, end: Path) -> None:
    async with AsyncClient(timeout=120) as client:
        await asyncio.gather(*(_stream(client, url, end) for _ in range(NUM_STREAMS)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
