"""A request's waterfall for a terminal: rows of characters on a time axis, totals, and the sentence."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from telemetry.spans import Attr
from telemetry.trace_view.explain import explain, format_seconds
from telemetry.trace_view.read_model import NS_PER_S, RequestTrace, StageWork
from telemetry.trace_view.slow_stage import slowest_stage
from telemetry.trace_view.waterfall import STAGE_KINDS, Row, Segment, SegmentKind, Waterfall, waterfall

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
