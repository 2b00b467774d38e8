"""`stageline up`, `demo` and client commands in a terminal."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import signal
from pathlib import Path

import psutil
import pytest
from httpx2 import AsyncClient, HTTPError

from tests.e2e.clusters import is_idle, is_serving, wait_for_status
from tests.e2e.commands import run_stageline
from tests.e2e.leftovers import (
    assert_nothing_left,
    is_free,
    leftover_files,
    listening_ports,
    processes_under,
    wait_until_ended,
)
from tests.e2e.terminal import CTRL_C, CTRL_D, Terminal
from tests.fake_processes import wait_until

START_TIMEOUT_S = 120.0
FLAGS = (
    "--listen", "127.0.0.1:0", "--gateway", "127.0.0.1:0",
    "--memory", "256MiB", "--threads", "1", "--kv-tokens", "4096",
)  # fmt: skip


async def _serving(up: Terminal) -> str:
    """Address printed by `up`."""
    match = await up.expect(r"Serving at (127\.0\.0\.1:\d+)\.", timeout_s=START_TIMEOUT_S)
    return match[1]


@pytest.mark.full
async def test_up_serves_every_command_until_ctrl_c(tmp_path: Path) -> None:
    async with Terminal("up", "--workers", "3", *FLAGS, temporary=tmp_path) as up:
        address = await _serving(up)
        pids = processes_under(up.pid)
        assert len(pids) == 5
        ports = listening_ports(pids)
        assert len(ports) == 9, "two ports per worker, the coordinator's, the dashboard, and the gateway's"
        for role, worker in (("FIRST", "worker-0"), ("MIDDLE", "worker-1"), ("LAST", "worker-2")):
            assert re.search(rf"{role}\s+{worker}\s+\d+ to \d+ \(\d+\)", up.text)

        await _the_printed_curl_line_works(up.text)
        await _status_shows_every_stage(address)
        await _generate_writes_text_and_speed(address)
        await _generate_takes_token_ids(address)
        await _ctrl_c_cancels_a_generation(address)
        await _chat_holds_a_conversation(address)
        await _chat_reads_a_pipe(address)

        up.type(CTRL_C)
        assert await up.exit_code() == 0
        assert up.text.rstrip().endswith("All processes stopped.")
        assert "Traceback" not in up.text
        assert_nothing_left(pids, ports, tmp_path)


async def _the_printed_curl_line_works(printed: str) -> None:
    (line,) = re.findall(r"^ +(curl .*?\}'?)\s*$", printed, re.MULTILINE)
    command, url, option, header, data, body = shlex.split(line)
    assert (command, option, data) == ("curl", "-H", "-d")
    name, _, value = header.partition(": ")
    async with AsyncClient(timeout=60) as client:
        answer = (await client.post(url, content=body, headers={name: value})).json()
        assert answer["choices"][0]["message"]["content"]
        page = await client.get(url.partition("/v1")[0])
        assert "<title>" in page.text
        entry = (await client.get(f"{url.partition('/v1')[0]}/v1/models")).json()["data"][0]
        assert entry["stageline"]["dashboard_url"] in printed


async def _answers(client: AsyncClient) -> bool:
    try:
        return (await client.get("/readyz")).status_code == 200
    except HTTPError:
        return False


async def _status_shows_every_stage(address: str) -> None:
    shown = await run_stageline("status", STAGELINE_COORDINATOR=address)
    assert (shown.code, shown.stderr) == (0, "")
    assert re.search(r"stageline-stories in (?:bf16|f32), 3 stages, epoch 2\nserving\n", shown.stdout)
    assert re.search(r"Self-check passed: .*the recorded reference", shown.stdout)
    assert len(re.findall(r"(?:FIRST|MIDDLE|LAST) +worker-\d +\d+ to \d+ .* ready ", shown.stdout)) == 3
    as_json = await run_stageline("status", "--json", "--coordinator", address)
    status = json.loads(as_json.stdout)
    assert status["state"] == "CLUSTER_STATE_SERVING"
    layers = [(worker["layer_begin"], worker["layer_end"]) for worker in status["workers"]]
    assert layers[0][0] == 0
    assert [begin for begin, _ in layers[1:]] == [end for _, end in layers[:-1]]
    assert layers[-1][1] == 12
    assert all(psutil.pid_exists(worker["pid"]) for worker in status["workers"])


async def _generate_writes_text_and_speed(address: str) -> None:
    runs = [
        await run_stageline("generate", "Once upon a time", "--max-tokens", "30", "--coordinator", address)
        for _ in range(2)
    ]
    assert [run.code for run in runs] == [0, 0]
    assert runs[0].stdout == runs[1].stdout
    assert len(runs[0].stdout.split()) > 10
    assert re.fullmatch(r"\(30 tokens in .* tokens/s; first token after .*\)\n", runs[0].stderr)


async def _generate_takes_token_ids(address: str) -> None:
    run = await run_stageline(
        "generate", "--token-ids", "5,6,7", "--max-tokens", "8", "--ignore-eos", "--coordinator", address
    )
    assert run.code == 0
    assert "(8 tokens in" in run.stderr


async def _ctrl_c_cancels_a_generation(address: str) -> None:
    before = await wait_for_status(address, is_idle)
    arguments = ("generate", "One day", "--max-tokens", "1900", "--ignore-eos", "--coordinator", address)
    async with Terminal(*arguments) as terminal:
        await terminal.expect(r"\w+ \w+ \w+")
        terminal.type(CTRL_C)
        assert await terminal.exit_code() == 130
        assert terminal.text.rstrip().endswith("stageline: the request was cancelled")
    after = await wait_for_status(address, is_idle)
    assert after.requests.cancelled == before.requests.cancelled + 1


async def _chat_holds_a_conversation(address: str) -> None:
    async with Terminal("chat", "--coordinator", address) as chat:
        await chat.expect(r"Chatting with stageline-stories\.")
        for message in ("Hello!", "What is your name?"):
            await chat.expect("> ")
            chat.type(f"{message}\n")
            await chat.expect(re.escape(message) + r"\n\w.*\n")
        await chat.expect("> ")
        chat.type("/reset\n")
        await chat.expect("history cleared")
        await chat.expect("> ")
        chat.type(CTRL_D)
        assert await chat.exit_code() == 0
        assert "Traceback" not in chat.text


async def _chat_reads_a_pipe(address: str) -> None:
    chat = await run_stageline("chat", "--coordinator", address, stdin="Hello!\nWhat is your name?\n")
    assert chat.code == 0
    assert len(chat.stdout.splitlines()) == 2


@pytest.mark.full
async def test_ctrl_c_stops_up_with_one_worker_dead_and_another_hung(tmp_path: Path) -> None:
    async with Terminal("up", "--workers", "2", "--no-restart", *FLAGS, temporary=tmp_path) as up:
        address = await _serving(up)
        pids = processes_under(up.pid)
        ports = listening_ports(pids)
        status = await wait_for_status(address, is_serving)
        psutil.Process(status.workers[0].pid).kill()
        await up.expect(r"worker-0 \(pid \d+\) ended: killed by SIGKILL")
        await up.expect(r"stageline worker --coordinator \S+ --name worker-0")
        psutil.Process(status.workers[1].pid).suspend()

        up.type(CTRL_C)
        assert await up.exit_code() == 0
        assert "Traceback" not in up.text
        # Logs of a cluster that lost a process are kept; the last line shows where.
        (logs,) = leftover_files(tmp_path)
        assert up.text.rstrip().endswith(f"All processes stopped. Logs are kept in {logs}")
        shutil.rmtree(logs)
        assert_nothing_left(pids, ports, tmp_path)


@pytest.mark.full
async def test_a_killed_gateway_is_started_again_at_its_address(tmp_path: Path) -> None:
    async with Terminal("up", "--workers", "1", *FLAGS, temporary=tmp_path) as up:
        match = await up.expect(r"curl (http://\S+)/v1/", timeout_s=START_TIMEOUT_S)
        (gateway,) = (
            process
            for process in psutil.Process(up.pid).children(recursive=True)
            if "gateway" in process.cmdline()
        )
        gateway.kill()
        await up.expect(r"gateway \(pid \d+\) ended: killed by SIGKILL")
        await up.expect(r"Restarted gateway \(pid \d+\)")
        async with AsyncClient(base_url=match[1], timeout=60) as client:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not await _answers(client):
                    await asyncio.sleep(0.1)


@pytest.mark.full
async def test_kill_9_of_up_stops_its_children(tmp_path: Path) -> None:
    async with Terminal("up", "--workers", "1", *FLAGS, temporary=tmp_path) as up:
        address = await _serving(up)
        pids = processes_under(up.pid)
        assert len(pids) == 3
        up.send_signal(signal.SIGKILL)
        await wait_until_ended(pids)
        assert await up.exit_code() == -signal.SIGKILL
        # A process with threads counts as ended shortly before its last thread closes its sockets.
        await asyncio.to_thread(wait_until, lambda: is_free(address))


@pytest.mark.full
async def test_ctrl_c_during_startup_stops_the_cluster(tmp_path: Path) -> None:
    async with Terminal("up", "--workers", "2", *FLAGS, temporary=tmp_path) as up:
        await up.expect("0 of 2|waiting for 2")
        pids = processes_under(up.pid)
        up.type(CTRL_C)
        assert await up.exit_code() == 0
        assert "Traceback" not in up.text
        await wait_until_ended(pids)
        assert leftover_files(tmp_path) == []


@pytest.mark.full
async def test_the_demo_generates_a_story_and_exits(tmp_path: Path) -> None:
    async with Terminal("demo", temporary=tmp_path) as demo:
        await demo.expect(r"Once upon a time\b[^\n]{80}", timeout_s=START_TIMEOUT_S)
        pids = processes_under(demo.pid)
        assert await demo.exit_code(timeout_s=60) == 0, demo.text
        assert re.search(r"tokens in [\d.]+ s, [\d.]+ tokens/s; first token after", demo.text)
        assert all(f"worker-{number} " in demo.text for number in range(3))
        assert re.search(
            r"The gateway at http://\S+ answers a client of OpenAI's API:\r?\n\w+ \w+", demo.text
        )
        assert demo.text.rstrip().endswith("All processes stopped.")
        await wait_until_ended(pids)
        assert leftover_files(tmp_path) == []


async def test_the_plan_command_starts_nothing() -> None:
    plan = await run_stageline("plan", "--workers", "24GiB,24GiB,8GiB")
    assert plan.code == 0
    assert len(re.findall(r"(?:FIRST|MIDDLE|LAST) +worker-\d", plan.stdout)) == 3
    assert re.search(r"KV cache: \d+ tokens", plan.stdout)
    refused = await run_stageline("plan", "--workers", "2MiB,2MiB,2MiB")
    assert refused.code == 1
    assert re.search(r"worker-0 has 2\.0 MiB .* too little", refused.the_error())
