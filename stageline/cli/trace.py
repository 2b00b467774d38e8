"""`stageline trace`: recent requests, and the time of one request by cause."""

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
    MIN_ID_PART,
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

MAX_LABEL = 22
_MIN_CELLS = 20
_TICK_CELLS = 12


@dataclass(frozen=True, slots=True)
class _Glyph:
    """Character and colour of a segment kind; the character alone identifies it."""

    character: str
    style: str


_GLYPHS = {
    SegmentKind.BODY: _Glyph("b", "white"),
    SegmentKind.PROMPT: _Glyph("t", "green"),
    SegmentKind.ACCEPT: _Glyph("a", "yellow"),
    SegmentKind.RESPONSE: _Glyph("=", "cyan"),
    SegmentKind.INTAKE: _Glyph("i", "white"),
    SegmentKind.QUEUE: _Glyph("q", "yellow"),
    SegmentKind.PREFILL: _Glyph("p", "cyan"),
    SegmentKind.DECODE: _Glyph("d", "blue"),
    SegmentKind.PREEMPTION: _Glyph("x", "magenta"),
    SegmentKind.RECOVERY: _Glyph("!", "bold red"),
    SegmentKind.HOP: _Glyph(">", "magenta"),
    SegmentKind.RECEIVE: _Glyph("r", "cyan"),
    SegmentKind.WAIT: _Glyph("-", "yellow"),
    SegmentKind.COMPUTE: _Glyph("#", "green"),
    SegmentKind.SEND: _Glyph("s", "blue"),
}


def waterfall_view(trace: RequestTrace, *, width: int) -> RenderableType:
    """The output of `stageline trace REQUEST_ID`, in lines of `width` characters."""
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
    began = datetime.fromtimestamp(trace.start_ns / NS_PER_S).strftime("%Y-%m-%d %H:%M:%S")
    tokens = (
        f"{root.number(Attr.PROMPT_TOKENS)} prompt tokens, {root.number(Attr.COMPLETION_TOKENS)} generated"
    )
    lines = [f"Request {trace.request_id}, {trace.outcome}", f"{began}, {tokens}", f"Trace {trace.trace_id}"]
    if root.error:
        lines.append(f"Error: {root.error}")
    return "\n".join(lines)


def _picture(view: Waterfall, width: int) -> Iterable[Text]:
    labels = [_label(row) for row in view.rows]
    label_width = min(MAX_LABEL, max(map(len, labels), default=0))
    num_cells = max(_MIN_CELLS, width - label_width - 2)
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
    """Time axis with a label at each tick, the last one right-aligned."""
    if end_s <= 0:
        return "|0 s".ljust(num_cells)
    line, end = "|0 s", f"{format_seconds(end_s)}|"
    for cell in range(_TICK_CELLS, num_cells - len(end) - _TICK_CELLS + 1, _TICK_CELLS):
        line = line.ljust(cell) + "|" + format_seconds(end_s * cell / num_cells)
    return line.ljust(num_cells - len(end)) + end


def _bar(segments: Iterable[Segment], end_s: float, num_cells: int) -> Text:
    """Each cell shows the kind with the most time in it."""
    bar = Text()
    for seconds in _cells(segments, end_s, num_cells):
        kind = max(seconds, key=seconds.__getitem__, default=None)
        glyph = _Glyph(" ", "") if kind is None else _GLYPHS[kind]
        bar.append(glyph.character, glyph.style)
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
    """Legend of the kinds in the view."""
    kinds = {segment.kind for row in view.rows for segment in row.segments}
    legend = Text()
    for of_stages in (False, True):
        for kind in (kind for kind in SegmentKind if kind in kinds and (kind in STAGE_KINDS) == of_stages):
            glyph = _GLYPHS[kind]
            legend.append(glyph.character, glyph.style).append(f" {kind.value}  ")
        legend.append("\n")
    if any(segment.is_share for row in view.rows for segment in row.segments):
        legend.append(
            "Decode steps are merged: segment lengths are totals, positions are not measured.", "dim"
        )
    legend.rstrip()
    return legend


def _stage_table(trace: RequestTrace) -> RenderableType:
    if not trace.stages:
        return Text("No spans of stages.")
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, padding=(0, 1, 0, 0))
    for name in ("Stage", "Layers", "Steps", "Batch", "Hop", "Receive", "Wait", "Compute", "Send"):
        table.add_column(name, justify="left" if name == "Stage" else "right", no_wrap=name != "Stage")
    slow = slowest_stage(trace)
    for work in trace.stages:
        stands_out = slow is not None and slow.stands_out and slow.place == work.place
        table.add_row(*_stage_row(work), style="bold" if stands_out else "")
    return table


def _stage_row(work: StageWork) -> tuple[Text, ...]:
    """Cells as Text, since rich would parse strings as markup."""
    times = work.times
    spent = (times.hop_s, times.receive_s, times.wait_s, times.compute_s, times.send_s)
    cells = (
        f"{work.place.index} {_shortened(work.place.worker, MAX_LABEL)}",
        work.place.layers,
        str(work.num_steps),
        f"{work.mean_batch_size:.1f}",
        *map(format_seconds, spent),
    )
    return tuple(map(Text, cells))


_NOTHING = "-"
_WHOLE_IDS_WIDTH = 104
"""Minimum width for whole ids; below it their ends are shown, since their beginnings are timestamps."""
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
    """The output of `stageline trace` without a request; fits into 80 columns."""
    if not response.traces:
        return Text("No traces yet.")
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, padding=(0, 1, 0, 0))
    for name, side in _COLUMNS.items():
        table.add_column(name, justify="right" if side == "right" else "left", no_wrap=True)
    for summary in response.traces:
        table.add_row(*_row(summary, is_wide=width >= _WHOLE_IDS_WIDTH))
    notes = [
        "Tokens: prompt + completion. First: time to the first token.",
        "Slowest: the stage with the highest compute time, and its ratio to the median of the others.",
        "Details: stageline trace REQUEST",
    ]
    if response.num_dropped_traces:
        notes.append(f"{response.num_dropped_traces} older traces were evicted.")
    return Group(table, "", Text("\n".join(notes), style="dim"))


def _row(summary: telemetry_pb2.TraceSummary, *, is_wide: bool) -> tuple[Text, ...]:
    """Cells as Text, since rich would parse strings as markup."""
    return (
        _text(summary.request_id if is_wide else summary.request_id[-8:]),
        Text(datetime.fromtimestamp(summary.started_at.seconds).strftime("%H:%M:%S")),
        _text(summary.outcome, style="" if summary.outcome == "finished" else "red"),
        Text(f"{summary.prompt_tokens}+{summary.completion_tokens}"),
        Text(_seconds(summary.time_in_queue) if summary.HasField("time_in_queue") else _NOTHING),
        Text(_seconds(summary.time_to_first_token) if summary.HasField("time_to_first_token") else _NOTHING),
        Text(_seconds(summary.duration)),
        _slowest(summary),
    )


def _seconds(duration: Duration) -> str:
    return format_seconds(duration.ToMicroseconds() / 1e6)


def _slowest(summary: telemetry_pb2.TraceSummary) -> Text:
    if not summary.HasField("slowest_stage"):
        return Text(_NOTHING)
    slow = summary.slowest_stage
    if not slow.HasField("ratio_to_median"):
        return _text(f"{slow.stage} {slow.worker}")
    style = "bold yellow" if stands_out(slow.ratio_to_median) else ""
    return _text(f"{slow.stage} {slow.worker} {slow.ratio_to_median:.1f}x", style=style)


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)


TOO_SHORT = (
    "{!r} is too short: give at least " + str(MIN_ID_PART) + " characters of the beginning or end of a "
    "request id; `stageline trace` without an id lists recent requests"
)


def trace(
    request_id: Annotated[
        str | None,
        typer.Argument(
            metavar="[REQUEST_ID]",
            help="Request id, or its beginning or end (default: list recent requests).",
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
        int | None,
        typer.Option("--limit", "-n", metavar="N", min=1, help="Maximum requests to list (default: 20)."),
    ] = None,
    coordinator: options.Coordinator = DEFAULT_ADDRESS,
    tls_dir: options.TlsDirectory = None,
) -> int:
    """List recent requests, or show the time of one request by cause and stage."""
    client = Client(coordinator, tls_dir=tls_dir)
    if request_id is None:
        if perfetto_file is not None:
            raise typer.BadParameter("--perfetto needs a request id")
        _list(asyncio.run(_traces(client, limit or 20)), as_json=as_json)
        return 0
    if len(request_id.strip()) < MIN_ID_PART:
        raise typer.BadParameter(TOO_SHORT.format(request_id))
    if limit is not None:
        raise typer.BadParameter("--limit applies to the list: omit it with a request id")
    _show(asyncio.run(_trace(client, request_id)), perfetto_file, as_json=as_json)
    return 0


def _show(found: RequestTrace, perfetto_file: Path | None, *, as_json: bool) -> None:
    if perfetto_file is not None:
        _write(perfetto_file, perfetto(found))
    if as_json:
        print(json.dumps(trace_facts(found), indent=2))
    else:
        Console().print(waterfall_view(found, width=Console().width))


async def _traces(client: Client, limit: int) -> telemetry_pb2.ListTracesResponse:
    async with client:
        return await client.traces(limit)


async def _trace(client: Client, request_id: str) -> RequestTrace:
    async with client:
        try:
            response = await client.trace(request_id)
        except RequestNotFound as error:
            text = f"{error.message}; list stored traces with `stageline trace`"
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
