"""Headers of safetensors files: the location of each tensor.

Format: 8 bytes little-endian header length, that many bytes of JSON (name -> dtype, shape, data_offsets
relative to the end of the header), then the data without gaps. Source:
https://github.com/huggingface/safetensors#format; the reference reader makes the same checks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import xxhash

from checkpoint.dtypes import DType, PackedDType, StoredDType
from checkpoint.errors import (
    BadHeader,
    CheckpointNotFound,
    MissingTensor,
    UnsupportedFormat,
    UnsupportedModel,
)
from checkpoint.files import has_params, is_named, open_regular, parse_json_object, read_regular

MAX_HEADER_BYTES = 100_000_000
"""The reference implementation's limit."""
MAX_RANK = 16
"""Dimensions of a tensor; models have up to 5."""
MAX_NUMBER = 2**63 - 1
"""Largest dimension and file position."""

_DTYPES: Mapping[str, DType | PackedDType] = {kind.name: kind for kind in (*DType, *PackedDType)}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Location of a tensor: bytes [begin, end) of `file`, counted from the start of the file."""

    file: str
    dtype: StoredDType
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHeader:
    """One file's header: its tensors by name, and a hash of the header's bytes."""

    file: str
    tensors: Mapping[str, TensorEntry]
    digest: bytes


def read_shard_header(directory: Path, file: str) -> ShardHeader:
    """Read the header of `directory / file`.

    Raises CheckpointNotFound, NotRegularFile, BadHeader for a violation of the format or of the file's size,
    UnsupportedModel for an unsupported element type.
    """
    path = directory / file
    try:
        with open_regular(path) as stream:
            size_bytes = os.fstat(stream.fileno()).st_size
            header = _read_header_bytes(stream, path, size_bytes)
    except OSError as error:
        raise CheckpointNotFound(f"{path} cannot be read: {error.strerror}") from error
    parsed = parse_json_object(header, f"the header of {path}", BadHeader)
    parsed.pop("__metadata__", None)
    data_begin = 8 + len(header)
    tensors = {name: _parse_entry(path, file, name, info, data_begin) for name, info in parsed.items()}
    _check_no_gaps(path, tensors, data_begin, size_bytes)
    return ShardHeader(file=file, tensors=tensors, digest=xxhash.xxh3_128_digest(header))


def _read_header_bytes(stream: BinaryIO, path: Path, size_bytes: int) -> bytes:
    if size_bytes < 8:
        raise BadHeader(f"{path} has {size_bytes} bytes, too few for a safetensors header")
    length = int.from_bytes(stream.read(8), "little")
    if length > min(MAX_HEADER_BYTES, size_bytes - 8):
        raise BadHeader(f"{path} claims a header of {length} bytes in a file of {size_bytes} bytes")
    header = stream.read(length)
    if len(header) != length:
        raise BadHeader(f"{path} ended after {len(header)} of {length} header bytes")
    return header


def _parse_entry(path: Path, file: str, name: str, info: object, data_begin: int) -> TensorEntry:
    _check_unicode(path, name)
    if not isinstance(info, dict) or set(info) != {"dtype", "shape", "data_offsets"}:
        raise BadHeader(f"{path}: tensor {name} is described by {info!r:.200}")
    shape = _naturals(path, name, "shape", info["shape"])
    offsets = _naturals(path, name, "data_offsets", info["data_offsets"])
    dtype = _DTYPES.get(info["dtype"]) if isinstance(info["dtype"], str) else None
    if dtype is None:
        raise UnsupportedModel(f"{path}: tensor {name} has unsupported dtype {info['dtype']!r:.80}")
    if len(offsets) != 2 or offsets[1] - offsets[0] != prod(shape) * dtype.size_bytes:
        raise BadHeader(f"{path}: tensor {name} of {dtype.value} {shape} has data_offsets {offsets}")
    return TensorEntry(file, dtype, shape, data_begin + offsets[0], data_begin + offsets[1])


def _check_unicode(path: Path | str, name: str) -> None:
    """JSON can escape halves of surrogate pairs, which no file name or UTF-8 text has."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise BadHeader(f"{path} has the name {name!r}, which is not Unicode text") from error


def _naturals(path: Path, name: str, field: str, value: object) -> tuple[int, ...]:
    """Bounded before anything is computed with them: a header has room for millions of numbers."""
    if not isinstance(value, list) or len(value) > MAX_RANK:
        described = f"{len(value)} numbers" if isinstance(value, list) else f"{value!r:.80}"
        raise BadHeader(f"{path}: tensor {name} has {field} {described}, the limit is a list of {MAX_RANK}")
    if not all(type(item) is int and 0 <= item <= MAX_NUMBER for item in value):
        raise BadHeader(
            f"{path}: tensor {name} has {field} {value!r:.200}, expected integers from 0 to {MAX_NUMBER}"
        )
    return tuple(value)


def _check_no_gaps(path: Path, tensors: Mapping[str, TensorEntry], data_begin: int, size_bytes: int) -> None:
    position = data_begin
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise BadHeader(f"{path}: tensor {name} begins at byte {entry.begin}, expected {position}")
        position = entry.end
    if position != size_bytes:
        raise BadHeader(f"{path} has {size_bytes} bytes, its header accounts for {position}: copy it again")


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Names of the one file with all weights, or else of the index of several."""

    single: str
    index: str

    def __str__(self) -> str:
        return f"{self.single} or {self.index}"


USUAL_FILES = WeightFiles("model.safetensors", "model.safetensors.index.json")
CONSOLIDATED_FILES = WeightFiles("consolidated.safetensors", "consolidated.safetensors.index.json")
"""In Mistral's own format."""
MAX_INDEX_BYTES = 64 * 1024 * 1024
"""The index of a model with 90,000 tensors has 9 MB."""

_OTHER_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Headers:
    """All tensors of a checkpoint by name, and their files in name order."""

    tensors: Mapping[str, TensorEntry]
    shards: tuple[ShardHeader, ...]


def read_headers(directory: Path) -> Headers:
    """Read headers of the one file with weights, or else of the shards in the index, see `files_in`.

    Raises UnsupportedFormat if there are only other kinds of weights (which are never opened),
    CheckpointNotFound for missing weights or shards, BadHeader for an invalid header or index, MissingTensor
    for a shard without a tensor that the index places there.
    """
    files = files_in(directory)
    if is_named(directory / files.single):
        shard = read_shard_header(directory, files.single)
        return Headers(tensors=shard.tensors, shards=(shard,))
    if is_named(directory / files.index):
        return _read_sharded(directory, files.index)
    raise _nothing_to_read(directory, files)


def files_in(directory: Path) -> WeightFiles:
    """The names that the files of a directory in its format have."""
    return CONSOLIDATED_FILES if has_params(directory) else USUAL_FILES


def _read_sharded(directory: Path, index: str) -> Headers:
    path = directory / index
    weight_map = parse_weight_map(read_regular(path, max_bytes=MAX_INDEX_BYTES), str(path))
    files = sorted(set(weight_map.values()))
    shards = tuple(read_shard_header(directory, file) for file in files)
    tensors: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, entry in shard.tensors.items():
            if (file := weight_map.get(name)) != shard.file:
                raise _misplaced(index, name, shard.file, file)
            tensors[name] = entry
    for name, file in weight_map.items():
        if name not in tensors:
            raise MissingTensor(f"{index} places tensor {name} in {file}, which does not contain it")
    return Headers(tensors=tensors, shards=shards)


def _misplaced(index: str, name: str, holder: str, listed: str | None) -> BadHeader:
    """The error for a tensor in file `holder` for which the index lists another file or none."""
    if listed is None:
        return BadHeader(
            f"{holder} has tensor {name}, which {index} does not list: add it to weight_map, or write the"
            " file again without it"
        )
    return BadHeader(f"{index} places tensor {name} in {listed}, not {holder}")


def parse_weight_map(text: bytes, source: str) -> dict[str, str]:
    """Parse an index: the file of each tensor by its name. Raises BadHeader; `source` names the index."""
    weight_map = parse_json_object(text, source, BadHeader).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadHeader(f"{source} has no weight_map")
    for name, file in weight_map.items():
        _check_unicode(source, name)
        if not isinstance(file, str) or not (is_beside(file) and file.endswith(".safetensors")):
            raise BadHeader(f"{source} places tensor {name} in {file!r}, not a safetensors file beside it")
        _check_unicode(source, file)
    return weight_map


def is_beside(file: str) -> bool:
    """Whether a file of this name is in the checkpoint's directory, and in no other."""
    return Path(file).name == file and file != ".." and "\0" not in file


def _nothing_to_read(directory: Path, files: WeightFiles) -> CheckpointNotFound | UnsupportedFormat:
    others = sorted(entry.name for entry in directory.iterdir() if entry.suffix in _OTHER_SUFFIXES)
    if others:
        return UnsupportedFormat(
            f"{directory} has weights as {', '.join(others[:5])}; only {files}"
            " with its shards is supported: convert the weights to safetensors"
        )
    return CheckpointNotFound(
        f"{directory} has neither {files.single} nor {files.index}: copy the weights beside the config"
    )
