"""A cheap identity of a checkpoint: equal on every host that holds the same config and tensor layout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import xxhash

from checkpoint.headers import ShardHeader


def fingerprint(raw_config: Mapping[str, object], shards: Iterable[ShardHeader]) -> str:
    """XXH3-128 (32 hex digits) of the config as canonical JSON and of each file's name and header.

    Key order and white space of config.json do not matter. Weights are not read: two checkpoints that
    differ in values only have the same fingerprint.
    """
    state = xxhash.xxh3_128()
    canonical = json.dumps(raw_config, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    _add(state, canonical.encode())
    for shard in sorted(shards, key=lambda shard: shard.file):
        _add(state, shard.file.encode())
        _add(state, shard.digest)
    return state.hexdigest()


def _add(state: xxhash.xxh3_128, part: bytes) -> None:
    """The length goes first, so that no two lists of parts run together to the same bytes."""
    state.update(len(part).to_bytes(8, "little"))
    state.update(part)
