"""Times, KV integrity and JSON of public messages: the one place with options of protobuf's JSON encoding."""

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from kvcache import IntegrityReport
from stageline_rpc.v1 import cluster_pb2
from wire.transport import CertificateLife


def message_fields(message: Message) -> dict[str, Any]:
    """Return protobuf's JSON of a message, with proto field names and all fields.

    Enums are names, 64-bit integers strings, times RFC 3339. Unset fields with presence are None, which
    protobuf's parsers read as unset; an unset member of a oneof is left out.
    """
    fields = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _completed(message.DESCRIPTOR, fields)


def _completed(descriptor: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields in the order of the proto file, with None for unset ones."""
    completed: dict[str, Any] = {}
    for field in descriptor.fields:
        value = fields.get(field.name)
        if value is not None:
            completed[field.name] = _completed_value(field.message_type, value)
        elif field.has_presence and not _is_choice(field):
            completed[field.name] = None
    return completed


def _completed_value(message_type: Any, value: Any) -> Any:
    if message_type is None or message_type.full_name.startswith("google."):
        return value
    if message_type.GetOptions().map_entry:
        return value
    if isinstance(value, list):
        return [_completed(message_type, item) for item in value]
    return _completed(message_type, value)


def _is_choice(field: FieldDescriptor) -> bool:
    """Whether the field is in a oneof other than the synthetic one of `optional`."""
    oneof = field.containing_oneof
    return oneof is not None and oneof.name != f"_{field.name}"


def encode_certificate(life: CertificateLife | None) -> cluster_pb2.Certificate | None:
    """When a process's certificate ends; None in plain text."""
    if life is None:
        return None
    message = cluster_pb2.Certificate(is_ending=life.is_ending)
    message.expires_at.FromDatetime(life.expires_at)
    return message


def timestamp(at_us: int) -> Timestamp:
    """Return a time from microseconds since 1970."""
    message = Timestamp()
    message.FromMicroseconds(at_us)
    return message


def duration(seconds: float) -> Duration:
    """Return a duration, rounded to microseconds."""
    message = Duration()
    message.FromMicroseconds(round(seconds * 1e6))
    return message


def encode_integrity(report: IntegrityReport) -> cluster_pb2.KvIntegrity:
    verdict = cluster_pb2.KV_INTEGRITY_VERDICT_NOT_CHECKED
    if report.num_checks:
        verdict = cluster_pb2.KV_INTEGRITY_VERDICT_CONSISTENT
    if report.problem:
        verdict = cluster_pb2.KV_INTEGRITY_VERDICT_INCONSISTENT
    return cluster_pb2.KvIntegrity(
        verdict=verdict,
        num_checks=report.num_checks,
        checked_at=timestamp(report.checked_at_us) if report.checked_at_us else None,
        detail=report.problem,
    )


def overall_integrity(
    ledger: cluster_pb2.KvIntegrity, stages: Mapping[str, cluster_pb2.KvIntegrity]
) -> cluster_pb2.KvStatus:
    """Return the first inconsistency of the ledger or a stage (by worker name), else the ledger's verdict."""
    for name, each in {"coordinator": ledger, **stages}.items():
        if each.verdict == cluster_pb2.KV_INTEGRITY_VERDICT_INCONSISTENT:
            return cluster_pb2.KvStatus(
                integrity=each.verdict, detail=f"{name}: {each.detail}", ledger=ledger
            )
    return cluster_pb2.KvStatus(integrity=ledger.verdict, ledger=ledger)
