"""A cheap identity of a checkpoint: equal on every host that holds the same config, layout and values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import xxhash

from checkpoint.headers import ShardHeader

PARTS = ("config", "headers", "values")
"""What the three numbers of a fingerprint stand for."""


def fingerprint(raw_config: Mapping[str, object], shards: Iterable[ShardHeader], sample_digest: int) -> str:
    """CONFIG-HEADERS-VALUES, 16 hex digits (XXH3-64) each: the config as canonical JSON, each file's name and
    header, and sampled values (see `checkpoint.samples`).

    Key order and white space of config.json do not matter. Two checkpoints that differ in few values only
    can have the same fingerprint; `checkpoint.full_hash` tells them apart.
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
