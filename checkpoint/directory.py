"""Opens a checkpoint, a directory or a GGUF file: validates and fingerprints it without loading weights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import xxhash

from checkpoint.blueprint import Blueprint
from checkpoint.description import Description, describe_directory
from checkpoint.dtypes import WeightFormat
from checkpoint.errors import BadHeader, CheckpointNotFound
from checkpoint.files import FileIdentity, has_params, open_regular, stat_files
from checkpoint.generation_config import bos_token_id, eos_token_ids
from checkpoint.gguf.files import is_gguf, model_name
from checkpoint.gguf.model import describe_gguf, gguf_headers
from checkpoint.headers import Headers, ShardHeader, TensorEntry, read_headers
from checkpoint.held import check_can_hold
from checkpoint.mistral.model import describe_mistral
from checkpoint.pins import Pins
from checkpoint.quantization import PackedMatrix
from checkpoint.tensors import (
    packed_tensors,
    stage_tensor_names,
    stage_tensor_shapes,
)
from checkpoint.verification import draft_prefixes, verify_frequencies, verify_tensors
from checkpoint.wrappers import text_config

SAMPLE_BYTES = 4096
NUM_INNER_SAMPLES = 2
"""Samples at offsets derived from the tensor's name, beside the first and the last sample."""

Range = tuple[int, int]


def sampled_ranges(name: str, entry: TensorEntry) -> tuple[Range, ...]:
    """Return the byte ranges [begin, end) of the file to hash; a small tensor is hashed whole."""
    if entry.num_bytes <= (NUM_INNER_SAMPLES + 2) * SAMPLE_BYTES:
        return ((entry.begin, entry.end),)
    num_places = entry.num_bytes - SAMPLE_BYTES + 1
    inner = (
        xxhash.xxh3_64_intdigest(name.encode(), seed=seed) % num_places for seed in range(NUM_INNER_SAMPLES)
    )
    begins = (entry.begin, *(entry.begin + offset for offset in inner), entry.end - SAMPLE_BYTES)
    return tuple((begin, begin + SAMPLE_BYTES) for begin in begins)


def sample_digest(directory: Path, tensors: Mapping[str, TensorEntry]) -> int:
    """XXH3-64 over names and sampled bytes of all tensors, in name order, whichever file each is in.

    Raises CheckpointNotFound or NotRegularFile for an unreadable file, BadHeader for a truncated one.
    """
    hashes: dict[str, bytes] = {}
    by_file: dict[str, list[str]] = {}
    for name, entry in tensors.items():
        by_file.setdefault(entry.file, []).append(name)
    for file, names in by_file.items():
        ranges = {name: sampled_ranges(name, tensors[name]) for name in names}
        hashes |= _hash_ranges(directory / file, ranges)
    total = xxhash.xxh3_64()
    for name, digest in sorted(hashes.items()):
        total.update(len(name.encode()).to_bytes(8, "little") + name.encode() + digest)
    return total.intdigest()


def _hash_ranges(path: Path, ranges: Mapping[str, tuple[Range, ...]]) -> dict[str, bytes]:
    """Announce all ranges to the kernel first, so that a slow disk reads them in parallel."""
    with open_regular(path) as stream:
        descriptor = stream.fileno()
        if hasattr(os, "posix_fadvise"):
            for begin, end in (part for tensor_ranges in ranges.values() for part in tensor_ranges):
                os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_WILLNEED)
        try:
            return {
                name: b"".join(xxhash.xxh3_64_digest(_read(path, descriptor, part)) for part in tensor_ranges)
                for name, tensor_ranges in ranges.items()
            }
        except OSError as error:
            raise CheckpointNotFound(f"{path} cannot be read: {error.strerror}") from error


def _read(path: Path, descriptor: int, wanted: Range) -> bytes:
    begin, end = wanted
    data = os.pread(descriptor, end - begin, begin)
    if len(data) != end - begin:
        raise BadHeader(f"{path} ended at byte {begin + len(data)}, its header requires {end}")
    return data


PARTS = ("config", "headers", "values")
"""Names of the three numbers of a fingerprint."""


def fingerprint(raw_config: Mapping[str, object], shards: Iterable[ShardHeader], sample_digest: int) -> str:
    """Return CONFIG-HEADERS-VALUES, each an XXH3-64 in 16 hex digits.

    They cover the config as canonical JSON, each file's name and header, and `sample_digest`, or
    `Pins.values_digest`. Key order and white space of config.json do not matter. Two checkpoints that differ
    in a few values only can have the same fingerprint; `checkpoint.hashes` distinguishes them.
    """
    canonical = json.dumps(raw_config, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    headers = xxhash.xxh3_64()
    for shard in sorted(shards, key=lambda shard: shard.file):
        for part in (shard.file.encode(), shard.digest):
            # Length prefixes keep different lists of parts from giving the same bytes.
            headers.update(len(part).to_bytes(8, "little") + part)
    digests = (xxhash.xxh3_64_intdigest(canonical.encode()), headers.intdigest(), sample_digest)
    return "-".join(f"{digest:016x}" for digest in digests)


def differing_parts(one: str, other: str) -> str:
    """Return what two fingerprints differ in, such as "headers and values"; "" if unknown."""
    pairs = list(zip(PARTS, one.split("-"), other.split("-"), strict=False))
    if len(pairs) != len(PARTS):
        return ""
    return " and ".join(part for part, mine, others in pairs if mine != others)


@dataclass(frozen=True, slots=True, kw_only=True)
class IgnoredTensors:
    """Tensors that are not read, and their size in files."""

    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A directory with safetensors, or a GGUF model, with validated config and headers.

    `path` opens it again: the directory, or the first GGUF file. `directory` has the files of tensors.
    `tensors` maps names to file locations. `fingerprint` identifies config, layout and sampled values.
    `eos_token_ids` end a sequence; it may be empty. `packed` has the quantised matrices by name; their parts
    are in `tensors`, which has plain tensors by their own names. With `pins`, the directory is a cache of a
    remote checkpoint, whose files have holes.
    """

    path: Path
    directory: Path
    config: Blueprint
    tensors: Mapping[str, TensorEntry]
    fingerprint: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    packed: Mapping[str, PackedMatrix] = field(default_factory=dict)
    pins: Pins | None = None

    @classmethod
    def open(cls, path: str | Path, *, pins: Pins | None = None) -> Checkpoint:
        """Read and validate config and headers of a directory or GGUF file; of weights only samples.

        With `pins` no weights are read, as they may be holes: the pins stand for the samples.

        Raises CheckpointError (see checkpoint.errors): a missing directory or file, invalid JSON, an
        unsupported model or field, tensors that are missing, unknown or of another shape.
        """
        path = Path(path)
        found, directory = describe(path, is_sparse=pins is not None), files_directory(path)
        config, tensors = found.config, found.headers.tensors
        if config.has_row:
            verify_tensors(config, tensors)
            if pins is None:
                verify_frequencies(config, tensors, directory)
        shapes = stage_tensor_shapes(config, 0, config.num_layers, has_embeddings=True, has_head=True)
        values = sample_digest(directory, tensors) if pins is None else pins.values_digest
        return cls(
            path=path,
            directory=directory,
            config=config,
            tensors=tensors,
            fingerprint=fingerprint(found.raw, found.headers.shards, values),
            eos_token_ids=eos_token_ids(found.generation, text_config(found.raw), found.raw),
            bos_token_id=bos_token_id(found.generation, text_config(found.raw)),
            packed=packed_tensors(config, shapes),
            pins=pins,
        )

    @property
    def name(self) -> str:
        """Name of the directory or of the GGUF model."""
        return model_name(self.path) if is_gguf(self.path) else self.path.name

    def with_weights(self, weights: WeightFormat | None) -> Checkpoint:
        """This checkpoint for a stage with matrices in another format in memory.

        Raises UnsupportedModel for matrices that the format cannot hold.
        """
        config = self.config.with_weights(weights)
        check_can_hold(config)
        return replace(self, config=config)

    def with_stored(self, *, holds_stored: bool) -> Checkpoint:
        """See `Blueprint.with_stored`."""
        return replace(self, config=self.config.with_stored(holds_stored=holds_stored))

    def for_length(self, max_tokens: int | None) -> Checkpoint:
        """This checkpoint for sequences of at most `max_tokens` (None: of the model's length)."""
        longest = self.config.max_position_embeddings if max_tokens is None else max_tokens
        return replace(self, config=self.config.for_length(longest))

    def with_long_rope(self, *, is_long: bool) -> Checkpoint:
        """See `Blueprint.with_long_rope`."""
        return replace(self, config=self.config.with_long_rope(is_long=is_long))

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name` once it is unpacked."""
        return self.packed[name].shape if name in self.packed else self.tensors[name].shape

    def stored_names(self, name: str) -> tuple[str, ...]:
        """Names of the stored tensors that hold tensor `name`."""
        return (
            tuple(part.name for part in self.packed[name].parts.values()) if name in self.packed else (name,)
        )

    def parts_of(self, name: str) -> tuple[TensorEntry, ...]:
        """The stored tensors that hold tensor `name`."""
        return tuple(self.tensors[stored] for stored in self.stored_names(name))

    @property
    def ignored(self) -> IgnoredTensors:
        """Tensors of other modalities."""
        return self._with_prefixes(self.config.names.ignored)

    @property
    def drafts(self) -> IgnoredTensors:
        """Tensors of layers for speculation, see `Blueprint.num_draft_layers`."""
        return self._with_prefixes(draft_prefixes(self.config))

    def _with_prefixes(self, prefixes: tuple[str, ...]) -> IgnoredTensors:
        sizes = [entry.num_bytes for name, entry in self.tensors.items() if name.startswith(prefixes)]
        return IgnoredTensors(num_tensors=len(sizes), num_bytes=sum(sizes))

    @property
    def weight_file_bytes(self) -> int:
        """Size of all weights in files."""
        config = self.config
        names = stage_tensor_names(config, 0, config.num_layers, has_embeddings=True, has_head=True)
        return sum(self.tensors[name].num_bytes for name in names)

    def file_identities(self) -> tuple[FileIdentity, ...]:
        """Current identities of all files with weights, by name."""
        names = sorted({entry.file for entry in self.tensors.values()})
        return stat_files(self.directory, names) if self.pins is None else self.pins.identities(names)


def describe(path: Path, *, is_sparse: bool = False) -> Description:
    """Read config and headers of a directory or a GGUF file. Raises CheckpointError.

    With `is_sparse`, files have holes in the place of weights.
    """
    if is_gguf(path):
        return describe_gguf(path, is_sparse=is_sparse)
    return describe_mistral(path) if has_params(path) else describe_directory(path)


def headers_of(path: Path) -> Headers:
    """Read the headers of a directory or a GGUF file. Raises CheckpointError."""
    return gguf_headers(path) if is_gguf(path) else read_headers(path)


def files_directory(path: Path) -> Path:
    """The directory with the tensors of the checkpoint that `path` opens."""
    return path.parent if is_gguf(path) else path
