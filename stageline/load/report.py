"""Reports of a load: progress, tables, JSON, plot."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from stageline.load.driver import LoadConfig
from stageline.load.results import Limits, LoadRun, MeasuredRequest, SampleSummary, Summary, Tally, timeline
from stageline.version import VERSION
from stageline_rpc.v1 import inference_pb2

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_INTERVAL_S = 0.25


@asynccontextmanager
async def shown_progress(tally: Tally, num_planned: int) -> AsyncIterator[None]:
    """Show progress until the block ends."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with _progress(console) as progress:
        bar = progress.add_task("", total=num_planned, told="")
        showing = asyncio.create_task(_show(progress, bar, tally), name="progress")
        try:
            yield
        finally:
            showing.cancel()
            await asyncio.wait([showing])


def _progress(console: Console) -> Progress:
    columns = (
        MofNCompleteColumn(),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.fields[told]}"),
    )
    # Drawn on the event loop: another thread would delay the time stamps of outputs.
    return Progress(*columns, console=console, auto_refresh=False, transient=True)


async def _show(progress: Progress, bar: TaskID, tally: Tally) -> None:
    before = 0
    while True:
        await asyncio.sleep(_INTERVAL_S)
        tokens_per_s = (tally.output_tokens - before) / _INTERVAL_S
        before = tally.output_tokens
        progress.update(
            bar,
            completed=tally.num_completed + tally.num_failed,
            told=f"{tally.num_running} running, {tally.num_failed} failed, {tokens_per_s:.0f} tokens/s",
            refresh=True,
        )


_DIGITS = 6  # microseconds


def json_report(
    config: LoadConfig,
    model: inference_pb2.GetModelResponse,
    run: LoadRun,
    summary: Summary,
    *,
    started_at: str,
) -> str:
    """JSON with configuration, model, summary, timeline, and one record per due request."""
    facts = {
        "stageline": VERSION,
        "started_at": started_at,
        "is_interrupted": run.is_interrupted,
        "configuration": asdict(config),
        "model": {
            "name": model.name,
            "fingerprint": model.fingerprint,
            "vocab_size": model.vocab_size,
            "max_sequence_tokens": model.max_sequence_tokens,
        },
        "percentiles": "linear",
        "summary": asdict(summary),
        "timeline": asdict(timeline(run)),
        "requests": [_record_facts(record, config.limits) for record in run.records],
    }
    lines = (
        f"{json.dumps(name)}: {json.dumps(_plain(fact), allow_nan=False)}" for name, fact in facts.items()
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _record_facts(record: MeasuredRequest, limits: Limits) -> dict[str, object]:
    planned = asdict(record.planned)
    seen = asdict(record)
    del seen["planned"]
    return {
        "index": planned.pop("index"),
        "due_s": planned.pop("time_s"),
        **planned,
        **seen,
        "is_good": limits.are_met(record),
    }


def _plain(value: Any) -> Any:
    """Convert to JSON types: an infinite rate becomes "inf", times are rounded to clock resolution."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return round(value, _DIGITS) if math.isfinite(value) else str(value)
    return value


FORMATS = (".svg", ".png")

_SIZE_INCHES = (10.0, 7.0)
_MS = 1e3


def check_plot(path: Path) -> None:
    """Raises ValueError for an unsupported file extension, or without matplotlib."""
    if path.suffix not in FORMATS:
        raise ValueError(f"{str(path)!r} does not end with one of {', '.join(FORMATS)}")
    try:
        import matplotlib.figure  # noqa: F401 - imported late: it takes a while, and most runs draw nothing
    except ImportError:
        raise ValueError(
            "a plot needs matplotlib: install it with `pip install 'matplotlib>=3.10,<4'`"
        ) from None


def save_plot(run: LoadRun, title: str, path: Path) -> None:
    """Plot TTFT and ITL distributions, throughput and concurrency."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")  # no window: rendered with Agg or as SVG
    figure.suptitle(title)
    axes = figure.subplots(2, 2)
    completed = [record for record in run.records if record.is_complete]
    _draw_cdf(axes[0, 0], "time to first token", [record.ttft_s for record in completed])
    _draw_cdf(axes[0, 1], "inter-token latency", [gap_s for record in completed for gap_s in record.gaps_s])
    course = timeline(run)
    edges_s = np.arange(len(course.concurrency) + 1) * course.interval_s
    _draw_course(axes[1, 0], "output tokens per second", course.output_tokens_per_s, edges_s.tolist())
    _draw_course(axes[1, 1], "requests running", course.concurrency, edges_s.tolist())
    figure.savefig(path)


def _draw_cdf(axes: Axes, name: str, values_s: list[float]) -> None:
    values_ms = np.sort(np.array(values_s)) * _MS
    if values_ms.size:
        axes.ecdf(values_ms)
        for percent in (50, 99):
            at_ms = float(np.percentile(values_ms, percent))
            axes.axvline(at_ms, linestyle=":", color="gray")
            axes.annotate(f" p{percent} {at_ms:.1f} ms", (at_ms, percent / 100), va="top")
    axes.set(xlabel=f"{name} [ms]", ylabel="share of samples", xlim=(0, None), ylim=(0, 1))


def _draw_course(axes: Axes, name: str, values: list[float], edges_s: list[float]) -> None:
    axes.stairs(values, edges_s, fill=True, alpha=0.6)
    axes.set(xlabel="time [s]", ylabel=name, xlim=(0, edges_s[-1]), ylim=(0, None))


MAX_LAG_S = 0.02
MAX_CPU_SHARE = 0.8

_NOTHING = "-"
_NAME_WIDTH = 22
_EXPLANATION = """\
TTFT and E2E count from when a request was due. ITL is the time from one message
with tokens to the next, TPOT the mean per output token after the first."""


def report_view(summary: Summary, limits: Limits) -> RenderableType:
    """Counts and rates, then the latencies in milliseconds."""
    facts = "\n".join(f"{name:<{_NAME_WIDTH}}{value}" for name, value in _facts(summary, limits))
    return Group(Text(facts), "", _latency_table(summary), "", Text(_EXPLANATION))


def warnings_of(summary: Summary) -> list[str]:
    """Warnings that the load generator, not the cluster, may have limited the results."""
    found = []
    if summary.lag_s is not None and summary.lag_s.p99 > MAX_LAG_S:
        found.append(
            f"requests were {_describe_lag(summary.lag_s)}: the load generator was a bottleneck; "
            "latencies count its delay"
        )
    if summary.cpu_share > MAX_CPU_SHARE:
        found.append(
            f"the load generator took {summary.cpu_share:.0%} of a core and may have been the bottleneck"
        )
    return found


def _facts(summary: Summary, limits: Limits) -> Iterator[tuple[str, str]]:
    yield "Requests", _describe_requests(summary)
    for status, count in summary.failures.items():
        yield f"  {status}", f"{count} failed"
    yield "Duration", f"{summary.duration_s:.2f} s"
    yield "Request throughput", f"{summary.requests_per_s:.2f} requests/s"
    if limits.are_given:
        share = summary.num_good / summary.num_due if summary.num_due else 0.0
        yield (
            "Goodput",
            f"{summary.goodput_per_s:.2f} requests/s, {share:.1%} within {describe_limits(limits)}",
        )
    yield "Input throughput", f"{summary.input_tokens_per_s:.1f} tokens/s{_cached(summary)}"
    yield "Output throughput", f"{summary.output_tokens_per_s:.1f} tokens/s{_per_message(summary)}"
    yield "Concurrency", f"{summary.mean_concurrency:.1f} on average, {summary.max_concurrency} at most"
    if summary.restarts:
        yield "Restarts", f"{summary.restarts}: requests recomputed"
    yield "Load generator", _describe_generator(summary)


def describe_limits(limits: Limits) -> str:
    """The limits that are set, in milliseconds."""
    named = {"TTFT": limits.ttft_s, "ITL": limits.itl_s, "TPOT": limits.tpot_s, "E2E": limits.e2e_s}
    return ", ".join(f"{name} {limit_s * 1e3:g} ms" for name, limit_s in named.items() if limit_s is not None)


def _describe_requests(summary: Summary) -> str:
    counts = {
        "completed": summary.num_completed,
        "failed": summary.num_failed,
        "interrupted": summary.num_interrupted,
        "unsent": summary.num_planned - summary.num_due,
    }
    told = [f"{count} {what}" for what, count in counts.items() if count or what in ("completed", "failed")]
    return f"{summary.num_planned} planned: {', '.join(told)}"


def _cached(summary: Summary) -> str:
    if not summary.cached_tokens:
        return ""
    return f", {summary.cached_tokens / summary.input_tokens:.1%} of them from the cache"


def _per_message(summary: Summary) -> str:
    if summary.tokens_per_message is None:
        return ""
    return f", {summary.tokens_per_message:.2f} a message"


def _describe_generator(summary: Summary) -> str:
    lag = summary.lag_s
    sent = "nothing sent" if lag is None else _describe_lag(lag)
    return f"{sent}; {summary.cpu_share:.0%} of a core"


def _describe_lag(lag_s: SampleSummary) -> str:
    return f"sent late by {_ms(lag_s.p99)} ms (p99), {_ms(lag_s.max)} ms (max)"


def _latency_table(summary: Summary) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, padding=0)
    table.add_column("Milliseconds")
    for column in ("samples", "mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(column, justify="right", min_width=8)
    for name, values in _latencies(summary):
        table.add_row(name, *_cells(values))
    return table


def _latencies(summary: Summary) -> Iterator[tuple[str, SampleSummary | None]]:
    yield "TTFT", summary.ttft_s
    yield "ITL", summary.itl_s
    yield "TPOT", summary.tpot_s
    yield "E2E", summary.e2e_s
    if summary.slot_wait_s is not None and summary.slot_wait_s.max > 0:
        yield "Wait to be sent", summary.slot_wait_s


def _cells(values: SampleSummary | None) -> tuple[str, ...]:
    if values is None:
        return (_NOTHING,) * 7
    shown = (values.mean, values.p50, values.p90, values.p95, values.p99, values.max)
    return str(values.num_samples), *map(_ms, shown)


def _ms(time_s: float) -> str:
    return f"{time_s * 1e3:.1f}"
