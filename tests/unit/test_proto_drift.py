"""The committed code is what the .proto files give, and the .proto files keep their promises."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor

from stageline_rpc.internal.v1 import deliver_pb2, forward_pb2, join_pb2, step_pb2
from stageline_rpc.v1 import cluster_pb2, inference_pb2, kv_events_pb2, telemetry_pb2
from tests.proto_codegen import PACKAGES, PROTO_ROOT, drift_message, drifted

PUBLIC_FILES: tuple[FileDescriptor, ...] = (
    cluster_pb2.DESCRIPTOR,
    inference_pb2.DESCRIPTOR,
    kv_events_pb2.DESCRIPTOR,
    telemetry_pb2.DESCRIPTOR,
)
INTERNAL_FILES: tuple[FileDescriptor, ...] = (
    deliver_pb2.DESCRIPTOR,
    forward_pb2.DESCRIPTOR,
    join_pb2.DESCRIPTOR,
    step_pb2.DESCRIPTOR,
)
FILES = PUBLIC_FILES + INTERNAL_FILES


def messages_of(file: FileDescriptor) -> Iterator[descriptor_pb2.DescriptorProto]:
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    pending = list(proto.message_type)
    while pending:
        message = pending.pop()
        yield message
        pending.extend(message.nested_type)


def test_committed_code_equals_the_generated_code() -> None:
    names = drifted()
    assert not names, drift_message(names)


def test_a_changed_a_missing_and_a_left_over_file_are_named(tmp_path: Path) -> None:
    root = tmp_path / "proto"
    shutil.copytree(PROTO_ROOT, root, ignore=shutil.ignore_patterns("__pycache__"))
    public, internal = (root / package for package in PACKAGES)
    forward = internal / "forward.proto"
    forward.write_text(forward.read_text().replace("bool is_last = 7;", "bool is_final = 7;"))
    (public / "cluster_pb2_grpc.pyi").unlink()
    (public / "old_pb2.py").write_text("")

    names = drifted(root=root)

    assert names == [
        "stageline_rpc/internal/v1/forward_pb2.py",
        "stageline_rpc/internal/v1/forward_pb2.pyi",
        "stageline_rpc/v1/cluster_pb2_grpc.pyi",
        "stageline_rpc/v1/old_pb2.py",
    ]
    assert "make proto" in drift_message(names)
    assert "forward_pb2.py" in drift_message(names)


@pytest.mark.parametrize("file", FILES, ids=lambda file: Path(file.name).stem)
def test_no_field_uses_a_reserved_number_or_one_twice(file: FileDescriptor) -> None:
    for message in messages_of(file):
        numbers = [field.number for field in message.field]
        assert len(set(numbers)) == len(numbers), message.name
        for reserved in message.reserved_range:
            inside = [field.name for field in message.field if reserved.start <= field.number < reserved.end]
            assert not inside, f"{message.name}: {inside}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: Path(file.name).stem)
def test_numbers_are_reserved_exactly_where_a_field_was_removed(file: FileDescriptor) -> None:
    for message in messages_of(file):
        used = {field.number for field in message.field}
        reserved = {number for area in message.reserved_range for number in range(area.start, area.end)}
        assert reserved == set(range(1, max(used, default=0) + 1)) - used, message.name


def test_every_enum_starts_with_an_unspecified_zero() -> None:
    nested = [enum for file in FILES for message in messages_of(file) for enum in message.enum_type]
    top = [enum for file in FILES for enum in file.enum_types_by_name.values()]
    zeros = [enum.value[0] for enum in nested] + [enum.values[0] for enum in top]
    assert zeros
    for value in zeros:
        assert value.number == 0
        assert re.search(r"UNSPECIFIED$", value.name)


def test_services_stream_as_clients_in_other_languages_expect() -> None:
    streaming = {}
    for file in FILES:
        proto = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(proto)
        for service in proto.service:
            for method in service.method:
                path = f"{proto.package}.{service.name}/{method.name}"
                streaming[path] = (method.client_streaming, method.server_streaming)
    assert streaming["stageline.v1.Inference/Generate"] == (False, True)
    assert streaming["stageline.v1.Inference/Cancel"] == (False, False)
    assert streaming["stageline.v1.Inference/GetModel"] == (False, False)
    for path in ("MembershipService/Join", "StageService/Forward", "StepResultsService/Deliver"):
        assert streaming[f"stageline.internal.v1.{path}"] == (True, True)


def test_the_public_protocol_does_not_import_the_internal_one() -> None:
    assert {file.package for file in PUBLIC_FILES} == {"stageline.v1"}
    assert {file.package for file in INTERNAL_FILES} == {"stageline.internal.v1"}
    imports = {dependency.name for file in PUBLIC_FILES for dependency in file.dependencies}
    assert imports
    assert not [name for name in imports if not name.startswith(("stageline_rpc/v1/", "google/protobuf/"))]
