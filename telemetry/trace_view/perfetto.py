"""Converts a request to the Chrome trace format, for ui.perfetto.dev and chrome://tracing.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections.abc import Generator, Iterator
from typing import Any, TypeAlias

from telemetry.trace_view.explain import explain
from telemetry.trace_view.read_model import NS_PER_S, RequestTrace
from telemetry.trace_view.waterfall import Row, Segment, lanes, waterfall

Event: TypeAlias = dict[str, Any]

_COORDINATOR = 1
_GATEWAY = "gateway"


def perfetto(trace: RequestTrace) -> dict[str, Any]:
    """Return the trace as a JSON object.

    Gateway, coordinator and each worker are a process, each row is a thread, or several if its
    segments overlap. Times are microseconds since the first event.
    """
    return {
        "traceEvents": list(_Writer(trace).events()),
        "displayTimeUnit": "ms",
        "otherData": {
            "request_id": trace.request_id,
            "trace_id": trace.trace_id,
            "explanation": explain(trace),
        },
    }


class _Writer:
    """Assigns process and thread numbers in order of appearance."""

    def __init__(self, trace: RequestTrace) -> None:
        self._trace = trace
        self._rows = waterfall(trace).rows
        # Clock offsets can place the first hop before the request.
        starts = [segment.start_s for row in self._rows for segment in row.segments]
        self._begin_s = min(0.0, *starts, 0.0)
        self._processes = {"": _COORDINATOR}
        self._num_threads: dict[int, int] = {}

    def events(self) -> Iterator[Event]:
        yield from self._process(_COORDINATOR, "coordinator")
        yield from self._request()
        for row in self._rows:
            name = _GATEWAY if row.is_gateway else "" if row.place is None else row.place.worker
            pid = self._processes.setdefault(name, len(self._processes) + _COORDINATOR)
            if pid not in self._num_threads:
                yield from self._process(pid, name)
            yield from self._row(row, pid)

    def _process(self, pid: int, name: str) -> Iterator[Event]:
        self._num_threads[pid] = 0
        yield _metadata("process_name", pid, 0, name=name)
        yield _metadata("process_sort_index", pid, 0, sort_index=pid)

    def _request(self) -> Iterator[Event]:
        trace = self._trace
        tid = yield from self._thread(_COORDINATOR, "request")
        root, name = trace.root, f"request {trace.request_id}"
        start_s, end_s = trace.since_start_s(root.start_ns), trace.since_start_s(root.end_ns)
        yield self._span(name, "request", start_s, end_s, _COORDINATOR, tid, dict(root.attributes))

    def _row(self, row: Row, pid: int) -> Iterator[Event]:
        title = row.title if row.place is None else f"{row.title}, layers {row.place.layers}"
        for lane in lanes(row.segments):
            tid = yield from self._thread(pid, title)
            for segment in lane:
                kind = segment.kind.value
                yield self._span(kind, kind, segment.start_s, segment.end_s, pid, tid, _facts(segment))

    def _thread(self, pid: int, name: str) -> Generator[Event, None, int]:
        self._num_threads[pid] += 1
        tid = self._num_threads[pid]
        yield _metadata("thread_name", pid, tid, name=name)
        yield _metadata("thread_sort_index", pid, tid, sort_index=tid)
        return tid

    def _span(
        self, name: str, category: str, start_s: float, end_s: float, pid: int, tid: int, facts: Event
    ) -> Event:
        # Round both ends before subtracting, so that adjacent segments stay adjacent.
        start_ns = round((start_s - self._begin_s) * NS_PER_S)
        end_ns = round((end_s - self._begin_s) * NS_PER_S)
        return {
            "ph": "X",
            "name": name,
            "cat": category,
            "pid": pid,
            "tid": tid,
            "ts": start_ns / 1000,
            "dur": (end_ns - start_ns) / 1000,
            "args": facts,
        }


def _facts(segment: Segment) -> Event:
    return {
        "span_id": segment.span_id,
        "choice": segment.choice,
        "steps": segment.num_steps,
        "tokens": segment.num_tokens,
        "is_share_of_many_steps": segment.is_share,
    }


def _metadata(kind: str, pid: int, tid: int, **values: str | int) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": values}
