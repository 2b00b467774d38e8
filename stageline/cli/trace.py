"""`stageline trace`: where the time of a request went."""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
from rich.console import Console

from stageline.cli import options
from stageline.cli.failures import CommandFailed
from stageline.cli.trace_list import trace_list_facts, trace_list_view
from stageline.cli.waterfall_view import waterfall_view
from stageline.client import Client
from stageline.errors import RequestNotFound
from stageline_rpc.v1 import telemetry_pb2
from telemetry.trace_view.facts import trace_facts
from telemetry.trace_view.perfetto import perfetto
from telemetry.trace_view.read_model import RequestTrace, read_spans, request_trace
from wire.reasons import reason_of

LEAST_PART = 4
"""Characters of an id that the coordinator looks for."""


def trace(
    request_id: Annotated[
        str | None,
        typer.Argument(
            metavar="[REQUEST_ID]",
            help="A request, by its id or by the beginning or end of it. Recent ones are listed without.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what is shown as JSON.")] = False,
    perfetto_file: Annotated[
        Path | None,
        typer.Option(
            "--perfetto",
            metavar="FILE",
            dir_okay=False,
            help="Write the trace to FILE, for ui.perfetto.dev.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", metavar="N", min=1, help="List so many; 20 unless given.")
    ] = None,
    coordinator: options.Coordinator = options.DEFAULT_ADDRESS,
) -> int:
    """List recent requests, or show where the time of one went: stage by stage, and in a sentence."""
    if request_id is None:
        if perfetto_file is not None:
            raise typer.BadParameter("--perfetto is for one request: give its id")
        _list(asyncio.run(_traces(coordinator, limit or 20)), as_json=as_json)
        return 0
    if len(request_id.strip()) < LEAST_PART:
        raise typer.BadParameter(
            f"{request_id!r} is too short: give at least {LEAST_PART} characters of a request's id"
        )
    if limit is not None:
        raise typer.BadParameter("--limit is for the list: it does not go with a request")
    found = asyncio.run(_trace(coordinator, request_id))
    if perfetto_file is not None:
        _write(perfetto_file, perfetto(found))
    if as_json:
        print(json.dumps(trace_facts(found), indent=2))
    else:
        Console().print(waterfall_view(found, width=Console().width))
    return 0


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
        print(json.dumps(trace_list_facts(response), indent=2))
    else:
        console = Console()
        console.print(trace_list_view(response, width=console.width))


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(content), encoding="utf-8")
    except OSError as error:
        text = f"cannot write {path}: {error.strerror}"
        raise CommandFailed(text, reason=reason_of(error)) from None
