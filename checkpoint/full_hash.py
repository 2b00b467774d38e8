"""Hashes of every byte of tensors, computed in slices, so that whoever has more urgent work gets its turn.

XXH3-128 and not a cryptographic hash: it is against accidents, and costs less than reading.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

import xxhash

from checkpoint.directory import Checkpoint
from checkpoint.errors import BadHeader, CheckpointNotFound, FileChanged
from checkpoint.file_identity import FileIdentity, identity_of_open
from checkpoint.hash_cache import HashCache
from checkpoint.regular_files import open_regular

SLICE_BYTES = 8 * 1024 * 1024
MAX_PAUSE_S = 0.25

Hashes = dict[str, bytes]
"""16 bytes by name of the tensor."""


class TensorHasher:
    """The hashes of some tensors of a checkpoint. Used by one thread at a time."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Iterable[str],
        *,
        files: Iterable[FileIdentity] = (),
        cache: HashCache | None = None,
    ) -> None:
        """`files` are what the files must be, as far as they are given; `cache` has what is known already."""
        self.hashes: Hashes = {}
        self.read_bytes = 0
        self._checkpoint = checkpoint
        self._names_by_file: dict[str, list[str]] = {}
        for name in names:
            self._names_by_file.setdefault(checkpoint.tensors[name].file, []).append(name)
        self._files = {each.name: each for each in files}
        self._cache = cache
        self._buffer = memoryview(bytearray(SLICE_BYTES))
        self._slices = self._hash_all()

    def advance(self) -> bool:
        """Hashes one slice more; True when `hashes` is complete.

        Raises FileChanged for a file that is not, or not any more, what it must be, CheckpointNotFound,
        NotRegularFile or BadHeader for one that cannot be read. Then it must not be used any more.
        """
        return next(self._slices, None) is None

    def _hash_all(self) -> Iterator[int]:
        for file, names in sorted(self._names_by_file.items()):
            path = self._checkpoint.directory / file
            with open_regular(path) as stream:
                identity = identity_of_open(file, stream.fileno())
                if self._files.get(file, identity) != identity:
                    raise FileChanged(f"{path} has changed since its weights were loaded")
                known = {} if self._cache is None else self._cache.load(identity)
                self.hashes |= {name: known[name] for name in names if name in known}
                missing = [name for name in names if name not in known]
                yield from self._hash_tensors(stream, file, missing)
                if identity_of_open(file, stream.fileno()) != identity:
                    raise FileChanged(f"{path} has changed while it was hashed")
            if missing and self._cache is not None:
                self._cache.store(identity, known | {name: self.hashes[name] for name in names})

    def _hash_tensors(self, stream: BinaryIO, file: str, names: list[str]) -> Iterator[int]:
        """In the order in which they lie in the file. Yields after each slice how many bytes it has."""
        for name in sorted(names, key=lambda name: self._checkpoint.tensors[name].begin):
            entry, state = self._checkpoint.tensors[name], xxhash.xxh3_128()
            for begin in range(entry.begin, entry.end, SLICE_BYTES):
                part = self._buffer[: min(SLICE_BYTES, entry.end - begin)]
                try:
                    num_read = os.preadv(stream.fileno(), [part], begin)
                except OSError as error:
                    raise CheckpointNotFound(f"{file} cannot be read: {error.strerror}") from error
                if num_read != len(part):
                    raise BadHeader(f"{file} ended at byte {begin + num_read}, expected {entry.end}")
                state.update(part)
                self.read_bytes += num_read
                yield num_read
            self.hashes[name] = state.digest()


async def hash_when_idle(
    hasher: TensorHasher, activity: Callable[[], object | None], *, idle_s: float
) -> Hashes:
    """All hashes of `hasher`, computed on a thread while nothing else is done, half of the time at most.

    A slice is begun when `activity` has returned the same value for `idle_s`, and not None, which means that
    something is under way. Raises what `TensorHasher.advance` raises.
    """
    loop = asyncio.get_running_loop()
    seen, since_s = activity(), loop.time()
    while True:
        now = activity()
        if now is None or now != seen:
            seen, since_s = now, loop.time()
        if now is None or loop.time() - since_s < idle_s:
            await asyncio.sleep(min(idle_s, MAX_PAUSE_S))
            continue
        began_s = loop.time()
        if await loop.run_in_executor(None, hasher.advance):
            return hasher.hashes
        await asyncio.sleep(loop.time() - began_s)
