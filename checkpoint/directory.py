"""Opens a checkpoint directory: validated, fingerprinted, nothing loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from checkpoint.config import ModelConfig, parse_config
from checkpoint.dtypes import DType
from checkpoint.errors import GGUF_ADVICE, BadHeader, CheckpointNotFound, UnsupportedFormat
from checkpoint.files import open_regular, read_json_object
from checkpoint.generation_config import bos_token_id, eos_token_ids, read_generation_config
from checkpoint.headers import ShardHeader, TensorEntry, read_headers
from checkpoint.tensors import EMBEDDINGS, verify_tensors

SAMPLE_BYTES = 4096
NUM_INNER_SAMPLES = 2
"""Samples at places that follow from the tensor's name, beside the first and the last one."""

Range = tuple[int, int]


def sampled_ranges(name: str, entry: TensorEntry) -> tuple[Range, ...]:
    """The byte ranges [begin, end) of the file that are hashed; a small tensor is hashed whole."""
    if entry.end - entry.begin <= (NUM_INNER_SAMPLES + 2) * SAMPLE_BYTES:
        return ((entry.begin, entry.end),)
    num_places = entry.end - entry.begin - SAMPLE_BYTES + 1
    inner = (
        xxhash.xxh3_64_intdigest(name.encode(), seed=seed) % num_places for seed in range(NUM_INNER_SAMPLES)
    )
    begins = (entry.begin, *(entry.begin + offset for offset in inner), entry.end - SAMPLE_BYTES)
    return tuple((begin, begin + SAMPLE_BYTES) for begin in begins)


def sample_digest(directory: Path, tensors: Mapping[str, TensorEntry]) -> int:
    """XXH3-64 over names and sampled bytes of all tensors, in name order: which file a tensor lies in does
    not matter.

    Raises CheckpointNotFound or NotRegularFile for a file that cannot be read, BadHeader for one that has
    become shorter.
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
    """The kernel is told of all ranges first, so that a slow disk reads them side by side."""
    with open_regular(path) as stream:
        descriptor = stream.fileno()
        if hasattr(os, "posix_fadvise"):
            for begin, end in (each for of_tensor in ranges.values() for each in of_tensor):
                os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_WILLNEED)
        try:
            return {
                name: b"".join(xxhash.xxh3_64_digest(_read(path, descriptor, each)) for each in of_tensor)
                for name, of_tensor in ranges.items()
            }
        except OSError as error:
            raise CheckpointNotFound(f"{path} cannot be read: {error.strerror}") from error


def _read(path: Path, descriptor: int, wanted: Range) -> bytes:
    begin, end = wanted
    data = os.pread(descriptor, end - begin, begin)
    if len(data) != end - begin:
        raise BadHeader(f"{path} ended at byte {begin + len(data)}, its header accounted for {end}")
    return data


PARTS = ("config", "headers", "values")
"""What the three numbers of a fingerprint stand for."""


def fingerprint(raw_config: Mapping[str, object], shards: Iterable[ShardHeader], sample_digest: int) -> str:
    """CONFIG-HEADERS-VALUES, 16 hex digits (XXH3-64) each: the config as canonical JSON, each file's name and
    header, and sampled values (see `checkpoint.directory`).

    Key order and white space of config.json do not matter. Two checkpoints that differ in few values only
    can have the same fingerprint; `checkpoint.hashes` tells them apart.
    """
    canonical = json.dumps(raw_config, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    headers = xxhash.xxh3_64()
    for shard in sorted(shards, key=lambda shard: shard.file):
        for part in (shard.file.encode(), shard.digest):
            # The length goes first, so that no two lists of parts run together to the same bytes.
            headers.update(len(part).to_bytes(8, "little") + part)
    digests = (xxhash.xxh3_64_intdigest(canonical.encode()), headers.intdigest(), sample_digest)
    return "-".join(f"{digest:016x}" for digest in digests)


def differing_parts(one: str, other: str) -> str:
    """What two fingerprints differ in, as in "headers and values"; "" where that cannot be told."""
    pairs = list(zip(PARTS, one.split("-"), other.split("-"), strict=False))
    if len(pairs) != len(PARTS):
        return ""
    return " and ".join(part for part, mine, others in pairs if mine != others)


CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A Hugging Face safetensors directory whose config and headers have been checked.

    `tensors` maps every tensor's name to its place. `fingerprint` identifies config, layout and
    sampled values. `eos_token_ids` end a sequence; it may be empty.
    """

    directory: Path
    config: ModelConfig
    tensors: Mapping[str, TensorEntry]
    fingerprint: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Read config and headers of `directory` and check all of them; of the weights, samples are read.

        Raises CheckpointError (see checkpoint.errors): a missing directory or file, broken JSON, a model or
        field that is not supported, tensors that are missing, unknown or of another shape.
        """
        path = Path(directory)
        if not path.is_dir():
            raise CheckpointNotFound(f"{path} is not a directory")
        _refuse_gguf(path)
        raw = read_json_object(path / CONFIG_FILE)
        parse_config(raw, stored_dtype=DType.F32)  # what the config refuses is told before any header is read
        headers = read_headers(path)
        config = parse_config(raw, stored_dtype=_stored_dtype(headers.tensors))
        verify_tensors(config, headers.tensors)
        generation = read_generation_config(path)
        return cls(
            directory=path,
            config=config,
            tensors=headers.tensors,
            fingerprint=fingerprint(raw, headers.shards, sample_digest(path, headers.tensors)),
            eos_token_ids=eos_token_ids(generation, raw),
            bos_token_id=bos_token_id(generation, raw),
        )


def _refuse_gguf(path: Path) -> None:
    if not (path / CONFIG_FILE).exists() and (files := sorted(path.glob("*.gguf"))):
        raise UnsupportedFormat(f"{path} has {files[0].name} and no {CONFIG_FILE}: {GGUF_ADVICE}")


def _stored_dtype(tensors: Mapping[str, TensorEntry]) -> DType | None:
    return tensors[EMBEDDINGS].dtype if EMBEDDINGS in tensors else None
