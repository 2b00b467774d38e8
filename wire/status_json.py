"""`GetStatus` as JSON, for `stageline status --json` and the dashboard (docs/status.md)."""

from datetime import UTC, datetime
from typing import Any

from stageline_rpc.v1 import cluster_pb2
from wire.tensors import WIRE_DTYPE_FROM_MESSAGE

OK = "ok"
NOT_CHECKED = "not checked"
_WEIGHTS = {
    cluster_pb2.WEIGHTS_CHECK_SAMPLED: "sampled",
    cluster_pb2.WEIGHTS_CHECK_FULL: "full",
}


def status_facts(status: cluster_pb2.GetStatusResponse) -> dict[str, Any]:
    """Return the documented schema; all keys are always present, unknown values are null."""
    return {
        "model": status.model,
        "fingerprint": status.fingerprint,
        "dtype": _dtype(status.dtype),
        "wire_dtype": _dtype(status.wire_dtype),
        "state": _word(cluster_pb2.ClusterState.Name(status.state), "CLUSTER_STATE_"),
        "health": _word(cluster_pb2.Health.Name(status.health), "HEALTH_"),
        "detail": status.detail,
        "epoch": status.epoch,
        "num_stages": status.num_stages,
        "block_size": status.block_size,
        "num_blocks": status.num_blocks,
        "self_check": _self_check(status.self_check),
        "journal": {
            "state": _word(cluster_pb2.JournalState.Name(status.journal.state), "JOURNAL_STATE_"),
            "detail": status.journal.detail,
            "unwritten": status.journal.num_unwritten,
        },
        "kv": {
            "integrity": _integrity(status),
            "checks": status.kv.ledger.num_checks,
            "checked_at": _time(status.kv.ledger.checked_at_us),
            "prefix_cache": status.kv.prefix_cache,
        },
        "requests": {field.name: getattr(status.requests, field.name) for field in _COUNTS},
        "workers": [_worker(worker) for worker in status.workers],
    }


_COUNTS = cluster_pb2.RequestCounts.DESCRIPTOR.fields


def _self_check(check: cluster_pb2.SelfCheckStatus) -> dict[str, Any]:
    verdict = check.verdict or cluster_pb2.SELF_CHECK_VERDICT_NOT_RUN
    return {
        "verdict": _word(cluster_pb2.SelfCheckVerdict.Name(verdict), "SELF_CHECK_VERDICT_"),
        "deviation": check.deviation if check.HasField("deviation") else None,
        "allowed": check.allowed if check.HasField("allowed") else None,
        "stage": check.stage if check.HasField("stage") else None,
        "at": _time(check.at_us),
        "detail": check.detail,
    }


def _integrity(status: cluster_pb2.GetStatusResponse) -> str:
    """Return the first problem of the ledger or a stage, else OK or NOT_CHECKED."""
    if status.kv.ledger.problem:
        return f"coordinator: {status.kv.ledger.problem}"
    for worker in status.workers:
        if worker.kv_integrity.problem:
            return f"{worker.name}: {worker.kv_integrity.problem}"
    return OK if status.kv.ledger.num_checks else NOT_CHECKED


def _worker(worker: cluster_pb2.WorkerStatus) -> dict[str, Any]:
    kv, integrity = worker.kv, worker.kv_integrity
    return {
        "name": worker.name,
        "address": worker.address,
        "device": worker.device,
        "dtype": _dtype(worker.dtype),
        "kernels": worker.kernels or None,
        "kernels_detail": worker.kernels_detail,
        "weights": _WEIGHTS.get(worker.weights, "unchecked"),
        "state": _word(cluster_pb2.WorkerState.Name(worker.state), "WORKER_STATE_"),
        "detail": worker.detail,
        "pid": worker.pid,
        "stage": _stage(worker),
        "memory_bytes": worker.memory_bytes,
        "weight_bytes": worker.weight_bytes,
        "kv_bytes": worker.kv_bytes,
        "resident_bytes": worker.resident_bytes,
        "load_progress": worker.load_progress,
        "steps": worker.num_steps,
        "busy_s": worker.busy_us / 1e6,
        "heartbeat_age_ms": worker.heartbeat_age_ms,
        "kv_integrity": integrity.problem or (OK if integrity.num_checks else NOT_CHECKED),
        "blocks": {"active": kv.blocks_active, "inactive": kv.blocks_inactive, "free": kv.blocks_free},
    }


def _stage(worker: cluster_pb2.WorkerStatus) -> dict[str, Any] | None:
    if not worker.HasField("stage"):
        return None
    return {
        "index": worker.stage,
        "role": _word(cluster_pb2.StageRole.Name(worker.role), "STAGE_ROLE_"),
        "layer_begin": worker.layer_begin,
        "layer_end": worker.layer_end,
    }


def _dtype(number: cluster_pb2.Dtype.ValueType) -> str | None:
    return WIRE_DTYPE_FROM_MESSAGE[number].value if number else None


def _time(at_us: int) -> str | None:
    """Format as ISO 8601 in UTC; None for 0."""
    if not at_us:
        return None
    return datetime.fromtimestamp(at_us / 1e6, UTC).isoformat(timespec="milliseconds")


def _word(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower().replace("_", " ")
