"""`stageline trace`: where the time of a request went."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from google.protobuf.duration_pb2 import Duration
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from stageline.cli import options
from stageline.cli.options import CommandFailed
from stageline.client.client import Client
from stageline.client.errors import RequestNotFound
from stageline_rpc.v1 import telemetry_pb2
from telemetry.spans import Attr
from telemetry.trace_view.explain import explain, format_seconds, slowest_stage, stands_out
from telemetry.trace_view.facts import trace_facts
from telemetry.trace_view.perfetto import perfetto
from telemetry.trace_view.read_model import (
    NS_PER_S,
    RequestTrace,
    StageWork,
    printable,
    read_spans,
    request_trace,
)
from telemetry.trace_view.waterfall import STAGE_KINDS, Row, Segment, SegmentKind, Waterfall, waterfall
from wire.addresses import DEFAULT_ADDRESS
from wire.errors import reason_of
from wire.status_codec import message_fields

MOST_LABEL = 22
_LEAST_BARS = 20
_TICKS_APART = 12


@dataclass(frozen=True, slots=True)
class _Look:
    """How a kind is told from the others, with colours and without."""

    character: str
    style: str


_LOOKS = {
    SegmentKind.INTAKE: _Look("i", "white"),
    SegmentKind.QUEUE: _Look("q", "yellow"),
    SegmentKind.PREFILL: _Look("p", "cyan"),
    SegmentKind.DECODE: _Look("d", "blue"),
    SegmentKind.PREEMPTION: _Look("x", "magenta"),
    SegmentKind.RECOVERY: _Look("!", "bold red"),
    SegmentKind.HOP: _Look(">", "magenta"),
    SegmentKind.RECEIVE: _Look("r", "cyan"),
    SegmentKind.WAIT: _Look("-", "yellow"),
    SegmentKind.COMPUTE: _Look("#", "green"),
    SegmentKind.SEND: _Look("s", "blue"),
}


def waterfall_view(trace: RequestTrace, *, width: int) -> RenderableType:
    """Everything that `stageline trace REQUEST_ID` shows, in lines of `width` characters."""
    view = waterfall(trace)
    return Group(
        Text(_headline(trace), overflow="fold"),
        "",
        *_picture(view, width),
        "",
        _legend(view),
        "",
        _stage_table(trace),
        "",
        Text(explain(trace), style="bold"),
    )


def _headline(trace: RequestTrace) -> str:
    root = trace.root
    began = datetime.fromtimestamp(root.start_ns / NS_PER_S).strftime("%Y-%m-%d %H:%M:%S")
    tokens = (
        f"{root.number(Attr.PROMPT_TOKENS)} prompt tokens, {root.number(Attr.COMPLETION_TOKENS)} generated"
    )
    lines = [f"Request {trace.request_id}, {trace.outcome}", f"{began}, {tokens}", f"Trace {trace.trace_id}"]
    if root.error:
        lines.append(f"Error: {root.error}")
    return "\n".join(lines)


def _picture(view: Waterfall, width: int) -> Iterable[Text]:
    labels = [_label(row) for row in view.rows]
    label_width = min(MOST_LABEL, max(map(len, labels), default=0))
    num_cells = max(_LEAST_BARS, width - label_width - 2)
    yield Text(" " * (label_width + 1) + _axis(view.end_s, num_cells), style="dim", no_wrap=True)
    for label, row in zip(labels, view.rows, strict=True):
        line = Text(f"{_shortened(label, label_width):<{label_width}} ", no_wrap=True, overflow="crop")
        line.append_text(_bar(row.segments, view.end_s, num_cells))
        yield line


def _label(row: Row) -> str:
    return row.title if row.place is None else f"{row.title} {row.place.worker}"


def _shortened(label: str, width: int) -> str:
    return label if len(label) <= width else f"{label[: width - 3]}..."


def _axis(end_s: float, num_cells: int) -> str:
    """Times from left to right, each where it begins; the last one where it ends. Without a length, one."""
    if end_s <= 0:
        return "|0 s".ljust(num_cells)
    line, end = "|0 s", f"{format_seconds(end_s)}|"
    for cell in range(_TICKS_APART, num_cells - len(end) - _TICKS_APART + 1, _TICKS_APART):
        line = line.ljust(cell) + "|" + format_seconds(end_s * cell / num_cells)
    return line.ljust(num_cells - len(end)) + end


def _bar(segments: Iterable[Segment], end_s: float, num_cells: int) -> Text:
    """Each cell shows what takes longest in it."""
    bar = Text()
    for seconds in _cells(segments, end_s, num_cells):
        kind = max(seconds, key=seconds.__getitem__, default=None)
        look = _Look(" ", "") if kind is None else _LOOKS[kind]
        bar.append(look.character, look.style)
    return bar


def _cells(segments: Iterable[Segment], end_s: float, num_cells: int) -> list[dict[SegmentKind, float]]:
    cells: list[dict[SegmentKind, float]] = [defaultdict(float) for _ in range(num_cells)]
    cell_s = end_s / num_cells
    if cell_s <= 0:
        return cells
    for segment in segments:
        first = min(num_cells - 1, max(0, int(segment.start_s / cell_s)))
        last = min(num_cells - 1, max(first, int(segment.end_s / cell_s)))
        for cell in range(first, last + 1):
            inside_s = min(segment.end_s, (cell + 1) * cell_s) - max(segment.start_s, cell * cell_s)
            if inside_s > 0:
                cells[cell][segment.kind] += inside_s
    return cells


def _legend(view: Waterfall) -> Text:
    """Of what can be seen."""
    kinds = {segment.kind for row in view.rows for segment in row.segments}
    legend = Text()
    for of_stages in (False, True):
        for kind in (kind for kind in SegmentKind if kind in kinds and (kind in STAGE_KINDS) == of_stages):
            look = _LOOKS[kind]
            legend.append(look.character, look.style).append(f" {kind.value}  ")
        legend.append("\n")
    if any(segment.is_share for row in view.rows for segment in row.segments):
        legend.append("Many decode steps are drawn as one: how much of each, and not when.", "dim")
    legend.rstrip()
    return legend


def _stage_table(trace: RequestTrace) -> RenderableType:
    if not trace.stages:
        return Text("No stage has told what it did.")
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, padding=(0, 1, 0, 0))
    for name in ("Stage", "Layers", "Steps", "Batch", "Hop", "Receive", "Wait", "Compute", "Send"):
        table.add_column(name, justify="left" if name == "Stage" else "right", no_wrap=name != "Stage")
    slow = slowest_stage(trace)
    for work in trace.stages:
        stands_out = slow is not None and slow.stands_out and slow.place == work.place
        table.add_row(*_stage_row(work), style="bold" if stands_out else "")
    return table


def _stage_row(work: StageWork) -> tuple[Text, ...]:
    """Texts, because strings would be read as markup."""
    times = work.times
    spent = (times.hop_s, times.receive_s, times.wait_s, times.compute_s, times.send_s)
    cells = (
        f"{work.place.index} {_shortened(work.place.worker, MOST_LABEL)}",
        work.place.layers,
        str(work.num_steps),
        f"{work.mean_batch_size:.1f}",
        *map(format_seconds, spent),
    )
    return tuple(map(Text, cells))


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


def _row(each: telemetry_pb2.TraceSummary, *, is_wide: bool) -> tuple[Text, ...]:
    """Texts, because strings would be read as markup."""
    return (
        _text(each.request_id if is_wide else each.request_id[-8:]),
        Text(datetime.fromtimestamp(each.started_at.seconds).strftime("%H:%M:%S")),
        _text(each.outcome, style="" if each.outcome == "finished" else "red"),
        Text(f"{each.prompt_tokens}+{each.completion_tokens}"),
        Text(_seconds(each.time_in_queue) if each.HasField("time_in_queue") else _NOTHING),
        Text(_seconds(each.time_to_first_token) if each.HasField("time_to_first_token") else _NOTHING),
        Text(_seconds(each.duration)),
        _slowest(each),
    )


def _seconds(duration: Duration) -> str:
    return format_seconds(duration.ToMicroseconds() / 1e6)


def _slowest(each: telemetry_pb2.TraceSummary) -> Text:
    if not each.HasField("slowest_stage"):
        return Text(_NOTHING)
    slow = each.slowest_stage
    if not slow.HasField("ratio_to_median"):
        return _text(f"{slow.stage} {slow.worker}")
    style = "bold yellow" if stands_out(slow.ratio_to_median) else ""
    return _text(f"{slow.stage} {slow.worker} {slow.ratio_to_median:.1f}x", style=style)


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)


LEAST_PART = 4
"""Characters of an id that the coordinator looks for."""


def trace(
    request_id: Annotated[
        str | None,
        typer.Argument(
            metavar="[REQUEST_ID]",
            help="Id of a request, or the beginning or end of it; without it, recent requests are listed.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    perfetto_file: Annotated[
        Path | None,
        typer.Option(
            "--perfetto",
            metavar="FILE",
            dir_okay=False,
            help="File for the trace in the format of ui.perfetto.dev.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", metavar="N", min=1, help="Requests to list (default: 20).")
    ] = None,
    coordinator: options.Coordinator = DEFAULT_ADDRESS,
) -> int:
    """List recent requests, or show where the time of one went: stage by stage, and in a sentence."""
    if request_id is None:
        if perfetto_file is not None:
            raise typer.BadParameter("--perfetto is for one request: give its id")
        _list(asyncio.run(_traces(coordinator, limit or 20)), as_json=as_json)
        return 0
    if len(request_id.strip()) < LEAST_PART:
        raise typer.BadParameter(
            f"{request_id!r} is too short: give at least {LEAST_PART} characters of a request's id, its "
            "beginning or its end; `stageline trace` without an id lists recent requests"
        )
    if limit is not None:
        raise typer.BadParameter("--limit is for the list: it does not go with a request")
    _show(asyncio.run(_trace(coordinator, request_id)), perfetto_file, as_json=as_json)
    return 0


def _show(found: RequestTrace, perfetto_file: Path | None, *, as_json: bool) -> None:
    if perfetto_file is not None:
        _write(perfetto_file, perfetto(found))
    if as_json:
        print(json.dumps(trace_facts(found), indent=2))
    else:
        Console().print(waterfall_view(found, width=Console().width))


async def _traces(coordinator: str, limit: int) -> telemetry_pb2.ListTracesResponse:
    async with Client(coordinator) as client:
        return await client.traces(limit)


async def _trace(coordinator: str, request_id: str) -> RequestTrace:
    async with Client(coordinator) as client:
        try:
            response = await client.trace(request_id)
        except RequestNotFound as error:
            text = f"{error.message}; `stageline trace` lists those that are"
            raise CommandFailed(text, reason=error.reason) from None
    return request_trace(read_spans(TracesData.FromString(response.traces_data)), response.request_id)


def _list(response: telemetry_pb2.ListTracesResponse, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(message_fields(response), indent=2))
    else:
        console = Console()
        console.print(trace_list_view(response, width=console.width))


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(content), encoding="utf-8")
    except OSError as error:
        text = f"cannot write {path}: {error.strerror}"
        raise CommandFailed(text, reason=reason_of(error)) from None
