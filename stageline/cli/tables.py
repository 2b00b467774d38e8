"""The state of a cluster as tables."""

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stageline.cli.sizes import format_size
from stageline_rpc.v1 import cluster_pb2, stage_pb2

_NOTHING = "-"


def topology_table(status: cluster_pb2.GetStatusResponse) -> Table:
    """Which worker runs which layers, and what that takes."""
    table = _table("Stage", "Role", "Worker", "Layers", "Device", "Weights", "KV cache", right={"Weights"})
    for worker in _in_stage_order(status):
        if worker.HasField("stage"):
            table.add_row(*_place(worker), worker.device, *_sizes(worker, status))
    return table


def status_view(status: cluster_pb2.GetStatusResponse) -> RenderableType:
    """Everything that `stageline status` shows."""
    return Group(Text(describe_cluster(status)), _workers_table(status), Text(_describe_requests(status)))


def describe_cluster(status: cluster_pb2.GetStatusResponse) -> str:
    """Model and state, in one or two lines."""
    dtype = _name(stage_pb2.DType.Name(status.dtype), "DTYPE_")
    state = _name(cluster_pb2.ClusterState.Name(status.state), "CLUSTER_STATE_")
    reason = f": {status.detail}" if status.detail else ""
    epoch = f", epoch {status.epoch}" if status.epoch else ""
    return f"{status.model or 'no model'} in {dtype}, {status.num_stages} stages{epoch}\n{state}{reason}"


def describe_start(status: cluster_pb2.GetStatusResponse) -> str:
    """How far a cluster is on its way to serving, in one line."""
    state = _name(cluster_pb2.ClusterState.Name(status.state), "CLUSTER_STATE_")
    loading = [
        f"{worker.name} {worker.heartbeat.load_progress:.0%}"
        for worker in status.workers
        if worker.state == cluster_pb2.WORKER_STATE_LOADING
    ]
    return ", ".join([status.detail or state, *loading])


def _workers_table(status: cluster_pb2.GetStatusResponse) -> Table:
    table = _table(
        "Stage",
        "Role",
        "Worker",
        "Layers",
        "Device",
        "Address",
        "State",
        "Weights",
        "KV cache",
        "KV in use",
        "Resident",
        "Memory",
        right={"Weights", "Resident", "Memory"},
    )
    for worker in _in_stage_order(status):
        state = _name(cluster_pb2.WorkerState.Name(worker.state), "WORKER_STATE_")
        table.add_row(
            *_place(worker),
            worker.device,
            worker.address,
            f"{state}: {worker.detail}" if worker.detail else state,
            *_sizes(worker, status),
            _kv_use(worker.heartbeat.kv),
            _size(worker.heartbeat.resident_bytes),
            _size(worker.memory_bytes),
        )
    return table


def _describe_requests(status: cluster_pb2.GetStatusResponse) -> str:
    counts = status.requests
    return (
        f"requests: {counts.waiting} waiting, {counts.prefill} in prefill, {counts.decode} in decode; "
        f"{counts.finished} finished, {counts.cancelled} cancelled, {counts.failed} failed; "
        f"{counts.steps_in_flight} steps in flight"
    )


def _table(*columns: str, right: set[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _in_stage_order(status: cluster_pb2.GetStatusResponse) -> list[cluster_pb2.WorkerStatus]:
    return sorted(
        status.workers, key=lambda worker: (not worker.HasField("stage"), worker.stage, worker.name)
    )


def _place(worker: cluster_pb2.WorkerStatus) -> tuple[str, str, str, str]:
    if not worker.HasField("stage"):
        return _NOTHING, _NOTHING, worker.name, _NOTHING
    role = cluster_pb2.StageRole.Name(worker.role).removeprefix("STAGE_ROLE_")
    return str(worker.stage), role, worker.name, _layers(worker)


def _layers(worker: cluster_pb2.WorkerStatus) -> str:
    num_layers = worker.layer_end - worker.layer_begin
    if num_layers == 1:
        return f"{worker.layer_begin} (1)"
    return f"{worker.layer_begin} to {worker.layer_end - 1} ({num_layers})"


def _sizes(worker: cluster_pb2.WorkerStatus, status: cluster_pb2.GetStatusResponse) -> tuple[str, str]:
    kv = _size(worker.heartbeat.kv_bytes)
    if kv != _NOTHING:
        kv += f" ({status.num_blocks * status.block_size} tokens)"
    return _size(worker.heartbeat.weight_bytes), kv


def _kv_use(kv: cluster_pb2.KvUsage) -> str:
    num_blocks = kv.blocks_active + kv.blocks_inactive + kv.blocks_free
    if num_blocks == 0:
        return _NOTHING
    return f"{kv.blocks_active} of {num_blocks} blocks, {kv.blocks_inactive} cached"


def _size(size_bytes: int) -> str:
    return format_size(size_bytes) if size_bytes else _NOTHING


def _name(value: str, prefix: str) -> str:
    return value.removeprefix(prefix).lower().replace("_", " ")
