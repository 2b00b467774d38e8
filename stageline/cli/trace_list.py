"""Recent requests as a table, a line each."""

from datetime import datetime
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stageline_rpc.v1 import telemetry_pb2
from telemetry.slowness import stands_out
from telemetry.trace_view.explain import format_seconds
from telemetry.trace_view.read_model import NS_PER_S, printable

_NOTHING = "-"
_WIDTH_OF_IDS = 104
"""Whole ids fit from here on. Below, their ends are shown: they begin with a time, and so all alike."""
_COLUMNS = {
    "Request": "left",
    "When": "left",
    "State": "left",
    "Tokens": "right",
    "Queue": "right",
    "First": "right",
    "Total": "right",
    "Slowest": "left",
}


def trace_list_view(response: telemetry_pb2.ListTracesResponse, *, width: int) -> RenderableType:
    """What `stageline trace` shows without a request; fits into 80 columns."""
    if not response.traces:
        return Text("No request has been traced yet.")
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, padding=(0, 1, 0, 0))
    for name, side in _COLUMNS.items():
        table.add_column(name, justify="right" if side == "right" else "left", no_wrap=True)
    for each in response.traces:
        table.add_row(*_row(each, is_wide=width >= _WIDTH_OF_IDS))
    remarks = [
        "Tokens: prompt + completion. First: time to the first token.",
        "Slowest: the stage that computed longest, and how many times as long as the median of the others.",
        "stageline trace REQUEST shows one of them.",
    ]
    if response.num_dropped_traces:
        remarks.append(f"{response.num_dropped_traces} older traces have made room.")
    return Group(table, "", Text("\n".join(remarks), style="dim"))


def trace_list_facts(response: telemetry_pb2.ListTracesResponse) -> dict[str, Any]:
    """The same for programs, with the names and units of `telemetry.trace_view.facts`."""
    return {
        "traces": [_facts(each) for each in response.traces],
        "num_dropped_traces": response.num_dropped_traces,
        "num_dropped_spans": response.num_dropped_spans,
    }


def _facts(each: telemetry_pb2.TraceSummary) -> dict[str, Any]:
    return {
        "request_id": each.request_id,
        "trace_id": each.trace_id,
        "started_at": each.started_at_ns / NS_PER_S,
        "duration_s": each.duration_s,
        "outcome": each.outcome,
        "prompt_tokens": each.prompt_tokens,
        "completion_tokens": each.completion_tokens,
        "time_in_queue_s": each.time_in_queue_s if each.HasField("time_in_queue_s") else None,
        "time_to_first_token_s": (
            each.time_to_first_token_s if each.HasField("time_to_first_token_s") else None
        ),
        "slowest_stage": _slowest_facts(each.slowest_stage) if each.HasField("slowest_stage") else None,
        "preemptions": each.preemptions,
        "recoveries": each.recoveries,
        "spans": each.spans,
    }


def _slowest_facts(slow: telemetry_pb2.SlowestStage) -> dict[str, Any]:
    return {
        "stage": slow.stage,
        "worker": slow.worker,
        "layer_begin": slow.layer_begin,
        "layer_end": slow.layer_end,
        "compute_s": slow.compute_s,
        "times_the_others": slow.times_the_others if slow.HasField("times_the_others") else None,
    }


def _row(each: telemetry_pb2.TraceSummary, *, is_wide: bool) -> tuple[Text, ...]:
    """Texts, because strings would be read as markup."""
    return (
        _text(each.request_id if is_wide else each.request_id[-8:]),
        Text(datetime.fromtimestamp(each.started_at_ns / NS_PER_S).strftime("%H:%M:%S")),
        _text(each.outcome, style="" if each.outcome == "finished" else "red"),
        Text(f"{each.prompt_tokens}+{each.completion_tokens}"),
        Text(format_seconds(each.time_in_queue_s) if each.HasField("time_in_queue_s") else _NOTHING),
        Text(
            format_seconds(each.time_to_first_token_s) if each.HasField("time_to_first_token_s") else _NOTHING
        ),
        Text(format_seconds(each.duration_s)),
        _slowest(each),
    )


def _slowest(each: telemetry_pb2.TraceSummary) -> Text:
    if not each.HasField("slowest_stage"):
        return Text(_NOTHING)
    slow = each.slowest_stage
    if not slow.HasField("times_the_others"):
        return _text(f"{slow.stage} {slow.worker}")
    style = "bold yellow" if stands_out(slow.times_the_others) else ""
    return _text(f"{slow.stage} {slow.worker} {slow.times_the_others:.1f}x", style=style)


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)
