"""Coordinator restarts: with a journal, clients see a pause; without one, an error at once."""

from __future__ import annotations

import asyncio
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from coordinator.journal.database import ServedIdentity
from coordinator.journal.journal import Journal
from deploy import LocalCluster
from stageline import Client, GenerateOutput, Unavailable
from tests.e2e.clusters import (
    START_TIMEOUT_S,
    Reference,
    config,
    is_idle,
    random_prompt,
    tokens_of,
    wait_for_status,
)
from tests.e2e.commands import run_stageline

NUM_TOKENS = 200
CASES: list[dict[str, Any]] = [
    {"prompt": random_prompt(length, seed=5), **options}
    for length, options in [
        (1, {}),
        (16, {}),
        (40, {"temperature": 1.0, "seed": 11}),
        (101, {"temperature": 1.0, "seed": 12, "logprobs": 2, "prompt_logprobs": 1}),
        (7, {"temperature": 0.9, "seed": 13, "n": 2}),
        (33, {"on_disconnect": "detach"}),
        (64, {"temperature": 1.0, "seed": 14, "repetition_penalty": 1.2}),
        (5, {"logprobs": 1, "echo": True}),
    ]
]


@dataclass
class _Stream:
    """Output of each choice of one request."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    scores: list[float] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)

    def add(self, output: GenerateOutput) -> None:
        self.tokens.setdefault(output.choice, []).extend(output.token_ids)
        scores = (*(output.prompt_logprobs or ()), *(output.logprobs or ()))
        self.scores += [score.logprob for score in scores if score.logprob is not None]
        if output.usage is not None:
            self.restarts.append(output.usage.restarts)


class _Streams:
    """All requests concurrently."""

    def __init__(self, client: Client) -> None:
        self.streams = [_Stream() for _ in CASES]
        self._news = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._read(client, case, stream))
            for case, stream in zip(CASES, self.streams, strict=True)
        ]

    async def all_have(self, num_tokens: int) -> None:
        async with asyncio.timeout(60):
            while min(self._num_generated()) < num_tokens:
                self._news.clear()
                await self._news.wait()
        assert max(self._num_generated()) < NUM_TOKENS, "a request finished before the fault"

    async def end(self) -> list[_Stream]:
        async with asyncio.timeout(90):
            await asyncio.gather(*self._tasks)
        return self.streams

    def _num_generated(self) -> list[int]:
        return [
            max((len(tokens) for tokens in stream.tokens.values()), default=0)
            - (len(case["prompt"]) if case.get("echo") else 0)
            for case, stream in zip(CASES, self.streams, strict=True)
        ]

    async def _read(self, client: Client, case: dict[str, Any], stream: _Stream) -> None:
        async for output in client.generate(max_tokens=NUM_TOKENS, timeout_s=120, **case):
            stream.add(output)
            self._news.set()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
async def test_streams_continue_when_the_coordinator_restarts_with_its_journal(
    llama: Reference, tmp_path: Path, number: signal.Signals
) -> None:
    journal = tmp_path / "journal.db"
    settings = config(llama.directory, 3, "--journal", str(journal), log_directory=tmp_path)
    async with LocalCluster(settings) as cluster, asyncio.timeout(200):
        before = await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        async with Client(cluster.address) as client:
            undisturbed = await _Streams(client).end()
            streams = _Streams(client)
            await streams.all_have(10)
            cluster.kill("coordinator", number)
            await cluster.coordinator.wait()
            await cluster.restart("coordinator")
            disturbed = await streams.end()
        for alone, again in zip(undisturbed, disturbed, strict=True):
            assert again.tokens == alone.tokens
            assert again.scores == pytest.approx(alone.scores, abs=1e-3)
            assert again.restarts == [1] * len(alone.restarts)
        after = await wait_for_status(cluster.address, is_idle)
        assert after.epoch > before.epoch
        assert (after.requests.failed, after.requests.cancelled, after.requests.orphaned) == (0, 0, 0)
        for worker in cluster.workers:
            assert worker.read_log().count("loading layers") == 1, "weights stay loaded"


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
async def test_without_a_journal_clients_get_an_error_at_once(
    llama: Reference, tmp_path: Path, number: signal.Signals
) -> None:
    async with LocalCluster(config(llama.directory, 2, log_directory=tmp_path)) as cluster:
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        async with Client(cluster.address) as client:
            live = asyncio.create_task(tokens_of(client, random_prompt(3), 3000))
            await wait_for_status(cluster.address, lambda status: status.requests.decode == 1)
            cluster.kill("coordinator", number)
            with pytest.raises(Unavailable):
                await asyncio.wait_for(live, timeout=3)


@pytest.mark.full
async def test_an_unusable_journal_is_reported_in_one_line_with_exit_code_1(tmp_path: Path) -> None:
    path, damaged = tmp_path / "journal.db", tmp_path / "damaged.db"
    damaged.write_bytes(b"once upon a time" * 100)
    journal = Journal(path, ServedIdentity("0" * 32, "bf16"))
    try:
        in_use = await _refused(path)
    finally:
        journal.close()
    assert in_use.endswith(f"journal {path} is in use by another coordinator")
    assert re.search(f"journal {path} is of another model: 0{{32}} in bf16, not ", await _refused(path))
    assert f"journal {damaged} is damaged: file is not a database" in await _refused(damaged)
    assert "journal /no/such/folder/j.db cannot be written" in await _refused(Path("/no/such/folder/j.db"))


async def _refused(path: Path) -> str:
    run = await run_stageline(
        "coordinator", "--stages", "1", "--listen", "127.0.0.1:0", "--no-http", "--journal", str(path)
    )
    assert run.code == 1
    return run.the_error()
