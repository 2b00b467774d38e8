"""The committed code is what the .proto files give, and the .proto files keep their promises."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor

from stageline_rpc.v1 import cluster_pb2, inference_pb2, stage_pb2, telemetry_pb2
from tests.proto_codegen import PACKAGE, PROTO_ROOT, drift_message, drifted

FILES: tuple[FileDescriptor, ...] = (
    cluster_pb2.DESCRIPTOR,
    inference_pb2.DESCRIPTOR,
    stage_pb2.DESCRIPTOR,
    telemetry_pb2.DESCRIPTOR,
)


def messages_of(file: FileDescriptor) -> Iterator[descriptor_pb2.DescriptorProto]:
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    pending = list(proto.message_type)
    while pending:
        message = pending.pop()
        yield message
        pending.extend(message.nested_type)


def test_committed_code_is_what_the_proto_files_give() -> None:
    names = drifted()
    assert not names, drift_message(names)


def test_a_changed_a_missing_and_a_left_over_file_are_named(tmp_path: Path) -> None:
    root = tmp_path / "proto"
    shutil.copytree(PROTO_ROOT, root, ignore=shutil.ignore_patterns("__pycache__"))
    folder = root / PACKAGE
    stage = folder / "stage.proto"
    stage.write_text(stage.read_text().replace("bool is_last = 5;", "bool is_final = 5;"))
    (folder / "cluster_pb2_grpc.pyi").unlink()
    (folder / "old_pb2.py").write_text("")

    names = drifted(root=root)

    assert names == [
        str(PACKAGE / name)
        for name in ("cluster_pb2_grpc.pyi", "old_pb2.py", "stage_pb2.py", "stage_pb2.pyi")
    ]
    assert "make proto" in drift_message(names)
    assert "stage_pb2.py" in drift_message(names)


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
    proto_package = {file.package for file in FILES}
    assert proto_package == {"stageline.v1"}
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
    for path in ("Cluster/Join", "Stage/Forward", "StepResults/Deliver"):
        assert streaming[f"stageline.v1.{path}"] == (True, True)
