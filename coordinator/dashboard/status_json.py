"""`/api/status`: plan, workers and requests, as `GetStatus` tells them, in words."""

from typing import Any

from stageline_rpc.v1 import cluster_pb2, inference_pb2, stage_pb2
from wire.wire_dtypes import WIRE_DTYPE_FROM_MESSAGE


def status_fields(
    status: cluster_pb2.GetStatusResponse, model: inference_pb2.GetModelResponse, *, can_act: bool
) -> dict[str, Any]:
    """`can_act`: whoever has the token may cancel requests and drain workers."""
    return {
        "model": status.model,
        "architecture": model.architecture,
        "max_sequence_tokens": model.max_sequence_tokens,
        "dtype": _word(stage_pb2.DType.Name(status.dtype), "DTYPE_"),
        "wire_dtype": WIRE_DTYPE_FROM_MESSAGE[status.wire_dtype].value if status.wire_dtype else None,
        "state": _word(cluster_pb2.ClusterState.Name(status.state), "CLUSTER_STATE_"),
        "health": _word(cluster_pb2.Health.Name(status.health), "HEALTH_"),
        "detail": status.detail or status.journal.detail,
        "epoch": status.epoch,
        "num_stages": status.num_stages,
        "block_size": status.block_size,
        "num_blocks": status.num_blocks,
        "self_check": status.self_check.detail,
        "requests": _requests(status.requests),
        "workers": [_worker(each) for each in status.workers],
        "can_act": can_act,
    }


def _word(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower().replace("_", " ")


def _requests(counts: cluster_pb2.RequestCounts) -> dict[str, int]:
    return {field.name: getattr(counts, field.name) for field in counts.DESCRIPTOR.fields}


def _worker(worker: cluster_pb2.WorkerStatus) -> dict[str, Any]:
    heartbeat = worker.heartbeat
    kv = heartbeat.kv
    stage = None
    if worker.HasField("stage"):
        stage = {
            "index": worker.stage,
            "role": cluster_pb2.StageRole.Name(worker.role).removeprefix("STAGE_ROLE_"),
            "layer_begin": worker.layer_begin,
            "layer_end": worker.layer_end,
        }
    return {
        "name": worker.name,
        "address": worker.address,
        "device": worker.device,
        "kernels": worker.kernels,
        "state": _word(cluster_pb2.WorkerState.Name(worker.state), "WORKER_STATE_"),
        "detail": worker.detail,
        "pid": worker.pid,
        "stage": stage,
        "memory_bytes": worker.memory_bytes,
        "weight_bytes": heartbeat.weight_bytes,
        "kv_bytes": heartbeat.kv_bytes,
        "resident_bytes": heartbeat.resident_bytes,
        "load_progress": heartbeat.load_progress,
        "heartbeat_age_ms": worker.heartbeat_age_ms,
        "blocks": {"active": kv.blocks_active, "inactive": kv.blocks_inactive, "free": kv.blocks_free},
    }
