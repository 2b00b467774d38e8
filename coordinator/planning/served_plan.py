"""The plan for a served model under a coordinator's configuration."""

from collections.abc import Sequence

from checkpoint import DType
from coordinator.config import CoordinatorConfig
from coordinator.model import ServedModel
from coordinator.planning.plan import Plan, StepLimits, WorkerCapacity
from coordinator.planning.planner import make_plan
from coordinator.planning.refusals import refuse_counts


def check_counts(config: CoordinatorConfig, model: ServedModel) -> None:
    """What no worker can make possible: raises PlanImpossible for more stages than layers, and for `layers`
    that do not add up.
    """
    refuse_counts(
        model.config,
        [WorkerCapacity(name=f"stage {stage}", memory_bytes=1) for stage in range(config.num_stages)],
        block_size=config.block_size,
        layers=config.layers,
        max_kv_tokens=config.max_kv_tokens,
    )


def plan_for(config: CoordinatorConfig, model: ServedModel, workers: Sequence[WorkerCapacity]) -> Plan:
    """What a coordinator with this configuration does with these workers. Raises PlanImpossible.

    `config.layers` are for as many workers as there are to be stages. A bfloat16 checkpoint runs in float32
    where a worker lacks bfloat16, unless the configuration says.
    """
    limits = StepLimits(
        max_step_tokens=config.max_step_tokens,
        max_step_sequences=config.max_step_sequences,
        max_sequence_tokens=config.max_sequence_tokens or model.config.max_position_embeddings,
    )
    dtype = model.dtype
    if config.dtype is None and dtype is DType.BF16 and any(worker.lacks_bf16 for worker in workers):
        dtype = DType.F32
    return make_plan(
        model.config,
        dtype,
        workers,
        limits=limits,
        block_size=config.block_size,
        layers=config.layers if len(workers) == config.num_stages else None,
        max_kv_tokens=config.max_kv_tokens,
    )
