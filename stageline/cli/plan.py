"""`stageline plan`: the plan for given workers, without starting anything."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from checkpoint import CheckpointError
from checkpoint.implementation import Implementation
from coordinator.config import CoordinatorConfig
from coordinator.planner.plan import (
    DeviceKind,
    LayerKinds,
    Plan,
    PlanImpossible,
    StagePlan,
    WorkerCapacity,
    format_ranges,
    layer_ranges,
)
from stageline.cli import options
from stageline.cli.check import check
from stageline.cli.config_flags import config_parameters, make_config
from stageline.cli.options import CommandFailed
from stageline.cli.output import line_console
from stageline.cli.tables import recurrent_states, windowed_blocks
from weights.location import is_remote, remote_model
from wire.device_rates import DeviceRates
from wire.errors import reason_of
from wire.sizes import format_size, parse_size
from wire.user_files import NoHomeDirectory, find_cache_directory

if TYPE_CHECKING:
    from coordinator.model import ServedModel

_SIZES = ("Weights", "KV", "Activations", "Total", "Free")
_RATES = ("Memory", "Products", "Share", "Decode step")
_KIND_SIZES = ("Weights", "Step cost", "KV/token", "KV group")

_WITHOUT_WORKERS = "is required: give the memory of each worker, such as 24GiB,24GiB"


def plan_view(plan: Plan, model: "ServedModel", layers: LayerKinds) -> RenderableType:
    """Stages with layers and memory, kinds of layers, legal cuts, and the KV cache's capacity."""
    notes = (*_of_gpus(plan), *_step_cost(layers), _cuts(layers.legal_cuts, plan.num_layers), _cache(plan))
    of_model = (*_unpacking(plan, model), *_states(plan), *_implementation(model))
    lines = (Text(line) for line in (*notes, *of_model))
    tables = (_stages_table(plan), "", *_rates_table(plan), _kinds_table(layers))
    return Group(Text(_headline(plan, model)), "", *tables, "", *lines)


def _stages_table(plan: Plan) -> Table:
    # eight columns fit into 80 characters with one blank between them
    table = _table("Role", "Worker", "Layers", *_SIZES, right=_SIZES)
    for stage in plan.stages:
        table.add_row(stage.role.value, stage.worker, _layers(stage), *_sizes(stage))
    return table


def _rates_table(plan: Plan) -> tuple[RenderableType, ...]:
    """Shares of the layers by the speed of devices; nothing if all count as equally fast."""
    table = _table("Worker", *_RATES, right=_RATES)
    total = sum(stage.cost for stage in plan.stages)
    for stage in plan.stages:
        if stage.rates is None or stage.step_s is None:
            return ()
        share, step = f"{stage.cost / total:.0%}", f"{stage.step_s * 1e3:.3g} ms"
        memory, products = str(stage.rates).split(", ")
        table.add_row(stage.worker, memory, products, share, step)
    return table, ""


def _kinds_table(layers: LayerKinds) -> Table:
    """Weights and KV are of one layer of a kind."""
    table = _table("Kind", "Layers", *_KIND_SIZES, right=_KIND_SIZES)
    for kind in layers.kinds:
        sizes = format_size(kind.weight_bytes), f"{kind.step_cost:.2f}", str(kind.kv_bytes_per_token)
        table.add_row(kind.name, format_ranges(kind.layers), *sizes, f"{kind.group} ({kind.num_blocks})")
    return table


def _table(*columns: str, right: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, padding=0)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def _of_gpus(plan: Plan) -> list[str]:
    """What the activations of GPUs include, and what their hosts need."""
    if not any(stage.buffer_bytes for stage in plan.stages):
        return []
    buffers, overhead = (
        format_size(max(getattr(stage, name) for stage in plan.stages))
        for name in ("buffer_bytes", "overhead_bytes")
    )
    tables = [
        f"{stage.worker} reads {format_size(stage.table_bytes)} of tables of n-grams in page-locked memory of"
        " its host, which is assumed to have room."
        for stage in plan.stages
        if stage.table_bytes
    ]
    return [
        f"Activations include up to {buffers} of buffers for copies, which the host pins as much memory for,"
        f" and {overhead} of workspaces and CUDA graphs of a GPU.",
        *tables,
    ]


def _step_cost(layers: LayerKinds) -> list[str]:
    """The unit of the column, if kinds differ in it."""
    if len({kind.step_cost for kind in layers.kinds}) == 1:
        return []
    return [
        f"Step cost: weights read by a decode step of {layers.step_sequences:.3g} sequences, relative to the"
        " cheapest layer."
    ]


def _cuts(legal: frozenset[int], num_layers: int) -> str:
    illegal = [layer for layer in range(1, num_layers) if layer not in legal]
    if not illegal:
        return "A stage can begin with any layer."
    can, cannot = (format_ranges(layer_ranges(layers)) for layers in ([0, *sorted(legal)], illegal))
    return f"A stage can begin with layers {can}; not with {cannot}."


def plan_json(plan: Plan, model: "ServedModel", layers: LayerKinds) -> str:
    """The plan as JSON: sizes in bytes, `layer_end` and the ends of ranges one past the last layer."""
    facts = {
        "model": model.name,
        "dtype": plan.dtype.value,
        "implementation": model.implementation.value,
        "num_layers": plan.num_layers,
        "block_size": plan.block_size,
        "num_blocks": plan.num_blocks,
        "num_kv_tokens": plan.num_kv_tokens,
        "window_blocks": [
            {"window": window, "num_blocks": num_blocks} for window, num_blocks in plan.window_blocks
        ],
        "num_states": plan.num_states,
        "max_sequence_tokens": plan.max_sequence_tokens,
        "stages": [_stage_facts(stage) for stage in plan.stages],
        "step_sequences": layers.step_sequences,
        "layer_kinds": [asdict(kind) for kind in layers.kinds],
        "legal_cuts": sorted(layers.legal_cuts),
    }
    if (weights := model.weight_format) is not None:
        facts["weight_format"] = weights.value
    if plan.kv_dtype is not None:
        facts["kv_dtype"] = plan.kv_dtype.value
    if model.quantized is not None:
        facts |= {"stored_format": model.quantized.label, "stored_bytes": model.quantized.size_bytes}
        facts["holds_stored"] = plan.holds_stored
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
        "buffer_bytes": stage.buffer_bytes,
        "overhead_bytes": stage.overhead_bytes,
        "table_bytes": stage.table_bytes,
        "pinned_bytes": stage.pinned_bytes,
        "total_bytes": stage.total_bytes,
        "free_bytes": stage.free_bytes,
        "memory_bytes": stage.memory_bytes,
        "cost": stage.cost,
        "bytes_per_second": None if stage.rates is None else stage.rates.bytes_per_s,
        "operations_per_second": None if stage.rates is None else stage.rates.operations_per_s,
        "step_s": stage.step_s,
    }


def _headline(plan: Plan, model: "ServedModel") -> str:
    stages = "1 stage" if len(plan.stages) == 1 else f"{len(plan.stages)} stages"
    weights = model.weight_format
    dtype = plan.dtype.value if weights is None else f"{plan.dtype.value} with {weights.value} weights"
    return f"{model.name} in {dtype}: {plan.num_layers} layers on {stages}"


def _cache(plan: Plan) -> str:
    dtype = "" if plan.kv_dtype is None else f" in {plan.kv_dtype.value}"
    return (
        f"KV cache: {plan.num_kv_tokens} tokens{dtype} ({plan.num_blocks} blocks of {plan.block_size}"
        f"{windowed_blocks(plan.window_blocks)}){recurrent_states(plan.num_states)}."
        f" Longest sequence: {plan.max_sequence_tokens} tokens."
    )


def _states(plan: Plan) -> list[str]:
    """A warning, if there are fewer recurrent states than sequences."""
    return [f"Warning: {plan.states_problem}."] if plan.states_problem else []


def _implementation(model: "ServedModel") -> list[str]:
    """A warning, if transformers computes the layers."""
    from coordinator.model import transformers_note

    if model.implementation is Implementation.NATIVE:
        return []
    return [f"Warning: {transformers_note(model.config)}."]


def _unpacking(plan: Plan, model: "ServedModel") -> list[str]:
    """Why weights need another size in memory than in files; empty for plain ones."""
    quantized, weights = model.quantized, model.weight_format
    if quantized is None:
        return []
    unpacked = plan.dtype.value if weights is None else f"{plan.dtype.value} and held in {weights.value}"
    memory = sum(stage.weight_bytes for stage in plan.stages)
    how = "is multiplied by as it is stored" if plan.holds_stored else f"is unpacked to {unpacked}"
    return [
        f"Weights need {memory / quantized.size_bytes:.1f} x their size in files"
        f" ({format_size(memory)} instead of {format_size(quantized.size_bytes)}),"
        f" because {quantized.label} {how}."
    ]


def _layers(stage: StagePlan) -> str:
    if stage.num_layers == 1:
        return f"{stage.layer_begin} (1)"
    return f"{stage.layer_begin} to {stage.layer_end - 1} ({stage.num_layers})"


def _sizes(stage: StagePlan) -> tuple[str, ...]:
    sizes = (
        stage.weight_bytes,
        stage.kv_bytes,
        stage.activation_bytes + stage.buffer_bytes + stage.overhead_bytes,
        stage.total_bytes,
        stage.free_bytes,
    )
    return tuple(format_size(size) for size in sizes)


def parse_workers(text: str, *, gpus: bool = False) -> tuple[WorkerCapacity, ...]:
    """Parse memory sizes such as 24GiB,8GiB, for worker-0, worker-1, ... Raises ValueError."""
    device = DeviceKind.GPU_IN_PLACE if gpus else DeviceKind.HOST
    return tuple(
        WorkerCapacity(name=f"worker-{number}", memory_bytes=parse_size(size), device=device)
        for number, size in enumerate(text.split(","))
    )


def with_rates(workers: tuple[WorkerCapacity, ...], text: str | None) -> tuple[WorkerCapacity, ...]:
    """The workers with the rates in `text`, one each. Raises ValueError."""
    if text is None:
        return workers
    rates = [DeviceRates.parse(part) for part in text.split(",")]
    if len(rates) != len(workers):
        raise ValueError(f"--device-rates has {len(rates)} rates for {len(workers)} workers: give one each")
    return tuple(replace(worker, rates=rate) for worker, rate in zip(workers, rates, strict=True))


_FLAGS = (
    "--model",
    "--layers",
    "--dtype",
    "--implementation",
    "--quantize",
    "--kv-dtype",
    "--block-size",
    "--max-step-tokens",
    "--max-step-sequences",
    "--max-model-len",
    "--kv-tokens",
    "--prefix-cache",
)


_Gpus = Annotated[
    bool,
    typer.Option(
        "--gpus",
        help="Plan for GPUs with Stageline's kernels: count buffers and workspaces, and no copies of"
        " keys and values (default: CPUs).",
    ),
]
_DeviceRates = Annotated[
    str | None,
    typer.Option(
        "--device-rates",
        metavar="GB/s:TFLOP/s,...",
        help="Speed of the device of each worker, e.g. 3350:800,2000:312, by which layers are shared"
        " (default: all are equally fast).",
    ),
]


@options.takes(config_parameters(CoordinatorConfig, only=_FLAGS))
def plan(
    context: typer.Context,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE,SIZE,...",
            help="Memory of each worker for weights, KV cache and activations, e.g. 24GiB,24GiB,8GiB; needed"
            " unless --check is given.",
        ),
    ] = None,
    checked: Annotated[
        str | None,
        typer.Option(
            "--check",
            metavar="MODEL",
            help="Check a checkpoint, in a directory or at an address such as hf://ORG/NAME, instead of"
            " planning: say what is not served, and why. The exit code is 0 if it is served.",
        ),
    ] = None,
    gpus: _Gpus = False,
    device_rates: _DeviceRates = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, sizes in bytes.")] = False,
    **flags: Any,
) -> int:
    """Show which layers each worker would get and what fits, without starting anything."""
    if checked is not None:
        _refuse_beside_check(context)
        return check(_files_of(checked), name=checked, as_json=as_json)
    if workers is None:
        raise typer.BadParameter(_WITHOUT_WORKERS, param_hint="--workers")
    capacities = options.build_config(lambda: with_rates(parse_workers(workers, gpus=gpus), device_rates))
    config = make_config(
        CoordinatorConfig,
        context,
        flags,
        num_stages=len(capacities),
        cache_directory=find_cache_directory(os.environ),
    )
    _show_plan(config, capacities, as_json=as_json)
    return 0


def _files_of(model: str) -> Path:
    """The files of a model that say whether it is served, which may be on another host."""
    if not is_remote(model):
        return Path(model)
    from weights.remote import fetch_files  # imported late, as the coordinator does

    if (cache := find_cache_directory(os.environ)) is None:
        raise NoHomeDirectory("there is no home directory for config and headers: set XDG_CACHE_HOME")
    try:
        return fetch_files(remote_model(model), cache)
    except CheckpointError as error:
        raise CommandFailed(str(error), reason=reason_of(error)) from error
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--check") from None


def _refuse_beside_check(context: typer.Context) -> None:
    """A check reads nothing but the directory: flags of plans would be ignored."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        is_given = source is not None and source.name == "COMMANDLINE"
        if is_given and option.name not in ("checked", "as_json"):
            raise typer.BadParameter(f"takes no {option.opts[0]}", param_hint="--check")


def _show_plan(config: CoordinatorConfig, capacities: tuple[WorkerCapacity, ...], *, as_json: bool) -> None:
    from coordinator.model import open_model  # imported late, as the coordinator does
    from coordinator.planner.layer_kinds import layer_kinds
    from coordinator.planner.planner import plan_for

    try:
        served = open_model(config)
        made = plan_for(config, served, capacities)
    except (CheckpointError, PlanImpossible) as error:
        raise CommandFailed(str(error), reason=reason_of(error)) from error
    layers = layer_kinds(served.config, made)
    if as_json:
        print(plan_json(made, served, layers))
    else:
        line_console(highlight=False).print(plan_view(made, served, layers))
