"""`stageline batch` against a small HTTP application with faults."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from stageline.cli import main
from tests.e2e.commands import ENVIRONMENT, STAGELINE
from tests.e2e.terminal import Terminal
from tests.error_lines import parse_error_line
from tests.unit.gateway.fake_upstream import FakeStream, failure, serve
from web.server import HttpServer
from wire.addresses import Address

DEADLINE_S = 60.0


class Upstream:
    """Echoes the prompt; its first word names the fault, and a number before it how often: `2*429 hello`."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.num_at_once = self.max_at_once = 0
        self.delay_s = 0.0
        application = Starlette(routes=[Route("/v1/completions", self._complete, methods=["POST"])])
        self.server = HttpServer(application, Address("127.0.0.1", 0), name="batch test", hint="")

    async def _complete(self, request: Request) -> Response:
        prompt = (await request.json())["prompt"]
        self.calls[prompt] += 1
        self.num_at_once += 1
        self.max_at_once = max(self.max_at_once, self.num_at_once)
        await asyncio.sleep(self.delay_s)
        self.num_at_once -= 1
        times, _, fault = prompt.split(" ")[0].rpartition("*")
        is_faulty = bool(times) and self.calls[prompt] <= int(times)
        return _FAULTS[fault]() if is_faulty else self._answer(prompt)

    def _answer(self, prompt: str) -> Response:
        body = {"choices": [{"text": prompt}], "usage": {"completion_tokens": 2}}
        return JSONResponse(body, headers={"x-request-id": f"id of {prompt}"})


async def _cut() -> AsyncIterator[bytes]:
    yield b'{"choices"'


_FAULTS = {
    "429": lambda: JSONResponse({"error": {}}, 429, headers={"retry-after-ms": "20"}),
    "400": lambda: JSONResponse({"error": {"message": "no"}}, 400),
    "500": lambda: PlainTextResponse("broken", 500),
    "cut": lambda: StreamingResponse(_cut(), headers={"content-length": "1000"}),
}


@pytest.fixture
async def upstream(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Upstream]:
    caplog.set_level("CRITICAL", "uvicorn.error")  # of responses that are cut
    made = Upstream()
    await made.server.start()
    yield made
    await made.server.stop()


def write_requests(path: Path, prompts: list[str]) -> Path:
    lines = [
        {"custom_id": prompt, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}}
        for prompt in prompts
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read_lines(path: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    assert len({line["id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


async def run_batch(gateway_url: str, directory: Path, *arguments: str) -> int:
    files = (str(directory / "in"), str(directory / "out"))
    words = ["batch", *files, "--gateway", gateway_url, *arguments]
    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.to_thread(main, words)


async def test_every_line_is_served_with_bounded_concurrency(
    upstream: Upstream, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [f"prompt {number}" for number in range(20)]
    write_requests(tmp_path / "in", prompts)
    upstream.delay_s = 0.02
    assert await run_batch(upstream.server.url, tmp_path, "--concurrency", "3") == 0
    lines = read_lines(tmp_path / "out")
    assert sorted(lines) == sorted(prompts)
    for prompt, line in lines.items():
        assert line["error"] is None
        assert (line["response"]["status_code"], line["response"]["request_id"]) == (200, f"id of {prompt}")
        assert line["response"]["body"]["choices"] == [{"text": prompt}]
    assert upstream.max_at_once == 3
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.startswith("20 requests: 20 served, 0 failed; 20 sent in ")
    assert "; 40 output tokens, " in shown.out
    assert shown.out.count("\n") == 1


async def test_faults_that_pass_are_retried(upstream: Upstream, tmp_path: Path) -> None:
    prompts = ["20*429 x", "1*500 x", "1*cut x", "plain"]
    write_requests(tmp_path / "in", prompts)
    assert await run_batch(upstream.server.url, tmp_path) == 0
    assert [upstream.calls[prompt] for prompt in prompts] == [21, 2, 2, 1]
    assert len(read_lines(tmp_path / "out")) == 4


async def test_failed_lines_are_written_and_fail_the_batch_now_and_in_the_next_run(
    upstream: Upstream, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_requests(tmp_path / "in", ["99*400 x", "99*500 x", "99*cut x", "plain"])
    for _ in range(2):
        assert await run_batch(upstream.server.url, tmp_path, "--retries", "1") == 1
    lines = read_lines(tmp_path / "out")
    assert lines["99*400 x"]["response"]["body"] == {"error": {"message": "no"}}
    assert lines["99*500 x"]["response"] == {"status_code": 500, "request_id": "", "body": "broken"}
    assert (lines["99*cut x"]["response"], lines["99*cut x"]["error"]["code"]) == (None, "connection_error")
    assert upstream.calls == {"99*400 x": 1, "99*500 x": 2, "99*cut x": 2, "plain": 1}
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("4 requests: 1 served, 3 failed; 4 sent in ")
    assert second.startswith("4 requests: 1 served, 3 failed; 0 sent in ")


async def test_an_unreachable_gateway_ends_the_batch_without_failed_lines(
    unused_address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = write_requests(tmp_path / "in", ["a", "b"])
    words = ["batch", str(given), str(tmp_path / "out"), "--retries", "1"]
    code = await asyncio.to_thread(main, [*words, "--gateway", f"http://{unused_address}"])
    assert code == 1
    reason, text = parse_error_line(capsys.readouterr().err)
    assert reason == "GATEWAY_UNREACHABLE"
    assert unused_address in text
    assert text.endswith("the same command continues")
    assert (tmp_path / "out").read_bytes() == b""


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["in", "out", "--gateway", "127.0.0.1:7482"], "'127.0.0.1:7482' is not a URL such as http://"),
        (["in", "out", "--concurrency", "0"], "0"),
        (["in", "in"], "OUT is the file IN"),
        (["missing", "out"], "missing"),
        (["twice", "out"], "twice, line 2: custom_id 'a' is also in line 1"),
        (["in", "notes"], "notes, line 1: not a line of a batch's output"),
    ],
)
def test_wrong_usage_is_one_line_and_sends_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_requests(tmp_path / "in", ["a"])
    write_requests(tmp_path / "twice", ["a", "a"])
    (tmp_path / "notes").write_text("notes\n")
    assert main(["batch", *arguments]) == 2
    reason, text = parse_error_line(capsys.readouterr().err)
    assert reason == "USAGE"
    assert problem in text
    assert (tmp_path / "notes").read_text() == "notes\n"


async def test_a_killed_batch_continues_where_it_was(upstream: Upstream, tmp_path: Path) -> None:
    prompts = [f"prompt {number}" for number in range(40)]
    write_requests(tmp_path / "in", prompts)
    out = tmp_path / "out"
    upstream.delay_s = 0.05
    words = ("batch", str(tmp_path / "in"), str(out), "--gateway", upstream.server.url, "--concurrency", "4")
    process = await asyncio.create_subprocess_exec(*STAGELINE, *words, env={**os.environ, **ENVIRONMENT})
    async with asyncio.timeout(DEADLINE_S):
        while not out.exists() or out.read_bytes().count(b"\n") < 9:
            await asyncio.sleep(0.01)
        process.kill()
        await process.wait()
    written = out.read_bytes()
    assert 9 <= written.count(b"\n") < 40
    assert await run_batch(upstream.server.url, tmp_path) == 0
    assert out.read_bytes().startswith(written)
    assert sorted(read_lines(out)) == sorted(prompts)
    assert sum(upstream.calls.values()) <= 40 + 4


async def test_the_gateway_serves_a_batch_and_its_retry_headers_are_obeyed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_requests(tmp_path / "in", ["Once upon a time", "There was"])
    refusals = [failure(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after_s=0.02) for _ in range(3)]
    async with serve(over_tcp=True) as served:
        submit = served.upstream.submit

        async def refuse_first(*request: Any, **given: Any) -> FakeStream:
            if refusals:
                raise refusals.pop()
            return await submit(*request, **given)

        monkeypatch.setattr(served.upstream, "submit", refuse_first)
        assert await run_batch(f"{served.client.base_url}v1", tmp_path, "--retries", "0") == 0
    assert refusals == []
    for line in read_lines(tmp_path / "out").values():
        assert line["response"]["status_code"] == 200
        assert line["response"]["body"]["object"] == "text_completion"
        assert line["response"]["body"]["choices"][0]["text"] == " a bird sang"
        assert line["response"]["request_id"]


async def test_a_terminal_shows_progress(upstream: Upstream, tmp_path: Path) -> None:
    write_requests(tmp_path / "in", [f"prompt {number}" for number in range(8)])
    upstream.delay_s = 0.3
    words = ("batch", str(tmp_path / "in"), str(tmp_path / "out"), "--gateway", upstream.server.url)
    async with Terminal(*words, "--concurrency", "1") as terminal:
        await terminal.expect(r"[1-7]/8 requests")
        await terminal.expect("8 requests: 8 served, 0 failed")
        assert await terminal.exit_code() == 0
