"""`stageline demo`: completions of the built-in model through three stage processes on this machine."""

import asyncio

from httpx2 import HTTPError
from rich.console import Console

from coordinator.config import CoordinatorConfig
from deploy import ClusterFailed, LocalCluster, LocalClusterConfig, LocalRun
from stageline.cli.config_flags import flags_of
from stageline.cli.options import CommandFailed
from stageline.cli.output import Report, live, show_stream
from stageline.cli.tables import topology_view
from stageline.cli.up import ANY_PORT, GATEWAY_TIMEOUT_S, SET_BY_CLUSTER, check_plan, wait_until_serving
from stageline.client.client import Client
from stageline.client.errors import StagelineError
from stageline.gateway_client import open_gateway_client

PROMPT = "Once upon a time"

_NUM_WORKERS = 3
_START_TIMEOUT_S = 180.0
_GENERATE_TIMEOUT_S = 120.0
_MAX_TOKENS = 300  # more than the story needs
_ANSWER_TOKENS = 40
_KV_TOKENS = 8192


def demo() -> int:
    """Run the built-in model on a coordinator and three local workers, then stop them."""
    coordinator = CoordinatorConfig(num_stages=_NUM_WORKERS, max_kv_tokens=_KV_TOKENS, http=None)
    cluster = LocalClusterConfig(
        num_workers=_NUM_WORKERS,
        gateway=ANY_PORT,
        gateway_arguments=flags_of(coordinator.logs),
        coordinator_arguments=flags_of(coordinator, without=SET_BY_CLUSTER),
        worker_arguments=(flags_of(coordinator.logs),) * _NUM_WORKERS,
    )
    run = cluster.run()
    check_plan(coordinator, run)
    asyncio.run(run_demo(run))
    return 0


async def run_demo(config: LocalRun) -> None:
    """Raises ClusterFailed or CommandFailed, with the end of a log."""
    console, num_workers = Console(highlight=False), len(config.spec.workers)
    console.print(
        f"Starting a coordinator, {num_workers} stage workers and a gateway as separate processes ..."
    )
    async with LocalCluster(config) as cluster:
        status = await wait_until_serving(cluster, console, timeout_s=_START_TIMEOUT_S)
        console.print(topology_view(status))
        console.print(f"[bold]{PROMPT}[/]", end="")
        report = await cluster.while_running(_complete(cluster))
        console.print(f"\n[dim]{report.describe_speed()}[/]\n")
        url = await cluster.while_running(cluster.gateway_url(timeout_s=GATEWAY_TIMEOUT_S))
        console.print(f"The gateway at {url}/v1 answers a client of OpenAI's API:")
        console.print(await cluster.while_running(_ask(url)), soft_wrap=True)
    console.print("[dim]All processes stopped.[/]")


async def _ask(url: str) -> str:
    """Return the gateway's answer to one chat message."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": _ANSWER_TOKENS, "temperature": 0}
    try:
        async with open_gateway_client(url, timeout=_GENERATE_TIMEOUT_S) as client:
            response = await client.post("/v1/chat/completions", json=body)
    except HTTPError as error:
        raise ClusterFailed(f"the gateway does not answer: {error}") from error
    if response.is_error:
        raise ClusterFailed(f"the gateway answers {response.status_code}: {response.text}")
    return str(response.json()["choices"][0]["message"]["content"])


async def _complete(cluster: LocalCluster) -> Report:
    try:
        async with Client(cluster.address) as client:
            outputs = client.generate(PROMPT, max_tokens=_MAX_TOKENS, timeout_s=_GENERATE_TIMEOUT_S)
            return await show_stream(outputs, live(as_token_ids=False))
    except StagelineError as error:
        raise CommandFailed(
            f"{error}; the coordinator's log ends with",
            reason=error.reason,
            log_lines=cluster.coordinator.last_lines(),
        ) from error
