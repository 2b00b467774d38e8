"""Headers of GGUF files: metadata by key, and the location of each tensor.

Format, little-endian: "GGUF", version, number of tensors, number of keys; per key its name, type and value;
per tensor its name, dimensions (innermost first), type and offset; then the data, aligned. Source:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Protocol

import xxhash

from checkpoint.dtypes import BlockDType, DType
from checkpoint.errors import BadHeader, CheckpointNotFound, UnsupportedFormat, UnsupportedModel
from checkpoint.files import open_regular
from checkpoint.headers import MAX_HEADER_BYTES, ShardHeader, TensorEntry

SUFFIX = ".gguf"
MAX_KEYS = 4096
"""Published models have some 40."""
MAX_TENSORS = 65_536
MAX_ITEMS = 1 << 21
"""Of an array; the largest vocabularies have 262,144 tokens and 514,906 merges."""
MAX_NAME_BYTES = 1024
MAX_TEXT_BYTES = 4 << 20
"""Of a value that is a text, such as a chat template."""
MAX_DIMENSIONS = 4
_LARGEST_SIZE = 1 << 48
_VERSIONS = (2, 3)
_MAGIC = b"GGUF"
_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT = "general.alignment", 32
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})", re.ASCII)
_MAX_SHARDS = 1000

_NUMBERS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
"""Types of values by number, as formats of `struct`."""
_TEXT, _ARRAY = 8, 9

_DTYPES: Mapping[int, DType | BlockDType] = {
    0: DType.F32,
    1: DType.F16,
    30: DType.BF16,
    2: BlockDType.Q4_0,
    3: BlockDType.Q4_1,
    6: BlockDType.Q5_0,
    7: BlockDType.Q5_1,
    8: BlockDType.Q8_0,
    10: BlockDType.Q2_K,
    11: BlockDType.Q3_K,
    12: BlockDType.Q4_K,
    13: BlockDType.Q5_K,
    14: BlockDType.Q6_K,
    20: BlockDType.IQ4_NL,
    23: BlockDType.IQ4_XS,
    39: BlockDType.MXFP4,
}
_OTHER_TYPES = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
    41: "Q1_0",
}
"""Names of types that are not served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArray:
    """Location of an array in its file, which is read when it is used: `kind` is the type of its items."""

    kind: int
    count: int
    begin: int
    end: int


Value = bool | int | float | str | GgufArray
Metadata = Mapping[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """One file's header of `header_bytes`."""

    path: Path
    metadata: Metadata
    header: ShardHeader
    header_bytes: int

    def numbers(self, key: str) -> tuple[bool | int | float, ...]:
        """Items of the array `key`. Raises BadHeader for other items, and if the file has changed."""
        array = self._array(key)
        if array.kind not in _NUMBERS:
            raise BadHeader(f"{self.path}: metadata key {key!r} is no array of numbers")
        return tuple(item for (item,) in struct.iter_unpack(_NUMBERS[array.kind], self._content(array)))

    def texts(self, key: str) -> list[str]:
        """Items of the array `key`. Raises like `numbers`."""
        array = self._array(key)
        if array.kind != _TEXT:
            raise BadHeader(f"{self.path}: metadata key {key!r} is no array of texts")
        content, at, items = self._content(array), 0, []
        try:
            for _ in range(array.count):
                (size,) = struct.unpack_from("<Q", content, at)
                items.append(content[at + 8 : at + 8 + size].decode())
                at += 8 + size
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise BadHeader(
                f"{self.path}: metadata key {key!r} has an item that is no text: {error}"
            ) from error
        return items

    def _array(self, key: str) -> GgufArray:
        found = self.metadata.get(key)
        if not isinstance(found, GgufArray):
            raise BadHeader(f"{self.path}: metadata key {key!r} is no array")
        return found

    def _content(self, array: GgufArray) -> bytes:
        return read_bytes(self.path, array.begin, array.end)


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file rather than a directory."""
    return path.suffix.lower() == SUFFIX


def checkpoint_in(directory: Path) -> Path:
    """The checkpoint in a directory with one: its first GGUF file, or else the directory itself."""
    return min(directory.glob(f"*{SUFFIX}"), default=directory)


def read_bytes(path: Path, begin: int, end: int) -> bytes:
    """Bytes [begin, end) of a file. Raises BadHeader, and like `open_regular`."""
    with open_regular(path) as stream:
        try:
            content = os.pread(stream.fileno(), end - begin, begin)
        except OSError as error:
            raise CheckpointNotFound(f"{path} cannot be read: {error.strerror}") from error
    if len(content) != end - begin:
        raise BadHeader(f"{path} ended at byte {begin + len(content)}, its header requires {end}")
    return content


def read_gguf_file(path: Path) -> GgufFile:
    """Read the header of one file; arrays are checked and skipped.

    Raises CheckpointNotFound, NotRegularFile, UnsupportedFormat for another version, BadHeader for a
    violation of the format, of the limits or of the file's size, UnsupportedModel for an element type.
    """
    try:
        with open_regular(path) as stream:
            return parse_gguf_file(stream, path, size_bytes=os.fstat(stream.fileno()).st_size)
    except OSError as error:
        raise CheckpointNotFound(f"{path} cannot be read: {error.strerror}") from error


class ByteStream(Protocol):
    """A binary stream, such as an open file."""

    def read(self, size: int, /) -> bytes:
        """The next bytes, fewer only at the end."""
        ...

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move from the start (SEEK_SET) or from here (SEEK_CUR); return the position."""
        ...


def parse_gguf_file(stream: ByteStream, path: Path, *, size_bytes: int) -> GgufFile:
    """Read the header of a file of `size_bytes`, which `path` names. Raises like `read_gguf_file`."""
    reader = _Reader(stream, path, size_bytes)
    num_tensors = reader.preamble()
    metadata = reader.metadata()
    entries = [reader.tensor() for _ in range(num_tensors)]
    data_begin = _aligned(path, reader.position, metadata)
    tensors = _placed(path, entries, data_begin=data_begin, end=size_bytes)
    header = ShardHeader(file=path.name, tensors=tensors, digest=reader.digest())
    return GgufFile(path=path, metadata=metadata, header=header, header_bytes=reader.position)


class _Reader:
    """Reads a header in order, within the file and MAX_HEADER_BYTES."""

    def __init__(self, stream: ByteStream, path: Path, size_bytes: int) -> None:
        self._stream, self._path = stream, path
        self.size_bytes = size_bytes
        self.position = 0
        self._end = min(self.size_bytes, MAX_HEADER_BYTES)
        self._num_keys = 0

    def preamble(self) -> int:
        """Check magic and version; return the number of tensors."""
        if (magic := self._take(4, "the magic number")) != _MAGIC:
            raise BadHeader(f"{self._path} begins with {magic!r}, not with {_MAGIC!r}")
        version = self._number("<I")
        if version not in _VERSIONS:
            raise UnsupportedFormat(
                f"{self._path} has GGUF version {version}; versions 2 and 3 are supported"
            )
        num_tensors = self._count("tensors", MAX_TENSORS)
        self._num_keys = self._count("metadata keys", MAX_KEYS)
        return num_tensors

    def metadata(self) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for _ in range(self._num_keys):
            key = self._text("a metadata key", MAX_NAME_BYTES)
            if key in found:
                raise BadHeader(f"{self._path} has the metadata key {key!r} twice")
            found[key] = self._value(key, self._number("<I"))
        return found

    def tensor(self) -> TensorEntry:
        """The next tensor: its file's field is its name, its bytes are relative to the data."""
        name = self._text("a tensor's name", MAX_NAME_BYTES)
        rank = self._number("<I")
        if not 1 <= rank <= MAX_DIMENSIONS:
            raise BadHeader(
                f"{self._path}: tensor {name} has {rank} dimensions, the limit is {MAX_DIMENSIONS}"
            )
        shape = tuple(reversed([self._number("<Q") for _ in range(rank)]))
        kind, offset = self._number("<I"), self._number("<Q")
        if prod(shape) > _LARGEST_SIZE or offset > _LARGEST_SIZE:
            raise BadHeader(f"{self._path}: tensor {name} has shape {shape} at byte {offset} of the data")
        if kind not in _DTYPES:
            known = _OTHER_TYPES.get(kind, "an unknown type")
            legal = ", ".join(dtype.name for dtype in _DTYPES.values())
            raise UnsupportedModel(
                f"{self._path}: tensor {name} has type {kind} ({known}), which is not supported"
                f" (supported: {legal})"
            )
        return TensorEntry(
            name, _DTYPES[kind], shape, offset, offset + self._num_bytes(name, shape, _DTYPES[kind])
        )

    def digest(self) -> bytes:
        """A hash of all bytes of the header."""
        self._stream.seek(0)
        return xxhash.xxh3_128_digest(self._stream.read(self.position))

    def _num_bytes(self, name: str, shape: tuple[int, ...], dtype: DType | BlockDType) -> int:
        if isinstance(dtype, DType):
            return prod(shape) * dtype.size_bytes
        if shape[-1] % dtype.num_elements:
            raise BadHeader(
                f"{self._path}: tensor {name} has rows of {shape[-1]} elements, which are not whole blocks of"
                f" {dtype.num_elements} ({dtype.name})"
            )
        return prod(shape) // dtype.num_elements * dtype.num_bytes

    def _value(self, key: str, kind: int) -> Value:
        if kind == _TEXT:
            return self._text(f"metadata key {key!r}", MAX_TEXT_BYTES)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _NUMBERS:
            raise BadHeader(f"{self._path}: metadata key {key!r} has the unknown type {kind}")
        value = self._number(_NUMBERS[kind])
        return _shortest(value) if kind == 6 else value

    def _array(self, key: str) -> GgufArray:
        kind, count = self._number("<I"), self._number("<Q")
        if count > MAX_ITEMS:
            raise BadHeader(f"{self._path}: metadata key {key!r} has {count} items, the limit is {MAX_ITEMS}")
        begin = self.position
        if kind == _TEXT:
            for _ in range(count):
                self._skip(self._number("<Q"), f"metadata key {key!r}")
        elif kind in _NUMBERS:
            self._skip(count * struct.calcsize(_NUMBERS[kind]), f"metadata key {key!r}")
        else:
            raise BadHeader(
                f"{self._path}: metadata key {key!r} is an array of type {kind}, which is not supported"
            )
        return GgufArray(kind=kind, count=count, begin=begin, end=self.position)

    def _count(self, what: str, limit: int) -> int:
        count: int = self._number("<Q")
        if count > limit:
            raise BadHeader(f"{self._path} claims {count} {what}, the limit is {limit}")
        return count

    def _text(self, what: str, limit: int) -> str:
        size = self._number("<Q")
        if size > limit:
            raise BadHeader(f"{self._path}: {what} has {size} bytes, the limit is {limit}")
        try:
            return self._take(size, what).decode()
        except UnicodeDecodeError as error:
            raise BadHeader(f"{self._path}: {what} is no UTF-8 text: {error}") from error

    def _number(self, form: str) -> int:
        number: int
        (number,) = struct.unpack(form, self._take(struct.calcsize(form), "a number"))
        return number

    def _take(self, size: int, what: str) -> bytes:
        self._check_left(size, what)
        content = self._stream.read(size)
        if len(content) != size:
            raise BadHeader(f"{self._path} ended at byte {self.position + len(content)}, within its header")
        self.position += size
        return content

    def _skip(self, size: int, what: str) -> None:
        self._check_left(size, what)
        self._stream.seek(size, os.SEEK_CUR)
        self.position += size

    def _check_left(self, size: int, what: str) -> None:
        if size > self._end - self.position:
            raise BadHeader(
                f"{self._path}: {what} of {size} bytes at byte {self.position} goes beyond byte {self._end},"
                f" the end of the file or of the largest header ({MAX_HEADER_BYTES} bytes)"
            )


def _shortest(value: float) -> float:
    """The float64 with the fewest digits that is this float32: 1e-05, not 9.999999747378752e-06."""
    for digits in range(6, 9):
        short = float(f"{value:.{digits}g}")
        try:
            if struct.pack("<f", short) == struct.pack("<f", value):
                return short
        except OverflowError:
            continue
    return value


def _aligned(path: Path, position: int, metadata: Metadata) -> int:
    """Where the data begins."""
    alignment = metadata.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise BadHeader(
            f"{path}: metadata key {_ALIGNMENT_KEY!r} is {alignment!r}, not a power of two from 8"
        )
    return -(-position // alignment) * alignment


def _placed(path: Path, entries: list[TensorEntry], *, data_begin: int, end: int) -> dict[str, TensorEntry]:
    """Tensors by name at their places in the file. Raises BadHeader if they overlap or go beyond it."""
    tensors: dict[str, TensorEntry] = {}
    position = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        name = entry.file
        if name in tensors:
            raise BadHeader(f"{path} has the tensor {name} twice")
        if entry.begin < position or data_begin + entry.end > end:
            raise BadHeader(
                f"{path}: tensor {name} has bytes {entry.begin} to {entry.end} of the data, which may"
                f" begin at {position} and must end at {end - data_begin}"
            )
        position = entry.end
        begin, last = data_begin + entry.begin, data_begin + entry.end
        tensors[name] = replace(entry, file=path.name, begin=begin, end=last)
    return tensors


def shard_paths(path: Path) -> tuple[Path, ...]:
    """All files of a model, by the name of the first one. Raises BadHeader for another one's."""
    if (found := _SHARD.fullmatch(path.stem)) is None:
        return (path,)
    count = int(found["count"])
    names = [f"{found['stem']}-{number + 1:05}-of-{count:05}{path.suffix}" for number in range(count)]
    if path.name not in names[:1] or count > _MAX_SHARDS:
        first = f"{found['stem']}-00001-of-{count:05}{path.suffix}"
        raise BadHeader(f"{path} is not the first of {count} files (limit {_MAX_SHARDS}): give {first}")
    return tuple(path.with_name(name) for name in names)


def model_name(path: Path) -> str:
    """The file's name without suffix and number."""
    found = _SHARD.fullmatch(path.stem)
    return found["stem"] if found else path.stem


def read_gguf_files(path: Path) -> tuple[GgufFile, ...]:
    """Read the headers of all files of a model; the first has the model's metadata.

    Raises like `read_gguf_file`, and BadHeader for files that are not of one model.
    """
    files = tuple(read_gguf_file(shard) for shard in shard_paths(path))
    for number, file in enumerate(files):
        claimed = file.metadata.get("split.no", 0), file.metadata.get("split.count", len(files)) or 1
        if claimed != (number, len(files)):
            raise BadHeader(
                f"{file.path} is file {claimed[0]!r} of {claimed[1]!r} by its metadata, expected {number} of"
                f" {len(files)}"
            )
    _check_tensors(files)
    return files


def _check_tensors(files: tuple[GgufFile, ...]) -> None:
    names: set[str] = set()
    for file in files:
        if twice := names & file.header.tensors.keys():
            raise BadHeader(f"{file.path} has the tensor {min(twice)}, which another file has, too")
        names |= file.header.tensors.keys()
    expected = files[0].metadata.get("split.tensors.count", len(names))
    if expected != len(names):
        raise BadHeader(f"{files[0].path} claims {expected!r} tensors in all files, which have {len(names)}")
