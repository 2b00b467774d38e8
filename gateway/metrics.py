"""Metrics of a gateway."""

import asyncio
import time
from collections.abc import Callable
from functools import partial

import psutil
from opentelemetry.sdk.metrics.export import ScopeMetrics
from opentelemetry.sdk.resources import Resource

from telemetry.metrics import definitions
from telemetry.metrics.definitions import Process
from telemetry.metrics.otlp import export_request
from telemetry.metrics.prometheus import Exposed, prometheus_text
from telemetry.metrics.registry import Registry, watch_certificate
from wire.transport import CertificateLife


class GatewayMetrics:
    """Counts requests and ignored fields."""

    def __init__(self, num_lost_records: Callable[[], int] = lambda: 0) -> None:
        """`num_lost_records` returns the number of records that the audit log could not hold."""
        self._registry = Registry(start_ns=time.time_ns())
        self._requests = self._registry.number(definitions.HTTP_REQUESTS)
        self._active = self._registry.number(definitions.HTTP_ACTIVE).of()
        self._ignored = self._registry.number(definitions.IGNORED_FIELDS).of()
        self._key_tokens = self._registry.number(definitions.KEY_TOKENS)
        self._memory = self._registry.number(definitions.RESIDENT_MEMORY).of()
        self._dropped_spans = self._registry.number(definitions.DROPPED_SPANS).of()
        lost_records = self._registry.number(definitions.LOST_AUDIT_RECORDS).of()
        self._registry.read_with(lambda: lost_records.set(num_lost_records()))
        self._idle = asyncio.Event()
        self._idle.set()
        self._process = psutil.Process()
        self._registry.read_with(lambda: self._memory.set(self._process.memory_info().rss))

    def watch_certificate(self, life: Callable[[], CertificateLife | None]) -> None:
        """Report how long this process's certificate is valid. Call once."""
        watch_certificate(self._registry, life)

    def watch_spans(self, num_dropped: Callable[[], int]) -> None:
        """Report spans that were dropped."""
        self._registry.read_with(lambda: self._dropped_spans.set(num_dropped()))

    async def idle(self) -> None:
        """Wait until no request is in progress."""
        await self._idle.wait()

    def request_began(self) -> None:
        self._active.add()
        self._idle.clear()

    def request_ended(self, endpoint: str, status: int) -> None:
        self._active.add(-1)
        self._requests.of(endpoint, str(status)).add()
        if not self._active.value:
            self._idle.set()

    def count_ignored(self, number: int) -> None:
        self._ignored.add(number)

    def count_key_tokens(self, key_id: str, kind: str, number: int) -> None:
        """Count tokens of a key; `kind` is prompt or completion."""
        self._key_tokens.of(key_id, kind).add(number)

    async def text(self, accept: str) -> tuple[bytes, str]:
        """Return `/metrics`, and the content type for the header `accept`."""
        return await asyncio.to_thread(partial(_text, self._registry.snapshot(time.time_ns()), accept))


def _text(snapshot: ScopeMetrics, accept: str) -> tuple[bytes, str]:
    (own,) = export_request(snapshot, Resource({})).resource_metrics
    return prometheus_text([Exposed("", own, Process.GATEWAY)], accept)
