"""`stageline gateway` as a process: start, requests, drain, errors of the command line."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from httpx2 import AsyncClient, ConnectError

from deploy import LocalCluster, LocalClusterConfig
from stageline import Client
from tests.e2e.clusters import START_TIMEOUT_S, is_serving, wait_for_status
from tests.e2e.commands import ENVIRONMENT, Shell, exit_code, run_stageline

pytestmark = pytest.mark.asyncio(loop_scope="module")

TIMEOUT_S = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """Mock stages, which no test disturbs."""
    config = LocalClusterConfig(
        num_workers=2,
        mocks=("step=10ms",),
        coordinator_arguments=("--mock-model", "layers=8,hidden=64"),
        environment=ENVIRONMENT,
        log_directory=tmp_path_factory.mktemp("gateways"),
    )
    async with LocalCluster(config) as running:
        await running.wait_until_serving(timeout_s=START_TIMEOUT_S)
        yield running


async def test_requests_through_a_gateway_and_its_drain(cluster: LocalCluster, tmp_path: Path) -> None:
    async with Shell(tmp_path) as shell:
        gateway = await shell.start(
            "gw", "gateway", "--coordinator", cluster.address, "--listen", "127.0.0.1:0"
        )
        url = f"http://{await gateway.listening_address(timeout_s=TIMEOUT_S)}"
        async with AsyncClient(base_url=url, timeout=TIMEOUT_S) as http, Client(cluster.address) as client:
            body = {"prompt": [1, 2, 3], "max_tokens": 8, "seed": 5, "n": 2, "return_token_ids": True}
            found = (await http.post("/v1/completions", json=body)).json()
            expected = await client.complete([1, 2, 3], max_tokens=8, seed=5, n=2, temperature=1.0)
            assert [choice["token_ids"] for choice in found["choices"]] == [
                completion.token_ids for completion in expected
            ]
            assert found["usage"]["stageline"]["first_token_s"] > 0
            refused = await http.post("/v1/completions", json={"prompt": "text"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")

            long = {
                "prompt": [1],
                "max_tokens": 50,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            async with http.stream("POST", "/v1/completions", json=long) as response:
                lines = response.aiter_lines()
                assert (await anext(lines)).startswith("data: ")
                gateway.send_signal(signal.SIGTERM)
                events = [line.removeprefix("data: ") async for line in lines if line]
            assert events[-1] == "[DONE]"
            assert json.loads(events[-2])["usage"]["completion_tokens"] == 50
        assert await exit_code(gateway) == "exit code 0"
        assert "Traceback" not in gateway.read_log()


@pytest.mark.full
async def test_a_client_that_leaves_leaves_nothing_behind(cluster: LocalCluster, tmp_path: Path) -> None:
    async with Shell(tmp_path) as shell:
        gateway = await shell.start(
            "gw", "gateway", "--coordinator", cluster.address, "--listen", "127.0.0.1:0"
        )
        url = f"http://{await gateway.listening_address(timeout_s=TIMEOUT_S)}"
        for streams in (False, True):
            async with AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
                body = {"prompt": [1, 2, 3], "max_tokens": 2000, "stream": streams}
                posting = asyncio.create_task(http.post("/v1/completions", json=body))
                await wait_for_status(cluster.address, lambda status: status.requests.decode == 1)
                posting.cancel()
                await asyncio.gather(posting, return_exceptions=True)
            await wait_for_status(cluster.address, lambda status: status.requests.decode == 0)


@pytest.mark.full
async def test_a_batch_has_the_tokens_of_the_grpc_client(cluster: LocalCluster, tmp_path: Path) -> None:
    async with Shell(tmp_path) as shell:
        gateway = await shell.start(
            "gw", "gateway", "--coordinator", cluster.address, "--listen", "127.0.0.1:0"
        )
        url = f"http://{await gateway.listening_address(timeout_s=TIMEOUT_S)}"
        bodies = {
            f"seed {seed}": {"prompt": [1, 2, 3], "max_tokens": 8, "seed": seed, "return_token_ids": True}
            for seed in range(20)
        }
        lines = [
            {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
            for custom_id, body in bodies.items()
        ]
        (tmp_path / "in").write_text("".join(json.dumps(line) + "\n" for line in lines))
        files = (str(tmp_path / "in"), str(tmp_path / "out"))
        finished = await run_stageline("batch", *files, "--gateway", url)
        assert (finished.code, finished.stderr) == (0, "")
        assert "20 served, 0 failed" in finished.stdout
        assert "; 160 output tokens, " in finished.stdout
        answers = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
        assert {answer["custom_id"] for answer in answers} == bodies.keys()
        async with Client(cluster.address) as client:
            for answer in answers:
                seed = int(answer["custom_id"].removeprefix("seed "))
                (expected,) = await client.complete([1, 2, 3], max_tokens=8, seed=seed, temperature=1.0)
                assert answer["response"]["body"]["choices"][0]["token_ids"] == expected.token_ids


@pytest.mark.full
async def test_a_gateway_waits_for_its_coordinator(tmp_path: Path, free_address: str) -> None:
    async with Shell(tmp_path) as shell:
        listen = ("--listen", free_address, "--log-format", "json")
        gateway = await shell.start("gw", "gateway", "--coordinator", "127.0.0.1:1", *listen)
        async with AsyncClient(base_url=f"http://{free_address}", timeout=TIMEOUT_S) as http:
            async with asyncio.timeout(TIMEOUT_S):
                while not await _is_healthy(http):
                    await asyncio.sleep(0.05)
            for path in ("/readyz", "/v1/models"):
                response = await http.get(path)
                assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
            for path in ("/version", "/metrics", "/"):
                assert (await http.get(path)).status_code == 200
        log = gateway.read_log()
        assert f"bound to {free_address}, connecting to coordinator 127.0.0.1:1" in log
        assert log.count("waiting for coordinator 127.0.0.1:1") == 1
        taken = await run_stageline("gateway", "--listen", free_address)
        assert taken.code == 1
        assert taken.the_error() == (
            f"stageline: error[OS_ERROR]: cannot serve the gateway on {free_address}: "
            "address already in use; choose another address with --listen HOST:PORT"
        )
        gateway.send_signal(signal.SIGTERM)
        assert await exit_code(gateway) == "exit code 0"


@pytest.mark.full
async def test_what_no_gateway_can_use_is_one_line(cluster: LocalCluster, tmp_path: Path) -> None:
    worker = (await wait_for_status(cluster.address, is_serving)).workers[0].address
    finished = await run_stageline("gateway", "--coordinator", worker, "--listen", "127.0.0.1:0")
    assert finished.code == 1
    assert "Traceback" not in finished.stderr
    assert f"coordinator {worker} answers UNIMPLEMENTED" in finished.stderr.splitlines()[-1]
    (tmp_path / "template").write_bytes(b"\xff")
    finished = await run_stageline("gateway", "--chat-template", str(tmp_path / "template"))
    assert finished.code == 1
    assert f"{tmp_path / 'template'} is no UTF-8 text" in finished.the_error()
    finished = await run_stageline("up", "--gateway", "off", "--served-model-name", "mine")
    assert finished.code == 2
    assert "--served-model-name needs a gateway" in finished.the_error()


async def _is_healthy(http: AsyncClient) -> bool:
    try:
        return (await http.get("/health")).status_code == 200
    except ConnectError:
        return False


@pytest.mark.full
async def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    for arguments, text in (
        (("--listen", "nowhere"), "address 'nowhere' is not HOST:PORT"),
        (("--coordinator", "127.0.0.1:0"), "has port 0"),
        (("--chat-template", str(tmp_path / "none")), "does not exist"),
        (("--served-model-name", "a,,b"), "has an empty name"),
        (("--max-body", "5"), "has no unit"),
    ):
        finished = await run_stageline("gateway", *arguments)
        assert finished.code == 2
        assert text in finished.the_error()
