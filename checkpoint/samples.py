"""A hash of sampled values: cheap enough to compute whenever a checkpoint is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import xxhash

from checkpoint.errors import BadHeader, CheckpointNotFound
from checkpoint.headers import TensorEntry
from checkpoint.regular_files import open_regular

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
