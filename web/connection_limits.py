"""What one HTTP connection, one host, and all together may cost a server before any application sees them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from http import HTTPStatus

MAX_HEADERS = 100
MAX_HEAD_BYTES = 16_384
"""Of a request line with all headers."""
MAX_SMALL_PARTS = 4096
"""Chunks or packets of a body of less than `MIN_PART_BYTES` on average; each holds the loop for 5 us."""
MIN_PART_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Numbers and times of an HTTP server."""

    max_connections: int = 4096
    max_connections_per_host: int = 2048
    """Half of them: a proxy is one host."""
    head_timeout_s: float = 10.0
    """From the begin of the connection, or the first byte of a later request, to the end of its headers."""
    pause_timeout_s: float = 30.0
    """Between two parts of a body, while the server reads it."""
    body_timeout_s: float = 300.0
    tls_timeout_s: float = 10.0
    max_unread_bytes: int = 64 * 2**20
    """What is taken of a body after its response, which many clients read only when they have sent all."""


FOR_OPERATORS = HttpLimits(max_connections=128, max_connections_per_host=64, max_unread_bytes=2**20)
"""Of servers beside a coordinator's gRPC port, which has the other files of the process."""
FOR_WEIGHTS = HttpLimits(max_connections=256, max_connections_per_host=64, max_unread_bytes=2**16)
"""Of servers of weights: a worker has 12 connections, which go to several of them."""


class HttpConnections:
    """Counts the open connections of a server."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self._num_of_host = Counter[str]()
        self._num = 0

    def enter(self, host: str) -> str | None:
        """Count a connection, which has to `leave`; return why it is refused, if it is."""
        limits, num = self.limits, self._num_of_host[host]
        self._num += 1
        self._num_of_host[host] += 1
        if num >= limits.max_connections_per_host:
            return f"host {host} has {num} connections, the limit is {limits.max_connections_per_host}"
        if self._num > limits.max_connections:
            return f"the server has {limits.max_connections} connections, which is the limit"
        return None

    def leave(self, host: str) -> None:
        self._num -= 1
        self._num_of_host[host] -= 1
        if not self._num_of_host[host]:
            del self._num_of_host[host]


def refusal_body(status: HTTPStatus, problem: str) -> bytes:
    """An error in a shape that clients of each HTTP API of Stageline can read."""
    kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "overloaded_error"
    error = {"message": problem, "type": kind, "param": None, "code": status.name.lower()}
    return json.dumps({"type": "error", "error": error}).encode()
