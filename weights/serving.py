"""Serves weights to other processes of the cluster by HTTP byte ranges: `/weights/FINGERPRINT/FILE`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from checkpoint.errors import CheckpointError
from checkpoint.files import TOKENIZER_FILES, identity_of_open, open_regular, stat_files
from checkpoint.gguf.files import is_gguf
from checkpoint.headers import TensorEntry, files_in
from weights.cached_model import CachedModel
from weights.errors import PieceDamaged
from weights.peers import WEIGHTS_PATH, PeerAddress, peer_entry
from weights.source import CONFIG_FILES

log = logging.getLogger(__name__)

NUM_SLOTS = 4
"""Answers at a time; further requests wait."""
MAX_ANSWER_BYTES = 4 * 1024 * 1024
"""Of one answer: with NUM_SLOTS the maximum of bytes in flight. Longer ranges are answered in part."""
ANSWER_TIMEOUT_S = 60.0
"""For a caller to take an answer."""
NICENESS = 10
"""Of the threads that serve: steps of the same process and others come first."""
_READ_BYTES = 1024 * 1024
_SEND_BYTES = 256 * 1024
_RANGE = re.compile(r"bytes=(\d{1,19})-(\d{1,19})", re.ASCII)

Scope = Mapping[str, Any]
Receive = Callable[[], Any]
Send = Callable[[dict[str, Any]], Any]


class HeldFiles(ABC):
    """Files of one checkpoint, or parts of them, that are proven to be its own. For any thread."""

    fingerprint: str

    @abstractmethod
    def size_of(self, file: str) -> int | None:
        """Size of a file in bytes; None for one that is not of the checkpoint."""

    @abstractmethod
    def read(self, file: str, begin: int, end: int) -> list[memoryview]:
        """Proven bytes of a file from `begin` on, at most to `end`; nothing if the first one is not held.

        Raises PieceDamaged and OSError.
        """

    @abstractmethod
    def units(self) -> frozenset[str] | None:
        """Units that are held whole; None for the whole checkpoint."""


class CachedFiles(HeldFiles):
    """What a cache has of a model. With a manifest, tensors that equal it."""

    def __init__(self, model: CachedModel, fingerprint: str, *, has_manifest: bool) -> None:
        self.fingerprint = fingerprint
        self._model, self._has_manifest = model, has_manifest
        self._sizes = {
            shard.file: (model.directory / shard.file).stat().st_size for shard in model.headers.shards
        }

    def size_of(self, file: str) -> int | None:
        return self._sizes.get(file)

    def read(self, file: str, begin: int, end: int) -> list[memoryview]:
        parts: list[memoryview] = []
        while begin < end:
            piece = self._model.piece_at(file, begin)
            if piece is None or not self._is_proven(piece.tensor):
                break
            if (data := self._model.read_recorded(piece)) is None:
                break
            stop = min(end, piece.end)
            parts.append(memoryview(data)[begin - piece.begin : stop - piece.begin])
            begin = stop
        return parts

    def units(self) -> frozenset[str]:
        model = self._model
        return frozenset(
            unit
            for unit, tensors in model.units().items()
            if all(map(self._is_proven, tensors)) and not model.missing(tensors)
        )

    def _is_proven(self, tensor: str) -> bool:
        return not self._has_manifest or self._model.is_verified(tensor)


class DirectoryFiles(HeldFiles):
    """A checkpoint's directory, or its GGUF files, as long as its files are those that were opened."""

    def __init__(self, directory: Path, tensors: Mapping[str, TensorEntry], fingerprint: str) -> None:
        """`tensors` belong to the checkpoint in the directory."""
        self.fingerprint, self._directory = fingerprint, directory
        self.files = stat_files(directory, _names_of(directory, tensors))
        self._identities = {file.name: file for file in self.files}

    def size_of(self, file: str) -> int | None:
        identity = self._identities.get(file)
        return None if identity is None or identity.status is None else identity.status[2]

    def read(self, file: str, begin: int, end: int) -> list[memoryview]:
        with open_regular(self._directory / file) as stream:
            if identity_of_open(file, stream.fileno()) != self._identities[file]:
                raise PieceDamaged(f"{self._directory / file} has changed since the model was opened")
            parts = [
                memoryview(os.pread(stream.fileno(), min(_READ_BYTES, end - position), position))
                for position in range(begin, end, _READ_BYTES)
            ]
        if sum(map(len, parts)) != end - begin:
            raise PieceDamaged(f"{self._directory / file} ended before byte {end}")
        return parts

    def units(self) -> None:
        return None


def _names_of(directory: Path, tensors: Mapping[str, TensorEntry]) -> list[str]:
    """Names of the files of a checkpoint: weights, config and tokenizer, all of which a GGUF file has."""
    shards = {entry.file for entry in tensors.values()}
    if any(is_gguf(Path(name)) for name in shards):
        return sorted(shards)
    names = files_in(directory)
    others = [] if names.single in shards else [names.index]
    small = [name for name in (*CONFIG_FILES, *TOKENIZER_FILES) if (directory / name).is_file()]
    return sorted({*shards, *others, *small})


class HeldRegistry:
    """What a process serves, by fingerprint. For any thread."""

    def __init__(self) -> None:
        self._held: dict[str, HeldFiles] = {}

    def put(self, held: HeldFiles) -> None:
        """Serve one checkpoint in the place of any other."""
        self._held = {held.fingerprint: held}

    def clear(self) -> None:
        """Serve nothing."""
        self._held = {}

    def get(self, fingerprint: str) -> HeldFiles | None:
        return self._held.get(fingerprint)

    @property
    def current(self) -> HeldFiles | None:
        """The checkpoint that is served."""
        return next(iter(self._held.values()), None)


Tracker = Callable[[str], list[PeerAddress] | None]
"""Processes with weights of a fingerprint; None for one that is not known."""


class WeightsApplication:
    """The application (ASGI). Its callers are admitted before it is called."""

    def __init__(self, registry: HeldRegistry, tracker: Tracker | None = None) -> None:
        """`tracker` answers `/weights/FINGERPRINT`. Use one instance in one event loop only."""
        self._registry, self._tracker = registry, tracker
        self._slots = asyncio.Semaphore(NUM_SLOTS)
        self._readers = ThreadPoolExecutor(NUM_SLOTS, "weights-read", initializer=yield_to_others)

    def close(self) -> None:
        """End the threads."""
        self._readers.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            parts = _parts_of(scope)
            if len(parts) == 1:
                await _answer(send, HTTPStatus.OK, self._peers(parts[0]))
                return
            held, size = self._file(*parts)
            begin, end = _range_of(scope, parts[1], size)
            async with self._slots, asyncio.timeout(ANSWER_TIMEOUT_S):
                loop = asyncio.get_running_loop()
                found = await loop.run_in_executor(self._readers, _read, held, parts[1], begin, end)
                await _send_range(send, found, begin, size)
        except _Refused as refusal:
            await _answer(send, refusal.status, {"error": str(refusal), "reason": refusal.reason})

    def _peers(self, fingerprint: str) -> dict[str, Any]:
        peers = None if self._tracker is None else self._tracker(fingerprint)
        if peers is None:
            raise _unknown(fingerprint)
        return {"peers": [peer_entry(peer) for peer in peers]}

    def _file(self, fingerprint: str, file: str) -> tuple[HeldFiles, int]:
        if (held := self._registry.get(fingerprint)) is None:
            raise _unknown(fingerprint)
        if (size := held.size_of(file)) is None:
            raise _Refused(HTTPStatus.NOT_FOUND, "UNKNOWN_FILE", f"the model has no file {file!r:.100}")
        return held, size


class _Refused(Exception):
    """A request that is not served."""

    def __init__(self, status: HTTPStatus, reason: str, text: str) -> None:
        super().__init__(text)
        self.status, self.reason = status, reason


def _unknown(fingerprint: str) -> _Refused:
    return _Refused(
        HTTPStatus.NOT_FOUND, "UNKNOWN_MODEL", f"no model with the fingerprint {fingerprint!r:.100} here"
    )


def _parts_of(scope: Scope) -> list[str]:
    """Fingerprint, and file if there is one. Raises _Refused."""
    raw: bytes = scope["raw_path"]
    prefix = f"{WEIGHTS_PATH}/".encode()
    parts = [unquote(part) for part in raw.removeprefix(prefix).decode("ascii", "replace").split("/")]
    if not raw.startswith(prefix) or not 1 <= len(parts) <= 2 or not all(parts):
        raise _Refused(HTTPStatus.NOT_FOUND, "UNKNOWN_PATH", f"paths are {WEIGHTS_PATH}/FINGERPRINT/FILE")
    if scope["method"] != "GET":
        raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, "METHOD", "weights are read with GET")
    return parts


def _range_of(scope: Scope, file: str, size: int) -> tuple[int, int]:
    """The requested bytes, cut to MAX_ANSWER_BYTES. Raises _Refused."""
    value = next((value for name, value in scope["headers"] if name == b"range"), b"").decode("latin-1")
    found = _RANGE.fullmatch(value)
    begin, end = (int(found[1]), int(found[2]) + 1) if found else (0, 0)
    if not begin < end <= size:
        status = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
        text = f"range {value!r:.60} of {file}, which has {size} bytes: ask for bytes=BEGIN-END within it"
        raise _Refused(status, "RANGE", text)
    return begin, min(end, begin + MAX_ANSWER_BYTES)


def _read(held: HeldFiles, file: str, begin: int, end: int) -> list[memoryview]:
    """Raises _Refused for bytes that are not held, or are damaged."""
    try:
        found = held.read(file, begin, end)
    except PieceDamaged as error:
        log.error("weights are not served: %s", error)
        raise _Refused(HTTPStatus.GONE, "DAMAGED", str(error)) from None
    except (CheckpointError, OSError) as error:
        log.error("weights cannot be read: %s", error)
        raise _Refused(HTTPStatus.GONE, "UNREADABLE", f"{file} cannot be read") from None
    if not found:
        status = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
        raise _Refused(status, "NOT_HELD", f"byte {begin} of {file} is not in this cache")
    return found


async def _send_range(send: Send, parts: list[memoryview], begin: int, size: int) -> None:
    num_bytes = sum(map(len, parts))
    headers = {
        "content-type": "application/octet-stream",
        "content-length": str(num_bytes),
        "content-range": f"bytes {begin}-{begin + num_bytes - 1}/{size}",
    }
    await _begin(send, HTTPStatus.PARTIAL_CONTENT, headers)
    for part in parts:
        for start in range(0, len(part), _SEND_BYTES):
            body = part[start : start + _SEND_BYTES]
            await send({"type": "http.response.body", "body": bytes(body), "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _answer(send: Send, status: HTTPStatus, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    await _begin(send, status, headers)
    await send({"type": "http.response.body", "body": body})


async def _begin(send: Send, status: HTTPStatus, headers: Mapping[str, str]) -> None:
    fields = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": int(status), "headers": fields})


def yield_to_others() -> None:
    """Lower the priority of this thread."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
