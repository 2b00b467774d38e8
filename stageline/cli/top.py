"""`stageline top`: live pipeline activity."""

import asyncio
import contextlib
import os
import sys
import termios
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stageline.cli import options
from stageline.cli.tables import describe_cluster, enum_text, workers_by_stage
from stageline.client.client import Client
from stageline.client.errors import StagelineError, Unavailable
from stageline_rpc.v1 import cluster_pb2, telemetry_pb2
from telemetry.trace_view.explain import format_seconds, three_digits
from wire.addresses import DEFAULT_ADDRESS
from wire.sizes import format_size


def format_duration(seconds: float) -> str:
    """Format as 12.3 s, 812 ms or 85 us; from two minutes on as 2 min 5 s."""
    if seconds >= 120:
        minutes, rest = divmod(int(seconds), 60)
        return f"{minutes} min {rest} s"
    return format_seconds(seconds)


def format_rate(per_second: float) -> str:
    """Format as 12300, 98.4, 7.12 or 0."""
    return "0" if per_second == 0 else three_digits(per_second)


WINDOW_US = 3_000_000
_SHADES = "·░▒▓█"
"""By the stage's compute share of a column's time; the first is a bubble."""
_LABEL = 7
_MAX_COLUMNS = 150


def pipeline_rows(activity: telemetry_pb2.GetActivityResponse, *, width: int) -> list[Text]:
    """A heading and a row per stage; empty without recently answered steps.

    While steps are in flight, the window ends with the last answer, because later times are not known yet.
    """
    num_stages = len(activity.stages)
    if not num_stages or not activity.steps:
        return []
    columns = max(10, min(_MAX_COLUMNS, width - _LABEL))
    end_us = max(step.answered_us for step in activity.steps) if activity.in_flight else activity.now_us
    begin_us = end_us - WINDOW_US
    title = f"Last {WINDOW_US // 1_000_000} s, {WINDOW_US / columns / 1000:.0f} ms a column: "
    rows = [Text.assemble(title, ("█", "blue"), " decode ", ("█", "yellow"), " prefill  · bubble")]
    for stage in range(num_stages):
        busy = [0.0] * columns
        chunks = [0.0] * columns
        for step in activity.steps:
            if 2 * stage + 1 >= len(step.computed_us):
                continue
            begin, end = (
                (step.sent_us + offset_us - begin_us) / WINDOW_US * columns
                for offset_us in step.computed_us[2 * stage : 2 * stage + 2]
            )
            is_chunk = step.kind != telemetry_pb2.STEP_KIND_DECODE
            _add(busy, begin, end)
            if is_chunk:
                _add(chunks, begin, end)
        rows.append(_row(stage, busy, chunks))
    return rows


def _add(columns: list[float], begin: float, end: float) -> None:
    """Add to each column its share of [begin, end)."""
    for column in range(max(0, int(begin)), min(len(columns), int(end) + 1)):
        columns[column] += max(0.0, min(end, column + 1) - max(begin, column))


def _row(stage: int, busy: Sequence[float], chunks: Sequence[float]) -> Text:
    row = Text(f"{stage:>4}   ")
    for share, chunk in zip(busy, chunks, strict=True):
        level = 0 if share < 0.01 else 1 + min(3, int(share * 4))
        style = "dim" if level == 0 else "yellow" if chunk > share / 2 else "blue"
        row.append(_SHADES[level], style=style)
    return row


_EIGHTHS = " ▏▎▍▌▋▊▉█"
_SPARK = "▁▂▃▄▅▆▇█"
_LIVE = frozenset(
    {
        telemetry_pb2.REQUEST_PHASE_WAITING,
        telemetry_pb2.REQUEST_PHASE_PREFILL,
        telemetry_pb2.REQUEST_PHASE_DECODE,
        telemetry_pb2.REQUEST_PHASE_PREEMPTED,
        telemetry_pb2.REQUEST_PHASE_RECOVERING,
    }
)
_PHASE_STYLE = {
    telemetry_pb2.REQUEST_PHASE_PREEMPTED: "yellow",
    telemetry_pb2.REQUEST_PHASE_RECOVERING: "yellow",
    telemetry_pb2.REQUEST_PHASE_CANCELLED: "yellow",
    telemetry_pb2.REQUEST_PHASE_FAILED: "red",
}
_MAX_REQUESTS = 20
_WIDE = 110


@dataclass(frozen=True, slots=True)
class TopFrame:
    """Status and activity at one moment."""

    status: cluster_pb2.GetStatusResponse
    activity: telemetry_pb2.GetActivityResponse


def top_view(frame: TopFrame, *, width: int, height: int | None = None) -> RenderableType:
    """Build the view in `width` columns; `height` limits the requests shown."""
    rows = pipeline_rows(frame.activity, width=width)
    above: list[RenderableType] = [
        Text(describe_cluster(frame.status)),
        _summary(frame.activity),
        Text(),
        _rates_table(frame, width=width),
        Text(),
        _stages(frame, width=width),
        *([Text(), *rows] if rows else []),
        Text(),
    ]
    num_stages = max(1, len(workers_by_stage(frame.status)))
    used = 14 + num_stages + (len(rows) + 1 if rows else 0)
    room = _MAX_REQUESTS if height is None else max(1, min(_MAX_REQUESTS, height - used))
    return Group(*above, _requests(frame.activity, most=room, width=width))


def _summary(activity: telemetry_pb2.GetActivityResponse) -> Text:
    slow = activity.HasField("slowest_stage")
    return Text(activity.summary, style="bold yellow" if slow else "")


def _rates_table(frame: TopFrame, *, width: int) -> Table:
    rates, counts = frame.activity.rates, frame.status.requests
    table = Table.grid(padding=(0, 2))
    spark_width = max(8, min(60, width - 62))
    seconds = frame.activity.seconds
    now_us = frame.activity.now_us
    table.add_row(
        "Generated",
        f"{format_rate(rates.generated_tokens)} tokens/s",
        f"{format_rate(rates.steps)} steps/s",
        _spark(_per_second(seconds, "generated_tokens", now_us, spark_width), "blue"),
    )
    table.add_row(
        "Prefilled",
        f"{format_rate(rates.prefill_tokens)} tokens/s",
        f"{counts.cached_tokens / max(1, counts.prompt_tokens):.0%} cached".replace("%", " %"),
        _spark(_per_second(seconds, "prefill_tokens", now_us, spark_width), "yellow"),
    )
    table.add_row("First token", *_quantiles(rates.first_token))
    table.add_row("Between tokens", *_quantiles(rates.inter_token))
    table.add_row(
        "Requests",
        f"{counts.prefill + counts.decode} running, {counts.waiting} waiting",
        f"{format_rate(rates.requests_finished)} done/s",
        Text(f"{counts.steps_in_flight} in flight"),
    )
    if frame.activity.stages:
        table.add_row("Bubbles", _bubbles(frame.activity), "", Text())
    return table


def _bubbles(activity: telemetry_pb2.GetActivityResponse) -> str:
    known = activity.HasField("bubble_share")
    return f"{activity.bubble_share * 100:.0f} % of stages' time" if known else "-"


def _quantiles(found: telemetry_pb2.Quantiles) -> tuple[str, str, Text]:
    if not found.count:
        return "-", "", Text()
    return (
        f"p50 {format_duration(found.p50_s)}",
        f"p95 {format_duration(found.p95_s)}",
        Text(f"p99 {format_duration(found.p99_s)}"),
    )


def _per_second(
    seconds: Iterable[telemetry_pb2.SecondActivity], name: str, now_us: int, count: int
) -> list[float]:
    """Values of the last `count` whole seconds, oldest first; 0 for a second without activity."""
    values = {second.start_us // 1_000_000: float(getattr(second, name)) for second in seconds}
    last = now_us // 1_000_000 - 1
    return [values.get(second, 0.0) for second in range(last - count + 1, last + 1)]


def _spark(values: Sequence[float], style: str) -> Text:
    most = max(values, default=0.0)
    if not most:
        return Text("▁" * len(values), style="dim")
    levels = [round(value / most * (len(_SPARK) - 1)) for value in values]
    return Text("".join(_SPARK[level] for level in levels), style=style)


def bar(share: float, width: int) -> str:
    """A bar of `share` (0 to 1) of `width` columns, in eighths."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(width)


def _stages(frame: TopFrame, *, width: int) -> Table:
    is_wide = width >= _WIDE
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, padding=0, pad_edge=False)
    for name in ("Stage", "Worker", "Layers"):
        table.add_column(name, no_wrap=True)
    table.add_column("Busy", no_wrap=True)
    for name in ("Compute", "Wait", "Hop", "KV", "Memory", *(["State"] if is_wide else [])):
        table.add_column(name, justify="right", no_wrap=True)
    bar_width = 16 if is_wide else 8
    for worker in workers_by_stage(frame.status):
        slow = frame.activity.HasField("slowest_stage") and frame.activity.slowest_stage == worker.stage
        layers = f"{worker.layer_begin}-{worker.layer_end - 1}"
        state = enum_text(cluster_pb2.WorkerState.Name(worker.state), "WORKER_STATE_")
        cells = [
            f"{'>' if slow else ' '}{worker.stage}",
            worker.name if state == "ready" or is_wide else f"{worker.name} ({state})",
            layers,
            *_load(frame.activity, worker.stage, bar_width),
            *_kv_and_memory(worker),
            *([state] if is_wide else []),
        ]
        table.add_row(*cells, style="bold yellow" if slow else "")
    return table


def _load(activity: telemetry_pb2.GetActivityResponse, stage: int, width: int) -> tuple[str, ...]:
    if stage >= len(activity.stages):
        return ("-", "-", "-", "-")
    load = activity.stages[stage]
    times = [format_duration(time_us / 1e6) for time_us in (load.compute_us, load.wait_us, load.hop_us)]
    return (f"{bar(load.busy_share, width)} {load.busy_share * 100:3.0f} %", *times)


def _kv_and_memory(worker: cluster_pb2.WorkerStatus) -> tuple[str, str]:
    kv = worker.kv
    num_blocks = kv.blocks_active + kv.blocks_inactive + kv.blocks_free
    held = worker.weight_bytes + worker.kv_bytes
    return (
        f"{kv.blocks_active / num_blocks * 100:.0f} %" if num_blocks else "-",
        format_size(held) if held else "-",
    )


def _requests(activity: telemetry_pb2.GetActivityResponse, *, most: int, width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, padding=0, pad_edge=False)
    table.add_column("Request", no_wrap=True)
    table.add_column("State", no_wrap=True)
    for name in ("Prompt", "Output", "Queue", "First", "Tokens/s", "Total"):
        table.add_column(name, justify="right", no_wrap=True)
    live = [request for request in activity.requests if request.phase in _LIVE]
    ended = [request for request in activity.requests if request.phase not in _LIVE]
    for request in islice([*reversed(live), *ended], most):
        table.add_row(*_request(request, activity.now_us, is_wide=width >= _WIDE))
    return table


def _request(request: telemetry_pb2.RequestActivity, now_us: int, *, is_wide: bool) -> list[Text | str]:
    identity = request.request_id
    end_us = request.ended_us if request.HasField("ended_us") else now_us
    phase = enum_text(telemetry_pb2.RequestPhase.Name(request.phase), "REQUEST_PHASE_")
    started = request.HasField("started_us")
    waited_us = (request.started_us if started else end_us) - request.accepted_us
    first, tokens_s = "-", "-"
    if request.HasField("first_token_us"):
        first = format_duration((request.first_token_us - request.accepted_us) / 1e6)
        decode_us, count = end_us - request.first_token_us, request.num_generated_tokens - request.num_choices
        tokens_s = format_rate(count / decode_us * 1e6) if decode_us > 0 and count > 0 else "-"
    return [
        identity if is_wide else f"{identity[:8]}..{identity[-6:]}",
        Text(phase, style=_PHASE_STYLE.get(request.phase, "" if request.phase in _LIVE else "dim")),
        str(request.num_prompt_tokens),
        f"{request.num_generated_tokens}/{request.max_tokens}",
        format_duration(waited_us / 1e6),
        first,
        tokens_s,
        format_duration((end_us - request.accepted_us) / 1e6),
    ]


MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 60.0


def _parse_interval(text: str) -> float:
    interval_s = options.parse_number(text)
    if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:
        raise ValueError(f"{text!r} is not in [{MIN_INTERVAL_S:g}, {MAX_INTERVAL_S:g}]")
    return interval_s


_QUIT_KEYS = frozenset(b"qQ\x1b\x03")


def top(
    once: Annotated[bool, typer.Option("--once", help="Print once and exit, as without a terminal.")] = False,
    interval: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            parser=options.option_parser(_parse_interval),
            help=f"Refresh interval in seconds, {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g}.",
        ),
    ] = 1.0,
    coordinator: options.Coordinator = DEFAULT_ADDRESS,
    tls_dir: options.TlsDirectory = None,
) -> int:
    """Show stages, their load, the pipeline and requests, live; q quits."""
    console = Console()
    watches = console.is_terminal and not once
    client = Client(coordinator, tls_dir=tls_dir, connect_timeout_s=max(1.0, interval) if watches else 5.0)
    asyncio.run(_watch(client, console, interval) if watches else _show_once(client, console))
    return 0


async def _read(client: Client) -> TopFrame:
    status, activity = await asyncio.gather(client.status(), client.activity())
    return TopFrame(status, activity)


async def _show_once(client: Client, console: Console) -> None:
    async with client:
        console.print(top_view(await _read(client), width=console.width))


async def _watch(client: Client, console: Console, interval_s: float) -> None:
    """Refresh until a key press; Ctrl-C quits, too. Retries while the coordinator is unavailable."""
    async with client:
        frame = await _read(client)
        async with _key_pressed() as pressed:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while not pressed.is_set():
                    view = top_view(frame, width=console.width, height=console.height)
                    live.update(view, refresh=True)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(pressed.wait(), interval_s)
                    try:
                        frame = await _read(client)
                    except Unavailable as error:
                        live.update(Text(f"{error}; retrying (q quits)"), refresh=True)
                        continue
                    except StagelineError:
                        if pressed.is_set():
                            break
                        raise


@contextlib.asynccontextmanager
async def _key_pressed() -> AsyncIterator[asyncio.Event]:
    """Yield an event that a quit key sets; typed keys are not echoed."""
    pressed = asyncio.Event()
    if not sys.stdin.isatty():
        yield pressed
        return
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    silent = termios.tcgetattr(descriptor)
    silent[3] &= ~(termios.ICANON | termios.ECHO)

    def read() -> None:
        keys = os.read(descriptor, 64)
        if not keys or _QUIT_KEYS & set(keys[:1]):
            pressed.set()

    termios.tcsetattr(descriptor, termios.TCSADRAIN, silent)
    loop.add_reader(descriptor, read)
    try:
        yield pressed
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
