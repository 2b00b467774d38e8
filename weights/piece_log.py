"""Which pieces of which tensors a cache has: a log of lines that survives a kill at any byte.

A line is JSON and its checksum. Each piece is recorded with a hash of its bytes after they are written, so
bytes that a power failure lost are found when the piece is read. Of a piece that is being received, the first
bytes may be recorded: its part. Opening a log drops a torn line and rewrites the file.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from checkpoint.files import replace_file
from weights.pieces import TensorPiece

log = logging.getLogger(__name__)

_PIECE, _PART, _DROP, _VERIFIED, _USED = "piece", "part", "drop", "verified", "used"


class PieceLog:
    """Records of one model. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Read the file, or create it. Raises OSError."""
        self._lock = threading.Lock()
        self._pieces: dict[str, dict[tuple[int, int], bytes]] = {}
        self._parts: dict[str, dict[int, tuple[int, bytes]]] = {}
        self._verified: set[str] = set()
        self._used: dict[str, float] = {}
        if path.exists():
            for fields in _lines(path):
                self._apply(*fields)
        replace_file(path, "".join(map(_line, self._facts())))
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._descriptor)

    def add(self, piece: TensorPiece, end: int, digest: bytes) -> None:
        """Record that a piece is written up to `end`, with the hash of these bytes."""
        kind = _PIECE if end == piece.end else _PART
        self._append(kind, piece.tensor, piece.begin, end, digest.hex())

    def drop(self, tensors: Iterable[str]) -> None:
        """Forget all bytes of tensors, on disk before this returns."""
        for tensor in tensors:
            self._append(_DROP, tensor)
        self.sync()

    def mark_verified(self, tensor: str) -> None:
        """Record that the whole tensor equals the manifest."""
        self._append(_VERIFIED, tensor)

    def mark_used(self, unit: str, at_s: float) -> None:
        """Record the last use of a unit, in seconds since 1970."""
        self._append(_USED, unit, at_s)

    def sync(self) -> None:
        """Write the records to the device."""
        os.fsync(self._descriptor)

    def digest(self, piece: TensorPiece) -> bytes | None:
        """The XXH3-128 of a recorded piece."""
        return self._pieces.get(piece.tensor, {}).get((piece.begin, piece.end))

    def recorded(self, piece: TensorPiece) -> tuple[int, bytes] | None:
        """Where the recorded bytes of a piece end, and their XXH3-128."""
        if (digest := self.digest(piece)) is not None:
            return piece.end, digest
        return self._parts.get(piece.tensor, {}).get(piece.begin)

    def pieces(self, tensor: str) -> list[tuple[int, int]]:
        """Begin and end of the recorded pieces of a tensor."""
        with self._lock:
            return list(self._pieces.get(tensor, {}))

    def parts(self, tensor: str) -> list[tuple[int, int]]:
        """Begin and end of the recorded parts of a tensor."""
        with self._lock:
            return [(begin, end) for begin, (end, _) in self._parts.get(tensor, {}).items()]

    def tensors(self) -> list[str]:
        """Tensors with recorded bytes."""
        with self._lock:
            return list(dict.fromkeys([*self._pieces, *self._parts]))

    def num_bytes(self, tensor: str) -> int:
        return sum(end - begin for begin, end in [*self.pieces(tensor), *self.parts(tensor)])

    def is_verified(self, tensor: str) -> bool:
        return tensor in self._verified

    def last_use_s(self, unit: str) -> float:
        """0 if it was never used."""
        return self._used.get(unit, 0.0)

    def _append(self, *fields: Any) -> None:
        with self._lock:
            self._apply(*fields)
            os.write(self._descriptor, _line(fields).encode("ascii"))

    def _apply(self, kind: str, name: str, *rest: Any) -> None:
        match kind, rest:
            case "piece", (begin, end, digest):
                self._pieces.setdefault(name, {})[begin, end] = bytes.fromhex(digest)
                self._forget_part(name, begin)
            case "part", (begin, end, digest):
                self._parts.setdefault(name, {})[begin] = end, bytes.fromhex(digest)
            case "drop", ():
                self._pieces.pop(name, None)
                self._parts.pop(name, None)
                self._verified.discard(name)
            case "verified", ():
                self._verified.add(name)
            case "used", (at_s,):
                self._used[name] = float(at_s)

    def _forget_part(self, tensor: str, begin: int) -> None:
        if (parts := self._parts.get(tensor)) is not None:
            parts.pop(begin, None)
            if not parts:
                del self._parts[tensor]

    def _facts(self) -> Iterator[tuple[Any, ...]]:
        for tensor, ranges in self._pieces.items():
            for (begin, end), digest in ranges.items():
                yield _PIECE, tensor, begin, end, digest.hex()
        for tensor, parts in self._parts.items():
            for begin, (end, digest) in parts.items():
                yield _PART, tensor, begin, end, digest.hex()
        for tensor in sorted(self._verified):
            yield _VERIFIED, tensor
        for unit, at_s in self._used.items():
            yield _USED, unit, at_s


def _line(fields: Iterable[Any]) -> str:
    text = json.dumps(list(fields), separators=(",", ":"))
    return f"{text} {xxhash.xxh32_hexdigest(text.encode())}\n"


def _lines(path: Path) -> Iterator[list[Any]]:
    """The intact lines. Later ones count even after a damaged one: each is true by itself, or was dropped."""
    num_damaged = 0
    for line in path.read_bytes().splitlines():
        text, _, checksum = line.rpartition(b" ")
        if xxhash.xxh32_hexdigest(text).encode() == checksum:
            yield json.loads(text)
        else:
            num_damaged += 1
    if num_damaged:
        log.info("%s has %d torn lines: their bytes are fetched again", path, num_damaged)
