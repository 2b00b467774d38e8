"""Requests to the gateways of a chart, each answer compared with an idle cluster's."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.pod_engine import PodEngine

TIMEOUT_S = 600.0


class Refused(AssertionError):
    """A request was refused before it began, and may be sent again."""


@dataclass(frozen=True, kw_only=True)
class GatewayClient:
    """Sends requests to any ready gateway, as a service of Kubernetes does, and checks its certificate."""

    engine: PodEngine
    service: str
    port: int
    threads: ThreadPoolExecutor
    authorities: Path | None
    """Certificates that gateways may be signed by; None for plain text."""
    api_key: str | None = None
    asks_again: bool = False
    """Whether a request that was refused with 503 and a retry time is sent again, as OpenAI's clients do."""

    async def story(self, prompt: str, *, max_tokens: int) -> str:
        """The text of a streamed completion. Raises OSError, HTTPException or AssertionError."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    return await self._story(prompt, max_tokens)
                except Refused:
                    if not self.asks_again:
                        raise
                    await asyncio.sleep(0.5)

    async def _story(self, prompt: str, max_tokens: int) -> str:
        async with asyncio.timeout(TIMEOUT_S):
            while not (addresses := self.engine.endpoints(self.service)):
                await asyncio.sleep(0.1)
        # A new connection for each request, spread over the gateways.
        address = addresses[hash((prompt, asyncio.get_running_loop().time())) % len(addresses)]
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads, self._ask, address, prompt, max_tokens)

    def _ask(self, address: str, prompt: str, max_tokens: int) -> str:
        connection = http.client.HTTPConnection(self.service, self.port, timeout=TIMEOUT_S)
        connection.sock = self._connected(address)
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        headers = {"content-type": "application/json"}
        if self.api_key is not None:
            headers["authorization"] = f"Bearer {self.api_key}"
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            content = response.read().decode()
            if response.status == 503 and response.getheader("retry-after") is not None:
                raise Refused(f"{address}: {content}")
            assert response.status == 200, f"{address}: {response.status} {content}"
            return _text(content)
        finally:
            connection.close()

    def _connected(self, address: str) -> socket.socket:
        plain = socket.create_connection((address, self.port), timeout=TIMEOUT_S)
        if self.authorities is None:
            return plain
        context = ssl.create_default_context(cafile=str(self.authorities))
        return context.wrap_socket(plain, server_hostname=self.service)


def _text(content: str) -> str:
    """The text of a stream of events, which must have an end."""
    events = [line.removeprefix("data: ") for line in content.splitlines() if line.startswith("data: ")]
    assert events[-1:] == ["[DONE]"], content[-500:]
    chunks = [json.loads(event) for event in events[:-1]]
    errors = [chunk["error"] for chunk in chunks if "error" in chunk]
    assert not errors, errors
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


class GatewayLoad:
    """A constant number of streams; every answer is compared."""

    def __init__(self, client: GatewayClient, prompts: Sequence[str], *, max_tokens: int) -> None:
        self._client, self._prompts, self._max_tokens = client, prompts, max_tokens
        self._expected: dict[str, str] = {}
        self.num_finished = 0
        self.problems: list[str] = []

    @asynccontextmanager
    async def running(self, *, num_streams: int) -> AsyncIterator[GatewayLoad]:
        """Asks once without disturbance, then all the time; waits for the last answers at the end."""
        for prompt in self._prompts:
            self._expected[prompt] = await self._client.story(prompt, max_tokens=self._max_tokens)
            assert self._expected[prompt], prompt
        stopping = asyncio.Event()
        streams = [asyncio.create_task(self._stream(number, stopping)) for number in range(num_streams)]
        try:
            yield self
        finally:
            stopping.set()
            await asyncio.gather(*streams)

    async def until_finished(self, num_more: int, *, timeout_s: float) -> None:
        """Wait for further answers; at once after a problem."""
        wanted = self.num_finished + num_more
        async with asyncio.timeout(timeout_s):
            while self.num_finished < wanted and not self.problems:
                await asyncio.sleep(0.1)

    async def _stream(self, number: int, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            prompt = self._prompts[number % len(self._prompts)]
            number += 1
            try:
                found = await self._client.story(prompt, max_tokens=self._max_tokens)
            except (OSError, http.client.HTTPException, AssertionError) as error:
                self.problems.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.5)
                continue
            if found != self._expected[prompt]:
                self.problems.append(f"{prompt!r}: {found!r} instead of {self._expected[prompt]!r}")
            self.num_finished += 1
