"""`stageline trace` against a real trace service on a separate thread."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coordinator.api.telemetry_service import TelemetryService
from coordinator.observability.trace_reader import TraceReader
from coordinator.observability.trace_store import StoreLimits, TraceStore
from stageline.cli import main
from stageline.cli.trace import trace_list_view, waterfall_view
from stageline_rpc.v1 import telemetry_pb2, telemetry_pb2_grpc
from telemetry.spans import Attr, SpanName
from telemetry.trace_view.facts import encode_summary, summary
from tests.otlp_spans import REQUEST_ID, SpanMaker, Times, served
from wire.channels import new_server
from wire.status_codec import message_fields
from wire.transport import PLAIN

NO_ACTIVITY: Any = None
OTHER_ID = "01890a5d-ffff-774b-bcce-000000000001"


class Served:
    """A coordinator that serves only traces."""

    def __init__(self) -> None:
        self.store = TraceStore(StoreLimits(num_traces=2))
        self._ready: Future[str] = Future()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        self.address = self._ready.result(30)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(30)
        self._loop.close()

    async def _serve(self) -> None:
        self._ended = asyncio.Event()
        server, reader = new_server(), TraceReader(self.store)
        telemetry_pb2_grpc.add_TelemetryServiceServicer_to_server(
            TelemetryService(self.store, reader, NO_ACTIVITY), server
        )
        port = PLAIN.bind(server, "127.0.0.1:0")
        await server.start()
        self._ready.set_result(f"127.0.0.1:{port}")
        await self._ended.wait()
        await server.stop(0)
        reader.close()


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Has one finished request and an older failed one."""
    served_traces = Served()
    monkeypatch.setenv("STAGELINE_COORDINATOR", served_traces.address)
    monkeypatch.setenv("COLUMNS", "80")
    served_traces.store.add(served((0.2, 0.4, 0.2)).spans)
    failed = SpanMaker(
        request_id=OTHER_ID, trace_id=b"f" * 16, begin_ns=1_780_000_000_000_000_000, outcome="failed"
    )
    failed.queue(0.0, 1.5)
    failed.root(1.5, error="no stages in time")
    served_traces.store.add(failed.spans)
    yield served_traces
    served_traces.stop()


@pytest.mark.usefixtures("coordinator")
def test_without_a_request_recent_ones_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    newest, oldest = (line.split() for line in lines[2:4])
    assert newest[0] == REQUEST_ID[-8:]
    assert newest[2:] == [
        *("finished", "100+50", "250", "ms", "500", "ms", "1.04", "s"),
        *("1", "worker-1", "2.0x"),
    ]
    assert oldest[0] == OTHER_ID[-8:]
    assert oldest[2] == "failed"
    assert oldest[-1] == "-"


@pytest.mark.usefixtures("coordinator")
def test_a_wide_terminal_shows_whole_ids(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["trace", "--limit", "1"]) == 0
    output = capsys.readouterr().out
    assert REQUEST_ID in output
    assert OTHER_ID not in output


def test_traces_that_made_room_are_mentioned(coordinator: Served, capsys: pytest.CaptureFixture[str]) -> None:
    coordinator.store.add(served(request_id=OTHER_ID[:-1] + "2", trace_id=b"n" * 16).spans)
    assert main(["trace"]) == 0
    assert "1 older traces were evicted." in capsys.readouterr().out


@pytest.mark.usefixtures("coordinator")
def test_the_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [trace["request_id"] for trace in listed["traces"]] == [REQUEST_ID, OTHER_ID]
    assert listed["traces"][0]["slowest_stage"]["worker"] == "worker-1"
    assert (listed["num_dropped_traces"], listed["num_dropped_spans"]) == ("0", "0")
    assert listed["traces"][0] == message_fields(encode_summary(summary(served((0.2, 0.4, 0.2)).trace())))
    assert listed["traces"][1]["slowest_stage"] is None
    assert main(["trace", REQUEST_ID, "--json"]) == 0
    assert listed["traces"][0].items() <= json.loads(capsys.readouterr().out).items()


@pytest.mark.usefixtures("coordinator")
@pytest.mark.parametrize("wanted", [REQUEST_ID, REQUEST_ID[:11], REQUEST_ID[-8:], bytes(range(16)).hex()])
def test_a_request_is_drawn_and_explained(wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", wanted]) == 0
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 80
    assert f"Request {REQUEST_ID}, finished" in output
    words = " ".join(output.split())
    assert words.endswith(
        "1.04 s: 42 % computing on stage 1 (worker-1, layers 4-7), which takes 2.0 x as long as the median "
        "stage; 42 % computing on the other 2 stages; 10 % in the queue."
    )


@pytest.mark.usefixtures("coordinator")
def test_a_request_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", REQUEST_ID, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["request_id"] == REQUEST_ID
    assert facts["slowest_stage"]["worker"] == "worker-1"


@pytest.mark.usefixtures("coordinator")
def test_a_request_for_perfetto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    assert main(["trace", REQUEST_ID, "--perfetto", str(path)]) == 0
    assert {event["ph"] for event in json.loads(path.read_text())["traceEvents"]} == {"X", "M"}
    assert REQUEST_ID in capsys.readouterr().out


@pytest.mark.usefixtures("coordinator")
@pytest.mark.parametrize(
    ("line", "exit_code", "says"),
    [
        (["nobody"], 1, "no trace of request nobody is stored; list stored traces with `stageline trace`"),
        (["01890a5d"], 1, "01890a5d matches 2 requests: "),
        ([REQUEST_ID, "--perfetto", "/no/such/place"], 1, "cannot write /no/such/place: No such file"),
        (["--perfetto", "x.json"], 2, "--perfetto needs a request id"),
        ([REQUEST_ID, "--limit", "3"], 2, "--limit applies to the list"),
        (["--limit", "0"], 2, "--limit"),
        ([""], 2, "'' is too short: give at least 4 characters of the beginning"),
        (["057"], 2, "'057' is too short"),
        (
            ["zzz"],
            2,
            "of the beginning or end of a request id; `stageline trace` without an id lists recent requests",
        ),
    ],
)
def test_failures_are_one_line_and_an_exit_code(
    line: list[str], exit_code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", *line]) == exit_code
    output = capsys.readouterr()
    assert output.out == ""
    assert says in output.err
    assert output.err.count("\n") == 1


@pytest.mark.full
def test_no_coordinator_is_one_line(unused_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--coordinator", unused_address]) == 1
    assert f"no coordinator at {unused_address}" in capsys.readouterr().err


def test_a_coordinator_without_traces_is_reported(
    coordinator: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator.store, "recent", lambda num_requests: [])
    assert main(["trace"]) == 0
    assert capsys.readouterr().out == "No traces yet.\n"


PLANTED_ID = "01890a5d-ffff-774b-bcce-000000000003"
PLANTED = "[/x]\x1b[31m\x9b2J\u202e"


def planted() -> SpanMaker:
    """A trace with terminal escape sequences in every text."""
    maker = SpanMaker(request_id=PLANTED_ID, trace_id=b"p" * 16, outcome=f"failed{PLANTED}")
    maker.queue(0.0, 1.0)
    end = maker.chunk(1.0, [Times(0.1), Times(0.1)])
    maker.decode(end, 9.0, [Times(0.1), Times(5.0)], workers=(PLANTED, f"[bold]{PLANTED}"))
    maker.add(SpanName.RECOVERY, 6.0, 9.0, {Attr.CHOICE: 0, Attr.REASON: PLANTED})
    maker.root(9.0, error=f"{PLANTED}\nand so on")
    return maker


def test_texts_of_spans_cannot_control_a_terminal(
    coordinator: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    coordinator.store.add(planted().spans)
    for line in (["trace"], ["trace", PLANTED_ID]):
        assert main(line) == 0
        output = capsys.readouterr().out
        assert all(line.isprintable() for line in output.splitlines())
        assert "[/x]" in output


def test_the_views_draw_texts_as_they_are_and_not_as_markup() -> None:
    lines = rendered(planted())
    assert any("[bold][/x]" in line for line in lines)
    line = telemetry_pb2.TraceSummary(
        request_id="[/x]\x1b[1m",
        outcome="[/y]",
        slowest_stage=telemetry_pb2.SlowestStage(worker="[/z]\x07"),
    )
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(trace_list_view(telemetry_pb2.ListTracesResponse(traces=[line]), width=80))
    assert "[/y]" in capture.get()
    assert all(line.isprintable() for line in capture.get().splitlines())


def test_a_request_that_took_no_time_has_one_mark_on_its_axis() -> None:
    maker = SpanMaker()
    maker.root(0.0)
    maker.queue(0.0, 0.0)
    [axis] = (line for line in rendered(maker) if "|" in line)
    assert axis.split() == ["|0", "s"]


def rendered(maker: SpanMaker, width: int = 80) -> list[str]:
    """The lines of a waterfall, without colours."""
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(waterfall_view(maker.trace(), width=width))
    return capture.get().splitlines()


def test_events_are_distinguishable_without_colours() -> None:
    maker = SpanMaker()
    maker.add(SpanName.INTAKE, 0.0, 1.0)
    maker.queue(1.0, 2.0)
    maker.add(SpanName.PREEMPTION, 2.0, 3.0, {Attr.CHOICE: 0})
    maker.add(SpanName.RECOVERY, 3.0, 4.0, {Attr.CHOICE: 0})
    end = maker.chunk(4.0, [Times(1.0, wait=1.0, hop=1.0, receive=1.0, send=1.0)], result=1.0)
    maker.decode(end, 10.0, [])
    maker.root(10.0)
    width = 20 + len("stage 0 worker-0") + 2
    bars = {
        line[:16].strip(): line[17:].rstrip()
        for line in rendered(maker, width)
        if re.match(r"(intake|queue|p|d|recov|stage 0)", line)
    }
    assert bars == {
        "intake": "ii",
        "queue": "  qq",
        "preemption": "    xx",
        "recovery": "      !!",
        "prefill": "        pppppppppp",
        "decode": " " * 18 + "dd",
        "stage 0 worker-0": "        >>rr--##ss",
    }


def test_the_gateway_is_drawn_before_and_around_the_coordinator() -> None:
    maker = SpanMaker()
    maker.queue(0.0, 4.0)
    maker.decode(4.0, 8.0, [Times(1.0)])
    maker.root(8.0)
    times = (Attr.BODY_DURATION, Attr.PROMPT_DURATION, Attr.ACCEPT_DURATION)
    maker.gateway(-6.0, 10.0, {**dict.fromkeys(times, 2.0), Attr.TIME_TO_OUTPUT: 10.0})
    lines = rendered(maker, 64 + len("stage 0 worker-0") + 2)
    bars = {line[:16].strip(): line[17:].rstrip() for line in lines if line[:16].strip()}
    assert bars["gateway"] == "b" * 8 + "t" * 8 + "a" * 8 + " " * 16 + "=" * 24
    assert bars["queue"] == " " * 24 + "q" * 16
    assert bars["decode"] == " " * 40 + "d" * 16
    assert any("b body  t prompt  a accept  = response  q queue" in line for line in lines)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_picture_fits_its_width(width: int) -> None:
    maker = SpanMaker()
    maker.decode(0.0, 1.0, [Times(0.1)] * 3, workers=["worker-with-a-name-that-goes-on"] * 3)
    maker.root(1.0)
    lines = rendered(maker, width)
    axis = next(line for line in lines if "|0 s" in line)
    assert axis.endswith("1.00 s|")
    assert len(axis) <= width
    bars = [line for line in lines if line.startswith("stage ")]
    assert len(bars) == 3
    assert max(map(len, bars)) <= width


def test_times_on_the_axis_stand_where_they_are() -> None:
    maker = SpanMaker()
    maker.queue(0.0, 6.0)
    maker.root(6.0)
    axis, bar = (line for line in rendered(maker, 67) if "|" in line or line.startswith("queue"))
    assert len(bar.rstrip()) == 66
    assert axis.index("|1.20 s") == len("queue ") + 12
    assert axis.index("|2.40 s") == len("queue ") + 24


def test_a_request_that_no_stage_worked_on_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    maker = SpanMaker(outcome="failed")
    maker.root(0.0, error="it is too long")
    lines = rendered(maker)
    assert "Error: it is too long" in lines
    assert "No spans of stages." in lines
    assert lines[-1] == "failed after 0 us: no time was spent."
