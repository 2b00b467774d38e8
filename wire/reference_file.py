"""References of one model in a file: recorded with the built-in model, or kept in the user's cache."""

import base64
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import xxhash
from google.protobuf.message import DecodeError

from checkpoint import DType
from stageline_rpc.v1 import stage_pb2
from wire.reference import CHECK_VERSION, Reference, decode_reference, encode_reference
from wire.wire_dtypes import WireDType


def reference_key(dtype: DType, wire_dtype: WireDType) -> str:
    """What a reference is kept under: "bf16", or "f32 over int8"."""
    return dtype.value if wire_dtype is dtype else f"{dtype.value} over {wire_dtype.value}"


def read_references(path: Path, fingerprint: str) -> dict[str, Reference]:
    """By `reference_key`; empty for another fingerprint or version. Raises OSError, ValueError for a file
    that is corrupt.
    """
    try:
        content = json.loads(path.read_text())
        if (content["version"], content["fingerprint"]) != (CHECK_VERSION, fingerprint):
            return {}
        return {key: _decoded(entry) for key, entry in content["references"].items()}
    except (KeyError, TypeError, AttributeError, DecodeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def write_references(path: Path, fingerprint: str, references: Mapping[str, Reference]) -> None:
    """Replaces the file at once, readable by its owner only. Raises OSError; then the old one is there."""
    entries = ",\n".join(f"{json.dumps(key)}: {_encoded(each)}" for key, each in references.items())
    head = f'"version": {CHECK_VERSION},\n"fingerprint": {json.dumps(fingerprint)}'
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f'{{{head},\n"references": {{\n{entries}\n}}}}\n')
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _encoded(reference: Reference) -> str:
    data = encode_reference(reference).SerializeToString(deterministic=True)
    return json.dumps({"checksum": xxhash.xxh3_64_hexdigest(data), "data": base64.b64encode(data).decode()})


def _decoded(entry: Mapping[str, str]) -> Reference:
    data = base64.b64decode(entry["data"], validate=True)
    if xxhash.xxh3_64_hexdigest(data) != entry["checksum"]:
        raise ValueError("a checksum does not match")
    return decode_reference(stage_pb2.ReferenceResponse.FromString(data))
