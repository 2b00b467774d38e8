"""`stageline bench serve` against real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.clusters import Served, is_idle, wait_for_status
from tests.e2e.commands import run_stageline
from tests.e2e.terminal import CTRL_C, Terminal

pytestmark = pytest.mark.asyncio(loop_scope="package")


@pytest.mark.full
async def test_bench_serve_measures_a_load_and_reports_failures(served: Served, tmp_path: Path) -> None:
    line = "bench serve --num-requests 12 --request-rate 40 --prompt-tokens uniform:5-60 --output-tokens 9 "
    files = ("--json", str(tmp_path / "run.json"), "--plot", str(tmp_path / "run.svg"))
    at = ("--coordinator", served.address)
    done = await run_stageline(*line.split(), "--warmup", "2", "--slo-e2e", "60000", *files, *at)
    assert done.code == 0, done.stderr
    assert "12 planned: 12 completed, 0 failed" in done.stdout
    assert "requests/s, 100.0% within E2E 60000 ms" in done.stdout
    facts = json.loads((tmp_path / "run.json").read_text())
    assert [request["status"] for request in facts["requests"]] == ["OK"] * 12
    assert facts["summary"]["output_tokens"] == 12 * 9
    assert facts["model"]["vocab_size"] == 128
    assert (tmp_path / "run.svg").read_bytes().startswith(b"<?xml")
    again = await run_stageline(*line.split(), "--json", files[1], *at)
    assert again.code == 0
    repeated = json.loads((tmp_path / "run.json").read_text())
    what = ("due_s", "prompt_tokens", "output_tokens")
    assert [[entry[name] for name in what] for entry in repeated["requests"]] == [
        [entry[name] for name in what] for entry in facts["requests"]
    ]

    late = await run_stageline(*line.split(), "--timeout", "0.001", *at)
    assert late.code == 1
    assert "DEADLINE_EXCEEDED   12 failed" in late.stdout
    assert "stageline: error[DEADLINE_EXCEEDED]: request 0: " in late.stderr
    long = await run_stageline(*line.replace("uniform:5-60", "4090").split(), *at)
    assert long.code == 2
    assert "4090 prompt tokens and 9 output tokens, together 4099, more than the 4096" in long.the_error()


async def test_ctrl_c_cancels_running_requests_and_reports_the_measurements(served: Served) -> None:
    line = "bench serve --num-requests 500 --request-rate 30 --prompt-tokens 8 --output-tokens uniform:2-400"
    async with Terminal(*line.split(), "--coordinator", served.address) as terminal:
        await terminal.expect(r"[1-9]\d*/500 .* [1-9]\d* running, 0 failed")
        terminal.type(CTRL_C)
        await terminal.expect(r"500 planned: [1-9]\d* completed, 0 failed, [1-9]\d* interrupted")
        await terminal.expect(r"TTFT +[1-9]")
        assert await terminal.exit_code() == 130
        assert "Traceback" not in terminal.text
    await wait_for_status(served.address, is_idle)
