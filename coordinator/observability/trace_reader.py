"""Reads stored traces on a thread, as messages, summaries and facts."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from coordinator.observability.trace_store import FoundTrace, TraceStore
from telemetry.trace_view.facts import TraceSummary, summary, trace_facts
from telemetry.trace_view.read_model import RequestTrace, read_spans, request_trace

_Result = TypeVar("_Result")


class TraceReader:
    """Uses one thread, so that readers queue and never block the event loop."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="traces")
        self._max_summaries = 2 * store.limits.num_traces
        self._summaries: dict[str, tuple[int, TraceSummary]] = {}

    async def summaries(self, num_requests: int | None = None) -> list[TraceSummary]:
        """Newest start first."""
        return await self._on_thread(lambda: self._summarise(num_requests))

    async def data(self, wanted: str) -> tuple[FoundTrace, bytes]:
        """Return spans, and a serialised TracesData of them. Raises the errors of `TraceStore.find`."""
        found = self._store.find(wanted)
        return found, await self._on_thread(lambda: found.data().SerializeToString())

    async def facts(self, wanted: str) -> dict[str, Any]:
        """Return the `trace_facts` of a request. Raises the errors of `TraceStore.find`."""
        found = self._store.find(wanted)
        return await self._on_thread(lambda: trace_facts(_read(found)))

    def close(self) -> None:
        """Cancel waiting reads."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _summarise(self, num_requests: int | None) -> list[TraceSummary]:
        known: dict[str, tuple[int, TraceSummary]] = {}
        for found in self._store.recent(num_requests):
            before = self._summaries.get(found.request_id)
            if before is None or before[0] != found.version:
                before = (found.version, summary(_read(found)))
                time.sleep(0)  # release the interpreter to the event loop
            known[found.request_id] = before
        # Keep summaries of longer lists.
        if len(known) >= len(self._summaries):
            self._summaries = known
        else:
            self._summaries |= known
            while len(self._summaries) > self._max_summaries:
                del self._summaries[next(iter(self._summaries))]
        return [line for _, line in known.values()]

    async def _on_thread(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _read(found: FoundTrace) -> RequestTrace:
    return request_trace(read_spans(found.data()), found.request_id)
