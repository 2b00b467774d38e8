"""Opens a checkpoint directory: validates and fingerprints it without loading weights."""

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
from checkpoint.files import FileIdentity, open_regular, read_json_object, stat_files
from checkpoint.generation_config import bos_token_id, eos_token_ids, read_generation_config
from checkpoint.headers import ShardHeader, TensorEntry, read_headers
from checkpoint.tensors import EMBEDDINGS, verify_tensors

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

    They cover the config as canonical JSON, each file's name and header, and `sample_digest`. Key order and
    white space of config.json do not matter. Two checkpoints that differ in a few values only can have the
    same fingerprint; `checkpoint.hashes` distinguishes them.
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


CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A Hugging Face safetensors directory with validated config and headers.

    `tensors` maps names to file locations. `fingerprint` identifies config, layout and sampled values.
    `eos_token_ids` end a sequence; it may be empty.
    """

    directory: Path
    config: ModelConfig
    tensors: Mapping[str, TensorEntry]
    fingerprint: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Read and validate config and headers of `directory`; of the weights, only samples are read.

        Raises CheckpointError (see checkpoint.errors): a missing directory or file, invalid JSON, an
        unsupported model or field, tensors that are missing, unknown or of another shape.
        """
        path = Path(directory)
        if not path.is_dir():
            raise CheckpointNotFound(f"{path} is not a directory")
        _refuse_gguf(path)
        raw = read_json_object(path / CONFIG_FILE)
        parse_config(raw, stored_dtype=DType.F32)  # report config errors before reading headers
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

    def file_identities(self) -> tuple[FileIdentity, ...]:
        """Current identities of all files with weights, by name."""
        names = {entry.file for entry in self.tensors.values()}
        return stat_files(self.directory, sorted(names))


def _refuse_gguf(path: Path) -> None:
    if not (path / CONFIG_FILE).exists() and (files := sorted(path.glob("*.gguf"))):
        raise UnsupportedFormat(f"{path} has {files[0].name} and no {CONFIG_FILE}: {GGUF_ADVICE}")


def _stored_dtype(tensors: Mapping[str, TensorEntry]) -> DType | None:
    return tensors[EMBEDDINGS].dtype if EMBEDDINGS in tensors else None
