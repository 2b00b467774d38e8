"""What a load has shown, as tables for a terminal of 80 columns."""

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stageline.load.metrics import Distribution, Limits, Summary

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
    """Where the load generator itself, and not the cluster, may have set the pace."""
    found = []
    if summary.lag_s is not None and summary.lag_s.p99 > MAX_LAG_S:
        found.append(
            f"requests were {_describe_lag(summary.lag_s)}: the load generator was a bottleneck, and "
            "latencies count its delay"
        )
    if summary.cpu_share > MAX_CPU_SHARE:
        found.append(
            f"the load generator took {summary.cpu_share:.0%} of a core: it may have been the bottleneck"
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
        yield "Restarts", f"{summary.restarts}: requests that were computed again"
    yield "Load generator", _describe_generator(summary)


def describe_limits(limits: Limits) -> str:
    """The limits that are given, in milliseconds."""
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


def _describe_lag(lag_s: Distribution) -> str:
    return f"sent late by {_ms(lag_s.p99)} ms (p99), {_ms(lag_s.max)} ms (max)"


def _latency_table(summary: Summary) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, padding=0)
    table.add_column("Milliseconds")
    for column in ("samples", "mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(column, justify="right", min_width=8)
    for name, values in _latencies(summary):
        table.add_row(name, *_cells(values))
    return table


def _latencies(summary: Summary) -> Iterator[tuple[str, Distribution | None]]:
    yield "TTFT", summary.ttft_s
    yield "ITL", summary.itl_s
    yield "TPOT", summary.tpot_s
    yield "E2E", summary.e2e_s
    if summary.slot_wait_s is not None and summary.slot_wait_s.max > 0:
        yield "Wait to be sent", summary.slot_wait_s


def _cells(values: Distribution | None) -> tuple[str, ...]:
    if values is None:
        return (_NOTHING,) * 7
    shown = (values.mean, values.p50, values.p90, values.p95, values.p99, values.max)
    return str(values.num_samples), *map(_ms, shown)


def _ms(time_s: float) -> str:
    return f"{time_s * 1e3:.1f}"
