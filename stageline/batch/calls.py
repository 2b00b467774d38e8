"""HTTP calls of a batch: bounded concurrency, and retries as the server's headers say."""

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import orjson
from httpx2 import AsyncClient, ConnectError, ConnectTimeout, HTTPError, Limits, ProxyError, Response, Timeout

from stageline.batch.files import BatchRequest
from stageline.gateway_client import GatewayUnreachable, open_gateway_client, unreachable

_CONNECT_TIMEOUT_S = 10.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 8.0
_RETRIED = {408, 409, 429}
_OVERLOADED = {429, 503}


@dataclass(frozen=True, kw_only=True, slots=True)
class CallLimits:
    """`num_retries` of a line are without a server's retry delay; the delays of a line add up to `wait_s`."""

    concurrency: int
    num_retries: int
    wait_s: float
    timeout_s: float


class RetryPauses:
    """Pauses of one line."""

    def __init__(self, limits: CallLimits) -> None:
        self._limits = limits
        self._num_failures = 0
        self._waited_s = 0.0

    def after(self, response: Response, now_s: float) -> float | None:
        """Pause after a response at Unix time `now_s`; None to take it as it is."""
        if not _is_retried(response.status_code, response.headers):
            return None
        asked_s = _retry_after_s(response.headers, now_s)
        if asked_s is None or response.status_code not in _OVERLOADED:
            return self.after_failure(at_least_s=asked_s or 0.0)
        self._waited_s += asked_s
        # Spread, since all lines of an overloaded server are asked to wait as long.
        return None if self._waited_s > self._limits.wait_s else asked_s * random.uniform(1.0, 1.1)

    def after_failure(self, *, at_least_s: float = 0.0) -> float | None:
        """Pause after a call without a response; None after the last one."""
        self._num_failures += 1
        if self._num_failures > self._limits.num_retries or at_least_s > self._limits.wait_s:
            return None
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (self._num_failures - 1))
        return max(at_least_s, pause_s * random.uniform(0.75, 1.0))


def _is_retried(status: int, headers: Mapping[str, str]) -> bool:
    """By the rule of OpenAI's clients."""
    told = headers.get("x-should-retry")
    return told == "true" if told in ("true", "false") else status in _RETRIED or status >= 500


def _retry_after_s(headers: Mapping[str, str], now_s: float) -> float | None:
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            return max(0.0, float(headers[name]) * unit_s)
        except (KeyError, ValueError):
            pass
    try:
        at_s: float = parsedate_to_datetime(headers["retry-after"]).timestamp()
        return max(0.0, at_s - now_s)
    except (KeyError, ValueError):
        return None


OnAnswer = Callable[[str, dict[str, Any] | None, dict[str, str] | None], None]
"""Gets custom_id, response and error of an output line."""


async def send_all(
    gateway_url: str, requests: Iterable[BatchRequest], limits: CallLimits, on_answer: OnAnswer
) -> None:
    """Send every request. Raises GatewayUnreachable, and errors of `requests` and `on_answer`."""
    waiting, has_answered = iter(requests), False
    timeout = Timeout(limits.timeout_s, connect=_CONNECT_TIMEOUT_S, pool=None)
    connections = Limits(max_connections=limits.concurrency, max_keepalive_connections=limits.concurrency)
    async with open_gateway_client(gateway_url, timeout=timeout, limits=connections) as http:

        async def send_some() -> None:
            nonlocal has_answered
            for request in waiting:
                response, error = await _send(http, request, limits)
                if error is not None and not has_answered:
                    raise GatewayUnreachable(f"{gateway_url} is no gateway: {error['message']}")
                has_answered = True
                on_answer(request.custom_id, response, error)

        tasks = [asyncio.create_task(send_some()) for _ in range(limits.concurrency)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _send(
    http: AsyncClient, request: BatchRequest, limits: CallLimits
) -> tuple[dict[str, Any] | None, dict[str, str] | None]:
    """Response and error of the output line."""
    pauses = RetryPauses(limits)
    headers = {"content-type": "application/json"}
    while True:
        try:
            response = await http.post(request.url, content=request.body, headers=headers)
        except HTTPError as error:
            pause_s = pauses.after_failure()
            message = str(error) or type(error).__name__
            if pause_s is None and isinstance(error, ConnectError | ConnectTimeout | ProxyError):
                raise unreachable(str(http.base_url), message) from None
            if pause_s is None:
                return None, {"code": "connection_error", "message": message}
        else:
            pause_s = pauses.after(response, time.time())
            if pause_s is None:
                return _encode(response), None
        await asyncio.sleep(pause_s)


def _encode(response: Response) -> dict[str, Any]:
    try:
        body = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        body = response.text
    request_id = response.headers.get("x-request-id", "")
    return {"status_code": response.status_code, "request_id": request_id, "body": body}
