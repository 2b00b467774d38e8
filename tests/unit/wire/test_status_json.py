"""The status as JSON is what docs/status.md says."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stageline_rpc.v1 import cluster_pb2
from wire.status_json import status_facts

DOCUMENT = Path(__file__).parents[3] / "docs" / "status.md"


def whole_status() -> cluster_pb2.GetStatusResponse:
    """With a worker that has a stage."""
    worker = cluster_pb2.WorkerStatus(
        name="w0",
        stage=0,
        role=cluster_pb2.STAGE_ROLE_ONLY,
        layer_end=12,
        device="cuda:0",
        kernels="compiled",
        dtype=cluster_pb2.DTYPE_BF16,
        weights=cluster_pb2.WEIGHTS_CHECK_SAMPLED,
        busy_us=1_500_000,
    )
    return cluster_pb2.GetStatusResponse(
        dtype=cluster_pb2.DTYPE_BF16,
        wire_dtype=cluster_pb2.DTYPE_F8_E4M3,
        state=cluster_pb2.CLUSTER_STATE_WAITING_FOR_WORKERS,
        health=cluster_pb2.HEALTH_SERVING,
        self_check=cluster_pb2.SelfCheckStatus(
            verdict=cluster_pb2.SELF_CHECK_VERDICT_FINITE_ONLY,
            at_us=1_700_000_000_250_000,
            detail="no reference",
        ),
        journal=cluster_pb2.JournalStatus(state=cluster_pb2.JOURNAL_STATE_FAILING, num_unwritten=2),
        kv=cluster_pb2.KvStatus(ledger=cluster_pb2.KvIntegrity(num_checks=3), prefix_cache=True),
        workers=[worker],
    )


def keys_in(value: Any, prefix: str = "") -> Iterator[str]:
    """Paths of all values, `workers[].stage` and what is in it included."""
    if isinstance(value, dict):
        if prefix.endswith(".stage"):
            yield prefix
        for key, inner in value.items():
            yield from keys_in(inner, f"{prefix}.{key}" if prefix else key)
    elif isinstance(value, list):
        yield from keys_in(value[0], f"{prefix}[]")
    else:
        yield prefix


def test_the_document_lists_exactly_the_keys() -> None:
    listed = re.findall(r"^\| `([^`]+)` \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(set(listed)) == len(listed)
    assert set(listed) == set(keys_in(status_facts(whole_status())))


def test_values_are_plain_words() -> None:
    facts = status_facts(whole_status())
    assert (facts["dtype"], facts["state"], facts["health"]) == ("bf16", "waiting for workers", "serving")
    assert facts["self_check"] == {
        "verdict": "finite only",
        "deviation": None,
        "allowed": None,
        "stage": None,
        "at": "2023-11-14T22:13:20.250+00:00",
        "detail": "no reference",
    }
    assert facts["journal"] == {"state": "failing", "detail": "", "unwritten": 2}
    assert facts["kv"]["integrity"] == "ok"
    (worker,) = facts["workers"]
    assert (worker["device"], worker["dtype"], worker["kernels"]) == ("cuda:0", "bf16", "compiled")
    assert (worker["weights"], worker["busy_s"]) == ("sampled", 1.5)
    assert worker["stage"] == {"index": 0, "role": "only", "layer_begin": 0, "layer_end": 12}


@pytest.mark.parametrize("place", ["ledger", "stage"])
def test_a_problem_of_any_pool_is_the_integrity(place: str) -> None:
    status = whole_status()
    if place == "ledger":
        status.kv.ledger.problem = "2 blocks of 8 leaked"
    else:
        status.workers[0].kv_integrity.problem = "2 blocks of 8 leaked"
    who = "coordinator" if place == "ledger" else "w0"
    assert status_facts(status)["kv"]["integrity"] == f"{who}: 2 blocks of 8 leaked"


def test_what_was_not_checked_says_so() -> None:
    facts = status_facts(cluster_pb2.GetStatusResponse(workers=[cluster_pb2.WorkerStatus(name="spare")]))
    assert facts["self_check"]["verdict"] == "not run"
    assert facts["kv"]["integrity"] == "not checked"
    assert facts["workers"][0]["weights"] == "unchecked"
    assert facts["workers"][0]["stage"] is None
