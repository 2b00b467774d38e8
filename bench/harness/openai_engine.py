"""Load on an OpenAI-compatible server: streamed completions of token ids."""

from __future__ import annotations

import asyncio
import json
import random
import time
from types import TracebackType
from typing import Any, Self

import httpx2

from bench.harness.cluster import FIRST_TOKEN_ID
from bench.harness.figure import NotMeasured
from bench.harness.streams import Stream

_DATA, _DONE = "data:", "[DONE]"
_TIMEOUT_S = 120


class OpenAiEngine:
    """Client of one server and its first model; `url` is without `/v1`.

    Prompts are new random token ids for every request, so that nothing is found in a cache. The server must
    accept token ids as prompt, and `ignore_eos`.
    """

    def __init__(self, url: str, *, vocab_size: int) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._vocab_size = vocab_size
        self._random = random.Random(1)

    async def __aenter__(self) -> Self:
        # A server that was stopped between turns closes its idle connections when it continues.
        unlimited = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        self._session = httpx2.AsyncClient(limits=unlimited, timeout=_TIMEOUT_S)
        try:
            self._model = await self._first_model()
        except BaseException:
            await self._session.aclose()
            raise
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._session.aclose()

    async def generate_all(self, num_streams: int, prompt_tokens: int, max_tokens: int) -> list[Stream]:
        """Run requests concurrently to their ends. Raises NotMeasured if one fails or is shorter."""
        try:
            async with asyncio.TaskGroup() as group:
                calls = [
                    group.create_task(self._generate(prompt_tokens, max_tokens)) for _ in range(num_streams)
                ]
        except ExceptionGroup as errors:
            raise NotMeasured(f"{self._url}: {errors.exceptions[0]!r}") from errors
        return [call.result() for call in calls]

    async def _first_model(self) -> str:
        try:
            response = await self._session.get(f"{self._url}/v1/models")
            response.raise_for_status()
            models: dict[str, Any] = response.json()
        except httpx2.HTTPError as error:
            raise NotMeasured(f"{self._url} lists no models: {error!r}") from error
        return str(models["data"][0]["id"])

    async def _generate(self, prompt_tokens: int, max_tokens: int) -> Stream:
        question = {
            "model": self._model,
            "prompt": self._random.choices(range(FIRST_TOKEN_ID, self._vocab_size), k=prompt_tokens),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        stream = Stream(time.monotonic())
        async with self._session.stream("POST", f"{self._url}/v1/completions", json=question) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith(_DATA) and (data := line.removeprefix(_DATA).strip()) != _DONE:
                    _add(stream, json.loads(data))
        if len(stream.arrivals_s) != max_tokens:
            raise NotMeasured(f"{len(stream.arrivals_s)} tokens, asked for {max_tokens}")
        return stream


def _add(stream: Stream, message: dict[str, Any]) -> None:
    """Add a message's tokens: up to its count of tokens so far, or one if the server does not count.

    A final count above the number of messages means that some had several tokens.
    """
    counted = (message.get("usage") or {}).get("completion_tokens")
    num_before = len(stream.arrivals_s)
    num_counted = num_before + bool(message.get("choices")) if counted is None else counted
    stream.arrivals_s += [time.monotonic()] * (num_counted - num_before)
