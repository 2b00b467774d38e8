"""Finds the safetensors files of a checkpoint directory and reads all their headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from checkpoint.errors import BadHeader, CheckpointNotFound, MissingTensor, UnsupportedFormat
from checkpoint.headers import ShardHeader, TensorEntry, read_shard_header
from checkpoint.json_files import read_json_object
from checkpoint.regular_files import is_named

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 * 1024 * 1024
"""That of a model with 90,000 tensors has 9 MB."""

_OTHER_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Headers:
    """All tensors of a checkpoint by name, and the files they lie in, in name order."""

    tensors: Mapping[str, TensorEntry]
    shards: tuple[ShardHeader, ...]


def read_headers(directory: Path) -> Headers:
    """Headers of `model.safetensors`, or else of the shards that `model.safetensors.index.json` names.

    Raises UnsupportedFormat when there are only other kinds of weights (those are never opened),
    CheckpointNotFound when there are none or a shard is absent, BadHeader for a broken header or index,
    MissingTensor when a shard lacks a tensor that the index places there.
    """
    if is_named(directory / SINGLE_FILE):
        shard = read_shard_header(directory, SINGLE_FILE)
        return Headers(tensors=shard.tensors, shards=(shard,))
    if is_named(directory / INDEX_FILE):
        return _read_sharded(directory)
    raise _nothing_to_read(directory)


def _read_sharded(directory: Path) -> Headers:
    weight_map = _read_weight_map(directory / INDEX_FILE)
    files = sorted(set(weight_map.values()))
    shards = tuple(read_shard_header(directory, file) for file in files)
    tensors: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, entry in shard.tensors.items():
            if weight_map.get(name) != shard.file:
                raise BadHeader(
                    f"{INDEX_FILE} places tensor {name} in {weight_map.get(name)}, not {shard.file}"
                )
            tensors[name] = entry
    for name, file in weight_map.items():
        if name not in tensors:
            raise MissingTensor(f"{INDEX_FILE} places tensor {name} in {file}, which does not hold it")
    return Headers(tensors=tensors, shards=shards)


def _read_weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path, max_bytes=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadHeader(f"{path} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise BadHeader(f"{path} places tensor {name} in {file!r}, not a safetensors file beside it")
    return weight_map


def _nothing_to_read(directory: Path) -> CheckpointNotFound | UnsupportedFormat:
    others = sorted(entry.name for entry in directory.iterdir() if entry.suffix in _OTHER_SUFFIXES)
    if others:
        return UnsupportedFormat(
            f"{directory} holds its weights as {', '.join(others[:5])}; only {SINGLE_FILE} or {INDEX_FILE}"
            " with its shards is read, and nothing is ever unpickled"
        )
    return CheckpointNotFound(f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
