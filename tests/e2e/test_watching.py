"""`stageline top` and the dashboard of a cluster of processes."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from deploy import LocalCluster, LocalClusterConfig
from stageline import Client
from tests.e2e.clusters import START_TIMEOUT_S, tokens_of
from tests.e2e.commands import ENVIRONMENT, run_stageline
from tests.e2e.terminal import CTRL_C, Terminal
from wire.user_files import write_secret

pytestmark = pytest.mark.asyncio(loop_scope="package")

TOKEN = "of-sixteen-characters-or-more"


def config(tmp_path: Path, *arguments: str) -> LocalClusterConfig:
    """Three mock stages; the second one is slow."""
    return LocalClusterConfig(
        mocks=("step=10ms", "step=25ms", "step=10ms"),
        http="127.0.0.1:0",
        coordinator_arguments=("--mock-model", "layers=12", *arguments),
        environment=ENVIRONMENT,
        log_directory=tmp_path / "logs",
    )


async def _generate_forever(client: Client) -> None:
    while True:
        await tokens_of(client, [1, 2, 3], 60)


@pytest.mark.full
async def test_top_shows_the_pipeline_until_a_key_is_pressed(tmp_path: Path) -> None:
    async with LocalCluster(config(tmp_path)) as cluster:
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        async with Client(cluster.address) as client:
            await asyncio.gather(*(tokens_of(client, [1, 2, 3], 60) for _ in range(4)))
            once = await run_stageline("top", "--once", "--coordinator", cluster.address)
            assert (once.code, once.stderr) == (0, "")
            assert "Stage 1 (worker-1) is the slowest: " in once.stdout
            assert once.stdout.count("finished") == 4
            load = asyncio.create_task(_generate_forever(client))
            for key, code, num_frames in (("q", 0, 2), (CTRL_C, 130, 1)):
                async with Terminal("top", "--interval", "0.2", "--coordinator", cluster.address) as terminal:
                    for _ in range(num_frames):
                        await terminal.expect(r"Stage 1 \(worker-1\) is the slowest")
                    terminal.type(key)
                    assert await terminal.exit_code() == code
                    assert "Traceback" not in terminal.text
            load.cancel()
        unreachable = await run_stageline("top", "--once", "--coordinator", "127.0.0.1:1")
        assert (unreachable.code, unreachable.stdout) == (1, "")
        assert "no coordinator at 127.0.0.1:1" in unreachable.the_error()


@pytest.mark.full
async def test_the_dashboard_is_served_at_the_logged_address(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    write_secret(token_file, TOKEN)
    made = config(tmp_path, "--token-file", str(token_file))
    async with LocalCluster(made) as cluster:
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        assert cluster.dashboard_url is not None
        status = json.loads(await asyncio.to_thread(_read, cluster.dashboard_url + "api/status"))
        assert (status["state"], status["num_stages"]) == ("CLUSTER_STATE_SERVING", 3)
        assert status["can_act"] is True
        assert "stageline_" in await asyncio.to_thread(_read, cluster.dashboard_url + "metrics")
        assert TOKEN not in cluster.coordinator.read_log()
        taken = cluster.dashboard_url.removeprefix("http://").rstrip("/")
        second = await run_stageline(
            "coordinator",
            "--stages",
            "1",
            "--listen",
            "127.0.0.1:0",
            "--http",
            taken,
            "--mock-model",
            "layers=1",
        )
        assert (second.code, second.stdout) == (1, "")
        assert second.the_error().startswith(
            f"stageline: error[OS_ERROR]: cannot serve the dashboard on {taken}: address already in use"
        )


async def test_an_invalid_operator_token_is_bad_usage(tmp_path: Path) -> None:
    write_secret(tmp_path / "token", "short")
    line = ("coordinator", "--stages", "1", "--token-file", str(tmp_path / "token"))
    run = await run_stageline(*line)
    assert run.code == 2
    assert "has 5 characters, but must have at least 16" in run.the_error()
    assert "short" not in run.stderr


def _read(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()
