"""Report of a load run: text, JSON, plot."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from stageline.load.driver import LoadConfig
from stageline.load.plan import Arrivals, LoadSpec, parse_lengths
from stageline.load.report import check_plot, json_report, report_view, save_plot, shown_progress, warnings_of
from stageline.load.results import INTERRUPTED, Limits, LoadRun, Summary, Tally, summarize
from stageline_rpc.v1 import inference_pb2
from tests.unit.stageline.load.runs import record, run_of

LIMITS = Limits(ttft_s=0.2, itl_s=0.05)
RUN = run_of(
    record(0, (0.1, 1), (0.13, 1), (0.15, 1)),
    record(1, (0.65, 1), (0.8, 2), due_s=0.5),
    record(2, due_s=0.5, sent_s=0.5, status="RESOURCE_EXHAUSTED"),
    record(3, (0.9, 1), due_s=0.6, status=INTERRUPTED),
    duration_s=2.0,
    num_planned=6,
)
NOTHING = run_of(duration_s=0.5, num_planned=6)


def shown(run: LoadRun, limits: Limits = LIMITS) -> str:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(report_view(summarize(run, limits), limits))
    return capture.get()


def test_the_report_has_counts_rates_and_latencies() -> None:
    lines = shown(RUN).splitlines()
    entries = {line[:22].strip(): line[22:].strip() for line in lines}
    assert entries["Requests"] == "6 planned: 2 completed, 1 failed, 1 interrupted, 2 unsent"
    assert entries["RESOURCE_EXHAUSTED"] == "1 failed"
    assert entries["Request throughput"] == "1.00 requests/s"
    assert entries["Goodput"] == "0.50 requests/s, 25.0% within TTFT 200 ms, ITL 50 ms"
    assert entries["Output throughput"] == "3.5 tokens/s, 1.17 a message"
    rows = {line.split()[0]: line.split()[1:] for line in lines if len(line.split()) == 8}
    assert rows["TTFT"] == ["2", "125.0", "125.0", "145.0", "147.5", "149.5", "150.0"]
    assert rows["ITL"][:2] == ["3", "66.7"]
    assert set(rows) >= {"TPOT", "E2E"}
    assert not any(line.startswith("Wait") for line in lines)
    assert max(map(len, lines)) <= 80


def test_a_run_without_anything_is_reported_too() -> None:
    assert "6 planned: 0 completed, 0 failed, 6 unsent" in shown(NOTHING)
    assert "Goodput" not in shown(NOTHING, Limits())


def test_waits_for_a_slot_have_a_row_where_there_were_any() -> None:
    waited = replace(RUN.records[0], slot_wait_s=0.05)
    assert "Wait to be sent" in shown(run_of(waited, duration_s=1.0))


def with_lag(lag_s: float, cpu_share: float = 0.1) -> Summary:
    run = run_of(record(0, (0.5, 1), sent_s=lag_s), duration_s=1.0)
    return summarize(replace(run, cpu_s=cpu_share), Limits())


def test_a_slow_load_generator_is_reported() -> None:
    assert warnings_of(with_lag(0.019)) == []
    assert "late by 21.0 ms (p99)" in warnings_of(with_lag(0.021))[0]
    assert "85% of a core" in warnings_of(with_lag(0, cpu_share=0.85))[0]


def test_the_json_has_everything() -> None:
    config = LoadConfig(
        coordinator="here:1",
        spec=LoadSpec(
            arrivals=Arrivals(rate_per_s=math.inf),
            num_requests=6,
            duration_s=None,
            prompt_lengths=parse_lengths("normal:9,2"),
            output_lengths=parse_lengths("3"),
        ),
        limits=LIMITS,
    )
    model = inference_pb2.GetModelResponse(name="m", fingerprint="f", vocab_size=9)
    text = json_report(config, model, RUN, summarize(RUN, LIMITS), started_at="now")
    facts = json.loads(text)
    assert facts["configuration"]["spec"]["arrivals"] == {"rate_per_s": "inf", "burstiness": 1.0}
    assert facts["configuration"]["spec"]["prompt_lengths"]["shape"] == "normal"
    assert facts["model"]["name"] == "m"
    assert facts["summary"]["ttft_s"]["p50"] == 0.125
    assert facts["summary"]["failures"] == {"RESOURCE_EXHAUSTED": 1}
    assert len(facts["timeline"]["concurrency"]) == 100
    assert [request["index"] for request in facts["requests"]] == [0, 1, 2, 3]
    assert facts["requests"][1] == {
        "index": 1,
        "due_s": 0.5,
        "prompt_tokens": 10,
        "output_tokens": 3,
        "prefix_group": 0,
        "sent_s": 0.5,
        "slot_wait_s": 0.0,
        "ended_s": 0.8,
        "message_times_s": [0.65, 0.8],
        "message_tokens": [1, 2],
        "status": "OK",
        "reason": "",
        "error": "",
        "cached_tokens": 0,
        "restarts": 0,
        "is_good": False,
    }


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("suffix", "begins"), [(".svg", b"<?xml"), (".png", b"\x89PNG")])
@pytest.mark.parametrize("run", [RUN, NOTHING], ids=["a run", "nothing"])
def test_a_plot_is_drawn(run: LoadRun, suffix: str, begins: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"run{suffix}"
    save_plot(run, "a title", path)
    assert path.read_bytes().startswith(begins)


def test_a_plot_that_cannot_be_drawn_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    check_plot(Path("run.svg"))
    with pytest.raises(ValueError, match=r"'run.pdf' does not end with one of .svg, .png"):
        check_plot(Path("run.pdf"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'matplotlib>=3\.10,<4'"):
        check_plot(Path("run.svg"))


async def test_progress_is_for_terminals_only(capsys: pytest.CaptureFixture[str]) -> None:
    async with shown_progress(Tally(), 5):
        pass
    assert capsys.readouterr() == ("", "")
