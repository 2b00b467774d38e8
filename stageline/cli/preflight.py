"""Refuses a local cluster that cannot be planned, before any process of it is started."""

from checkpoint import CheckpointError
from coordinator.config import CoordinatorConfig
from coordinator.planning.plan import PlanImpossible, WorkerCapacity
from deploy import LocalClusterConfig
from stageline.cli.failures import CommandFailed
from wire.reasons import reason_of

_UNKNOWN_MEMORY_BYTES = 2**50  # of a device that only its worker asks: no reason to refuse


def check_plan(coordinator: CoordinatorConfig, cluster: LocalClusterConfig) -> None:
    """Raises CommandFailed with the line that the coordinator would say once all workers have joined."""
    from coordinator.model import open_model  # imported late, as the coordinator does
    from coordinator.planning.served_plan import plan_for

    workers = [
        WorkerCapacity(name=name, memory_bytes=memory_bytes or _UNKNOWN_MEMORY_BYTES)
        for name, memory_bytes in cluster.worker_memory_bytes().items()
    ]
    try:
        plan_for(coordinator, open_model(coordinator), workers)
    except (CheckpointError, PlanImpossible) as error:
        raise CommandFailed(str(error), reason=reason_of(error)) from error
