"""`stageline plan`: what each worker would get, without starting anything."""

from typing import Annotated

import typer
from rich.console import Console

from checkpoint import CheckpointError
from coordinator.config import CoordinatorConfig
from coordinator.planning.plan import PlanImpossible, WorkerCapacity
from stageline.cli import options
from stageline.cli.failures import CommandFailed
from stageline.cli.plan_view import plan_json, plan_view
from stageline.cli.sizes import parse_size
from wire.reasons import reason_of


def parse_workers(text: str) -> tuple[WorkerCapacity, ...]:
    """Workers called worker-0, worker-1, ... of these sizes, as in 24GiB,24GiB,8GiB. Raises ValueError."""
    return tuple(
        WorkerCapacity(name=f"worker-{number}", memory_bytes=parse_size(size))
        for number, size in enumerate(text.split(","))
    )


def plan(
    workers: Annotated[
        str,
        typer.Option(
            metavar="SIZE,SIZE,...",
            help="Memory of each worker for weights, KV and activations together, e.g. 24GiB,24GiB,8GiB.",
        ),
    ],
    model: options.Model = None,
    layers: options.Layers = None,
    dtype: options.Dtype = None,
    block_size: options.BlockSize = 16,
    max_step_tokens: options.MaxStepTokens = 512,
    max_step_sequences: options.MaxStepSequences = 64,
    max_model_len: options.MaxModelLen = None,
    kv_tokens: options.KvTokens = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, sizes in bytes.")] = False,
) -> int:
    """Show which layers each worker would get and what fits, without starting anything."""
    capacities = options.build_config(lambda: parse_workers(workers))
    config = options.build_config(
        lambda: CoordinatorConfig(
            model_directory=model,
            listen=options.DEFAULT_ADDRESS,
            num_stages=len(capacities),
            layers=options.parse_layers(layers),
            dtype=dtype,
            block_size=block_size,
            max_step_tokens=max_step_tokens,
            max_step_sequences=max_step_sequences,
            max_sequence_tokens=max_model_len,
            max_kv_tokens=kv_tokens,
            queue_size=1,
        )
    )
    from coordinator.model import open_model  # imported late, as the coordinator does
    from coordinator.planning.served_plan import plan_for

    try:
        served = open_model(config)
        made = plan_for(config, served, capacities)
    except (CheckpointError, PlanImpossible) as error:
        raise CommandFailed(str(error), reason=reason_of(error)) from error
    if as_json:
        print(plan_json(made, served.name))
    else:
        Console(highlight=False).print(plan_view(made, served.name))
    return 0
