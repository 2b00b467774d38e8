"""`stageline plan`: the plan for given workers, without starting anything."""

import json
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from checkpoint import CheckpointError
from coordinator.config import CoordinatorConfig
from coordinator.planner.plan import Plan, PlanImpossible, StagePlan, WorkerCapacity
from stageline.cli import options
from stageline.cli.config_flags import config_parameters, make_config
from stageline.cli.options import CommandFailed
from wire.errors import reason_of
from wire.sizes import format_size, parse_size

_SIZES = ("Weights", "KV", "Activations", "Total", "Free")


def plan_view(plan: Plan, model: str) -> RenderableType:
    """Stages with layers and memory, and the KV cache's capacity."""
    # eight columns fit into 80 characters with one blank between them
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, padding=0)
    for column in ("Role", "Worker", "Layers", *_SIZES):
        table.add_column(column, justify="right" if column in _SIZES else "left")
    for stage in plan.stages:
        table.add_row(stage.role.value, stage.worker, _layers(stage), *_sizes(stage))
    return Group(Text(_headline(plan, model)), "", table, "", Text(_cache(plan)))


def plan_json(plan: Plan, model: str) -> str:
    """The plan as JSON: sizes in bytes, `layer_end` one past the last layer."""
    facts = {
        "model": model,
        "dtype": plan.dtype.value,
        "num_layers": plan.num_layers,
        "block_size": plan.block_size,
        "num_blocks": plan.num_blocks,
        "num_kv_tokens": plan.num_kv_tokens,
        "max_sequence_tokens": plan.max_sequence_tokens,
        "stages": [_stage_facts(stage) for stage in plan.stages],
    }
    return json.dumps(facts, indent=2)


def _stage_facts(stage: StagePlan) -> dict[str, object]:
    return {
        "stage": stage.stage,
        "worker": stage.worker,
        "role": stage.role.value,
        "layer_begin": stage.layer_begin,
        "layer_end": stage.layer_end,
        "weight_bytes": stage.weight_bytes,
        "kv_bytes": stage.kv_bytes,
        "activation_bytes": stage.activation_bytes,
        "total_bytes": stage.total_bytes,
        "free_bytes": stage.free_bytes,
        "memory_bytes": stage.memory_bytes,
        "cost": stage.cost,
    }


def _headline(plan: Plan, model: str) -> str:
    stages = "1 stage" if len(plan.stages) == 1 else f"{len(plan.stages)} stages"
    return f"{model} in {plan.dtype.value}: {plan.num_layers} layers on {stages}"


def _cache(plan: Plan) -> str:
    return (
        f"KV cache: {plan.num_kv_tokens} tokens ({plan.num_blocks} blocks of {plan.block_size})."
        f" Longest sequence: {plan.max_sequence_tokens} tokens."
    )


def _layers(stage: StagePlan) -> str:
    if stage.num_layers == 1:
        return f"{stage.layer_begin} (1)"
    return f"{stage.layer_begin} to {stage.layer_end - 1} ({stage.num_layers})"


def _sizes(stage: StagePlan) -> tuple[str, ...]:
    sizes = (
        stage.weight_bytes,
        stage.kv_bytes,
        stage.activation_bytes,
        stage.total_bytes,
        stage.free_bytes,
    )
    return tuple(format_size(size) for size in sizes)


def parse_workers(text: str) -> tuple[WorkerCapacity, ...]:
    """Parse memory sizes such as 24GiB,8GiB, for worker-0, worker-1, ... Raises ValueError."""
    return tuple(
        WorkerCapacity(name=f"worker-{number}", memory_bytes=parse_size(size))
        for number, size in enumerate(text.split(","))
    )


_FLAGS = (
    "--model",
    "--layers",
    "--dtype",
    "--block-size",
    "--max-step-tokens",
    "--max-step-sequences",
    "--max-model-len",
    "--kv-tokens",
)


@options.takes(config_parameters(CoordinatorConfig, only=_FLAGS))
def plan(
    context: typer.Context,
    workers: Annotated[
        str,
        typer.Option(
            metavar="SIZE,SIZE,...",
            help="Memory of each worker for weights, KV cache and activations, e.g. 24GiB,24GiB,8GiB.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, sizes in bytes.")] = False,
    **flags: Any,
) -> int:
    """Show which layers each worker would get and what fits, without starting anything."""
    capacities = options.build_config(lambda: parse_workers(workers))
    config = make_config(CoordinatorConfig, context, flags, num_stages=len(capacities))
    from coordinator.model import open_model  # imported late, as the coordinator does
    from coordinator.planner.planner import plan_for

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
