"""`stageline demo`: the built-in model answers through three stage processes of this machine."""

import asyncio

from rich.console import Console

from coordinator.config import CoordinatorConfig
from deploy import LocalCluster, LocalClusterConfig
from stageline.cli import options
from stageline.cli.coordinator import flags_of
from stageline.cli.options import CommandFailed
from stageline.cli.output import Report, live, show_stream
from stageline.cli.tables import topology_view
from stageline.cli.up import check_plan, wait_until_serving
from stageline.client.client import Client
from stageline.client.errors import StagelineError

PROMPT = "Once upon a time"

_NUM_WORKERS = 3
_START_TIMEOUT_S = 180.0
_GENERATE_TIMEOUT_S = 120.0
_MAX_TOKENS = 300  # the story ends by itself before
_KV_TOKENS = 8192


def demo() -> int:
    """Start a coordinator and three workers here, let the built-in model tell a story, and end them."""
    coordinator = CoordinatorConfig(
        model_directory=None,
        listen=options.DEFAULT_ADDRESS,
        num_stages=_NUM_WORKERS,
        layers=None,
        dtype=None,
        block_size=16,
        max_step_tokens=512,
        max_step_sequences=64,
        max_sequence_tokens=None,
        max_kv_tokens=_KV_TOKENS,
        queue_size=256,
    )
    cluster = LocalClusterConfig(
        num_workers=_NUM_WORKERS,
        coordinator_arguments=flags_of(coordinator),
        worker_arguments=(coordinator.logs.flags,) * _NUM_WORKERS,
    )
    check_plan(coordinator, cluster)
    asyncio.run(run_demo(cluster))
    return 0


async def run_demo(config: LocalClusterConfig) -> None:
    """Raises ClusterFailed or CommandFailed, with the last lines of a log, when anything fails."""
    console = Console(highlight=False)
    console.print(
        f"Starting a coordinator and {config.num_workers} stage workers, each a process of its own ..."
    )
    async with LocalCluster(config) as cluster:
        status = await wait_until_serving(cluster, console, timeout_s=_START_TIMEOUT_S)
        console.print(topology_view(status))
        console.print(f"[bold]{PROMPT}[/]", end="")
        report = await cluster.while_running(_complete(cluster))
        console.print(f"\n[dim]{report.describe_speed()}[/]")
    console.print("[dim]All processes have ended.[/]")


async def _complete(cluster: LocalCluster) -> Report:
    try:
        async with Client(cluster.address) as client:
            outputs = client.generate(PROMPT, max_tokens=_MAX_TOKENS, timeout_s=_GENERATE_TIMEOUT_S)
            return await show_stream(outputs, live(as_token_ids=False))
    except StagelineError as error:
        lines = "\n".join(f"  | {line}" for line in cluster.coordinator.last_lines())
        text = f"{error}; the coordinator's log ends with\n{lines}"
        raise CommandFailed(text, reason=error.reason) from error
