"""The JSON of public messages, and docs/status.md, which lists the keys of the status."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from kvcache import IntegrityReport
from stageline_rpc.v1 import cluster_pb2, kv_events_pb2
from tests.repository import REPOSITORY
from wire.status_codec import (
    duration,
    encode_certificate,
    encode_integrity,
    message_fields,
    overall_integrity,
    timestamp,
)
from wire.transport import CertificateLife

DOCUMENT = REPOSITORY / "docs" / "status.md"


def whole_status() -> cluster_pb2.GetStatusResponse:
    """With a worker that has a stage."""
    ledger = encode_integrity(IntegrityReport(3, 1_700_000_000_250_000, ""))
    life = CertificateLife(datetime(2026, 11, 23, tzinfo=UTC), left_s=3600.0, is_ending=True)
    certificate = encode_certificate(life)
    worker = cluster_pb2.WorkerStatus(
        name="w0",
        stage=0,
        role=cluster_pb2.STAGE_ROLE_ONLY,
        layer_end=12,
        device="cuda:0",
        kernels="compiled",
        dtype=cluster_pb2.DTYPE_BF16,
        weights=cluster_pb2.WEIGHTS_CHECK_SAMPLED,
        weight_bytes=3 << 40,
        busy_time=duration(1.5),
        kv=cluster_pb2.KvUsage(),
        kv_integrity=ledger,
        certificate=certificate,
        gpu=cluster_pb2.Gpu(model="NVIDIA H100", memory_bytes=80 << 30),
        device_memory=cluster_pb2.DeviceMemory(allocated_bytes=20 << 30, free_bytes=50 << 30),
        rates=cluster_pb2.DeviceRates(bytes_per_second=10**12, operations_per_second=10**15),
        cuda_graphs=cluster_pb2.CudaGraphs(
            eager=[cluster_pb2.EagerSteps(reason=cluster_pb2.EAGER_REASON_FIRST, num_steps=1)],
            sizes=[cluster_pb2.GraphSize(num_tokens=8, num_graphs=1)],
        ),
        fetch=cluster_pb2.WeightsFetch(done_bytes=3 << 30, total_bytes=17 << 30, bytes_per_second=1 << 27),
    )
    return cluster_pb2.GetStatusResponse(
        dtype=cluster_pb2.DTYPE_BF16,
        state=cluster_pb2.CLUSTER_STATE_SERVING,
        self_check=cluster_pb2.SelfCheckStatus(
            verdict=cluster_pb2.SELF_CHECK_VERDICT_FINITE_ONLY,
            at=timestamp(1_700_000_000_250_000),
            detail="no reference",
        ),
        journal=cluster_pb2.JournalStatus(state=cluster_pb2.JOURNAL_STATE_FAILING, num_unwritten=2),
        kv=overall_integrity(ledger, {"w0": ledger}),
        requests=cluster_pb2.RequestCounts(),
        links=[cluster_pb2.LinkStatus(from_worker="w0", to_worker="w1", round_trip=duration(0.001))],
        workers=[worker],
        window_blocks=[cluster_pb2.WindowBlocks(window=1024, num_blocks=96)],
        loop_lag=cluster_pb2.LoopLag(p50=duration(0.0001), p99=duration(0.0012)),
        certificate=certificate,
    )


def keys_in(value: Any, prefix: str = "") -> Iterator[str]:
    """Paths of all values."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from keys_in(inner, f"{prefix}.{key}" if prefix else key)
    elif isinstance(value, list):
        yield from keys_in(value[0], f"{prefix}[]")
    else:
        yield prefix


def test_the_document_lists_exactly_the_keys() -> None:
    listed = re.findall(r"^\| `([^`]+)` \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(set(listed)) == len(listed)
    assert set(listed) == set(keys_in(message_fields(whole_status())))


def test_values_equal_protobufs_json() -> None:
    fields = message_fields(whole_status())
    assert (fields["dtype"], fields["state"]) == ("DTYPE_BF16", "CLUSTER_STATE_SERVING")
    assert fields["self_check"] == {
        "verdict": "SELF_CHECK_VERDICT_FINITE_ONLY",
        "deviation": None,
        "allowed": None,
        "stage": None,
        "at": "2023-11-14T22:13:20.250Z",
        "detail": "no reference",
    }
    assert fields["journal"] == {"state": "JOURNAL_STATE_FAILING", "detail": "", "num_unwritten": "2"}
    assert fields["kv"]["integrity"] == "KV_INTEGRITY_VERDICT_CONSISTENT"
    (worker,) = fields["workers"]
    assert (worker["device"], worker["dtype"], worker["kernels"]) == ("cuda:0", "DTYPE_BF16", "compiled")
    assert (worker["weights"], worker["busy_time"]) == ("WEIGHTS_CHECK_SAMPLED", "1.500s")
    assert (worker["stage"], worker["weight_bytes"]) == (0, str(3 << 40))


def test_protobuf_reads_the_fields_back() -> None:
    status = whole_status()
    fields = json.loads(json.dumps(message_fields(status)))
    assert ParseDict(fields, cluster_pb2.GetStatusResponse()) == status


def test_only_the_set_member_of_a_oneof_is_a_key() -> None:
    event = kv_events_pb2.KvEvent(stored=kv_events_pb2.KvStored(sequence_hashes=[7]))
    fields = message_fields(kv_events_pb2.WatchKvEventsResponse(event=event))
    assert fields.keys() == {"event"}
    assert fields["event"]["stored"]["parent"] is None
    assert not {"removed", "cleared"} & fields["event"].keys()


@pytest.mark.parametrize("place", ["coordinator", "w0"])
def test_a_problem_of_any_pool_is_reported_as_integrity(place: str) -> None:
    sound, broken = (encode_integrity(IntegrityReport(1, 1, text)) for text in ("", "2 blocks of 8 leaked"))
    ledger, stage = (broken, sound) if place == "coordinator" else (sound, broken)
    status = overall_integrity(ledger, {"w0": stage})
    assert status.integrity == cluster_pb2.KV_INTEGRITY_VERDICT_INCONSISTENT
    assert status.detail == f"{place}: 2 blocks of 8 leaked"


def test_an_unchecked_pool_is_reported_as_not_checked() -> None:
    status = overall_integrity(encode_integrity(IntegrityReport()), {})
    assert status.integrity == cluster_pb2.KV_INTEGRITY_VERDICT_NOT_CHECKED
    spare = cluster_pb2.WorkerStatus(name="spare")
    (worker,) = message_fields(cluster_pb2.GetStatusResponse(workers=[spare]))["workers"]
    assert (worker["weights"], worker["stage"]) == ("WEIGHTS_CHECK_UNSPECIFIED", None)
