"""One model in a cache: sparse files with some of its tensors, and the log of what they contain."""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import re
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import xxhash

from checkpoint.directory import headers_of
from checkpoint.gguf.files import checkpoint_in
from checkpoint.headers import Headers, TensorEntry
from weights.errors import PieceDamaged
from weights.metadata import FILES_FOLDER, full_disk_named
from weights.piece_log import PieceLog
from weights.pieces import TensorPiece, pieces_of

log = logging.getLogger(__name__)

LOG_FILE = "pieces.log"
_READ_BYTES = 1024 * 1024
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_LAYER = re.compile(r"(.*?\b(?:layers|blk)\.\d+)\.")


def unit_of(tensor: str) -> str:
    """What is evicted as a whole: the layer that a tensor is in, or the tensor."""
    found = _LAYER.match(tensor)
    return tensor if found is None else found[1]


class CachedModel:
    """Tensors of one model on disk. Writes may come from several threads.

    The files equal the checkpoint's in name, size and offsets; what is not cached is a hole.
    """

    def __init__(self, folder: Path, *, piece_bytes: int) -> None:
        """Open `folder`, whose files have their headers already. Raises CheckpointError and OSError."""
        self.directory = folder / FILES_FOLDER
        self.headers: Headers = headers_of(checkpoint_in(self.directory))
        self._piece_bytes = piece_bytes
        self._log = PieceLog(folder / LOG_FILE)
        self._lock = threading.Lock()
        self._open: dict[str, int] = {}
        self._tensors_of = {shard.file: _by_position(shard.tensors) for shard in self.headers.shards}
        self._drop_unknown()

    def close(self) -> None:
        """Close all files. No other method may be called again."""
        self._log.close()
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def pieces(self, tensors: Iterable[str]) -> Iterator[TensorPiece]:
        """All pieces of `tensors`."""
        for tensor in tensors:
            yield from pieces_of(tensor, self.headers.tensors[tensor], self._piece_bytes)

    def missing(self, tensors: Iterable[str]) -> list[TensorPiece]:
        """Pieces of `tensors` that are not recorded, each with its recorded part."""
        return [self._begun(piece) for piece in self.pieces(tensors) if self._log.digest(piece) is None]

    def damaged(self, tensors: Iterable[str], advance: Callable[[int], None]) -> list[str]:
        """Read the recorded bytes of `tensors`; return the tensors with others than were recorded.

        `advance` is called with the number of bytes after each piece; its exceptions end the check.
        """
        found: dict[str, None] = {}
        for piece in self.pieces(tensors):
            if (recorded := self._log.recorded(piece)) is not None:
                end, digest = recorded
                if self._hash(piece.file, piece.begin, end).digest() != digest:
                    found[piece.tensor] = None
                advance(end - piece.begin)
        return list(found)

    def piece_at(self, file: str, position: int) -> TensorPiece | None:
        """The piece with this byte of a file; None in a header, and beyond the end."""
        begins, names = self._tensors_of.get(file, ((), ()))
        index = bisect_right(begins, position) - 1
        if index < 0 or position >= self.headers.tensors[names[index]].end:
            return None
        tensor = names[index]
        entry = self.headers.tensors[tensor]
        begin = position - (position - entry.begin) % self._piece_bytes
        return TensorPiece(file, begin, min(begin + self._piece_bytes, entry.end), tensor)

    def unit_at(self, file: str, position: int) -> tuple[str, int]:
        """The unit with this byte of a file and the end of its tensor; for others "" and the next byte."""
        if (piece := self.piece_at(file, position)) is None:
            return "", position + 1
        return unit_of(piece.tensor), self.headers.tensors[piece.tensor].end

    def read_recorded(self, piece: TensorPiece) -> bytes | None:
        """The bytes of a piece if they are the recorded ones; None for a piece that is not recorded.

        May be called by any thread. Raises PieceDamaged.
        """
        if (digest := self._log.digest(piece)) is None:
            return None
        data = os.pread(self._descriptor(piece.file), piece.num_bytes, piece.begin)
        if xxhash.xxh3_128_digest(data) == digest:
            return data
        if self._log.digest(piece) is None:  # it was evicted meanwhile
            return None
        raise self._damage(piece)

    def hash_present(self, piece: TensorPiece) -> xxhash.xxh3_128:
        """Hash the bytes of a piece that are in the cache. Raises PieceDamaged for others than recorded."""
        state = self._hash(piece.file, piece.begin, piece.start)
        if piece.present_bytes and self._log.recorded(piece) != (piece.start, state.digest()):
            raise self._damage(piece)
        return state

    def write(self, piece: TensorPiece, begin: int, data: memoryview, before: xxhash.xxh3_128) -> None:
        """Write bytes of a piece at `begin`; then record it up to their end.

        `before` has hashed the bytes before them, and hashes these. Raises CacheFull when the disk is.
        """
        descriptor = self._descriptor(piece.file)
        with full_disk_named(self.directory, piece.tensor, len(data)):
            done = 0
            while done < len(data):
                done += os.pwrite(descriptor, data[done:], begin + done)
            before.update(data)
            self._log.add(piece, begin + len(data), before.digest())

    def sync(self, file: str) -> None:
        """Write the data and the records of a file to the device."""
        os.fdatasync(self._descriptor(file))
        self._log.sync()

    def sha256(self, tensor: str) -> bytes:
        """SHA-256 of the bytes of a tensor in the cache."""
        entry, state = self.headers.tensors[tensor], sha256()
        for data in self._read(entry.file, entry.begin, entry.end):
            state.update(data)
        return state.digest()

    def is_verified(self, tensor: str) -> bool:
        """Whether all bytes of the tensor have equalled the manifest."""
        return self._log.is_verified(tensor)

    def mark_verified(self, tensor: str) -> None:
        self._log.mark_verified(tensor)

    def mark_used(self, tensors: Iterable[str]) -> None:
        """Record that the units of `tensors` are in use now."""
        for unit in dict.fromkeys(map(unit_of, tensors)):
            self._log.mark_used(unit, time.time())

    def drop(self, tensors: Iterable[str]) -> int:
        """Forget tensors, then free their blocks. Returns the number of recorded bytes."""
        dropped = list(tensors)
        num_bytes = sum(map(self._log.num_bytes, dropped))
        self._log.drop(dropped)
        for tensor in dropped:
            entry = self.headers.tensors[tensor]
            self._punch(entry.file, entry.begin, entry.end)
        return num_bytes

    def units(self) -> dict[str, list[str]]:
        """Tensors with recorded bytes, by unit."""
        found: dict[str, list[str]] = {}
        for tensor in self._log.tensors():
            found.setdefault(unit_of(tensor), []).append(tensor)
        return found

    def num_bytes(self, tensor: str) -> int:
        """Recorded bytes of a tensor."""
        return self._log.num_bytes(tensor)

    def last_use_s(self, unit: str) -> float:
        """Seconds since 1970, 0 if it was never used."""
        return self._log.last_use_s(unit)

    def _drop_unknown(self) -> None:
        """Free what a kill or a change of the size of pieces has left without a usable record."""
        entries = self.headers.tensors
        odd = []
        for tensor in self._log.tensors():
            ends = {piece.begin: piece.end for piece in self.pieces([tensor])} if tensor in entries else {}
            are_pieces = all(ends.get(begin) == end for begin, end in self._log.pieces(tensor))
            are_parts = all(begin < end < ends.get(begin, 0) for begin, end in self._log.parts(tensor))
            if not ends or not are_pieces or not are_parts:
                odd.append(tensor)
        self._log.drop(odd)
        by_file: dict[str, list[tuple[int, int]]] = {}
        for tensor in self._log.tensors():
            ranges = by_file.setdefault(entries[tensor].file, [])
            ranges.extend([*self._log.pieces(tensor), *self._log.parts(tensor)])
        for shard in self.headers.shards:
            position = min((entry.begin for entry in shard.tensors.values()), default=0)
            for begin, end in sorted(by_file.get(shard.file, [])):
                self._punch(shard.file, position, begin)
                position = max(position, end)
            self._punch(shard.file, position, max(position, _end(shard.tensors)))

    def _begun(self, piece: TensorPiece) -> TensorPiece:
        recorded = self._log.recorded(piece)
        return piece if recorded is None else replace(piece, present_bytes=recorded[0] - piece.begin)

    def _damage(self, piece: TensorPiece) -> PieceDamaged:
        return PieceDamaged(f"tensor {piece.tensor} in {self.directory} differs from the recorded hash")

    def _hash(self, file: str, begin: int, end: int) -> xxhash.xxh3_128:
        state = xxhash.xxh3_128()
        for data in self._read(file, begin, end):
            state.update(data)
        return state

    def _punch(self, file: str, begin: int, end: int) -> None:
        _punch_hole(self._descriptor(file), begin, end)

    def _read(self, file: str, begin: int, end: int) -> Iterator[bytes]:
        descriptor = self._descriptor(file)
        for start in range(begin, end, _READ_BYTES):
            data = os.pread(descriptor, min(_READ_BYTES, end - start), start)
            if not data:
                return  # a shorter file has another hash
            yield data

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._open:
                path = self.directory / file
                self._open[file] = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            return self._open[file]


def _by_position(tensors: Mapping[str, TensorEntry]) -> tuple[Sequence[int], Sequence[str]]:
    """Where the tensors of a file begin, in order, and their names; without empty ones."""
    found = sorted((entry.begin, name) for name, entry in tensors.items() if entry.num_bytes)
    return [begin for begin, _ in found], [name for _, name in found]


def _end(tensors: Mapping[str, TensorEntry]) -> int:
    return max((entry.end for entry in tensors.values()), default=0)


def disk_bytes(folder: Path) -> int:
    """Bytes that the files of a folder take on the disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def _punch_hole(descriptor: int, begin: int, end: int) -> None:
    """Make bytes [begin, end) of a file a hole. Raises OSError, with a sentence where holes do not exist."""
    if begin == end:
        return
    result = _fallocate()(
        descriptor, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(begin), ctypes.c_int64(end - begin)
    )
    if result == 0:
        return
    number = ctypes.get_errno()
    if number in (errno.EOPNOTSUPP, errno.ENOSYS):
        raise OSError(
            number, "the file system has no holes in files: put --cache-dir on ext4, xfs, btrfs or tmpfs"
        )
    raise OSError(number, os.strerror(number))


@functools.cache
def _fallocate() -> Callable[..., int]:
    function: Callable[..., int] = ctypes.CDLL(None, use_errno=True).fallocate64
    return function
