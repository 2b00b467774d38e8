"""A remote checkpoint without weights: small files, and files with weights as holes behind their headers."""

from __future__ import annotations

import errno
import functools
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from pathlib import Path

import xxhash

from checkpoint.errors import BadHeader, CheckpointNotFound, FileTooLarge
from checkpoint.files import (
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    PARAMS_FILE,
    TEKKEN_FILE,
    TOKENIZER_FILE,
    TOKENIZER_FILES,
    replace_file,
)
from checkpoint.gguf.families import ROPE_FACTORS, factors_beside
from checkpoint.gguf.files import is_gguf, parse_gguf_file, shard_paths
from checkpoint.headers import (
    CONSOLIDATED_FILES,
    MAX_HEADER_BYTES,
    MAX_INDEX_BYTES,
    USUAL_FILES,
    WeightFiles,
    parse_weight_map,
)
from checkpoint.pins import PinnedFile, Pins
from weights.errors import CacheFull, SourceUnavailable
from weights.location import RemoteModel
from weights.parallel import no_check, run_requests
from weights.pieces import DEFAULT_TRANSFER, TransferPolicy
from weights.source import CONFIG_FILES, RangeStream, WeightSource

log = logging.getLogger(__name__)

MAX_TEXT_BYTES = 256 * 1024 * 1024
MAX_FILES = 4096
NUM_READERS = 8
WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".rope_freqs")
"""Of files with weights, and of a tensor that is kept beside one."""
FILES_FOLDER = "files"
"""In the folder of a model: the checkpoint's directory."""
_WEIGHT_FILES = tuple(
    name for files in (USUAL_FILES, CONSOLIDATED_FILES) for name in (files.single, files.index)
)
_LIMITS = {**dict.fromkeys(_WEIGHT_FILES, MAX_INDEX_BYTES), **dict.fromkeys(CONFIG_FILES, MAX_CONFIG_BYTES)}
HASHES_FOLDER = "hashes"
"""Beside FILES_FOLDER: the record of each small file and header that was fetched."""
_MAX_RECORD_BYTES = 64
NUM_TRIES = 5
"""Of a small file; the transfer of weights is more patient."""


def pin(source: WeightSource) -> Pins:
    """Find out which files the checkpoint has, and their versions. Raises SourceError, CheckpointError."""
    if isinstance(source.location, RemoteModel) and source.location.file:
        return _pin_gguf(source, [path.name for path in shard_paths(Path(source.location.file))])
    found = _find(source, (*CONFIG_FILES, *TOKENIZER_FILES, *_WEIGHT_FILES))
    names = _files_of_format(source, found)
    if names.single in found:
        found.pop(names.index, None)
    elif names.index in found:
        found |= _shards(source, found[names.index])
    else:
        raise CheckpointNotFound(f"{source.location} has neither {names.single} nor {names.index}")
    files = tuple(sorted(found.values(), key=lambda file: file.name))
    return Pins(source=str(source.location), files=files)


def _files_of_format(source: WeightSource, found: dict[str, PinnedFile]) -> WeightFiles:
    """Names of the files with weights; removes the files of the other format from `found`."""
    if CONFIG_FILE in found:
        names, others = USUAL_FILES, CONSOLIDATED_FILES
        found.pop(PARAMS_FILE, None)
    elif PARAMS_FILE in found:
        names, others = CONSOLIDATED_FILES, USUAL_FILES
    else:
        hint = "" if isinstance(source.location, str) else f"; a GGUF model is {source.where('FILE.gguf')}"
        raise CheckpointNotFound(f"{source.location} has neither {CONFIG_FILE} nor {PARAMS_FILE}{hint}")
    for name in (others.single, others.index):
        found.pop(name, None)
    return names


def _pin_gguf(source: WeightSource, names: list[str]) -> Pins:
    found = _find(source, names)
    if missing := [name for name in names if name not in found]:
        raise CheckpointNotFound(f"{source.where(missing[0])} does not exist")
    return Pins(source=str(source.location), files=tuple(found[name] for name in names))


def _find(source: WeightSource, names: Iterable[str]) -> dict[str, PinnedFile]:
    """Find files, and wait where the source names a time within the limit. A wrong address fails at once."""
    policy = DEFAULT_TRANSFER
    for num_failures in range(1, NUM_TRIES):
        try:
            return source.find(names)
        except SourceUnavailable as error:
            if error.retry_after_s is None or error.retry_after_s > policy.max_retry_after_s:
                raise
            wait_s = policy.wait_after_s(error.retry_after_s, num_failures)
            log.warning("%s: trying again in %.1f s", error, wait_s)
            time.sleep(wait_s)
    return source.find(names)


def _shards(source: WeightSource, index: PinnedFile) -> dict[str, PinnedFile]:
    weight_map = parse_weight_map(read_small(source, index), source.where(index.name))
    names = sorted(set(weight_map.values()))
    if len(names) > MAX_FILES:
        raise BadHeader(f"{source.location} has {len(names)} files with weights, the limit is {MAX_FILES}")
    shards = _find(source, names)
    if missing := [name for name in names if name not in shards]:
        raise CheckpointNotFound(f"{source.location} lacks {', '.join(missing[:5])}, named in {index.name}")
    return shards


def fetch_metadata(
    source: WeightSource, pins: Pins, folder: Path, *, has_text: bool, check: Callable[[], None] = no_check
) -> Path:
    """Fetch what `folder` lacks of config, headers and, with `has_text`, tokenizer. Return the directory.

    Files appear whole or not at all, so processes may do this at the same time. `check` is called several
    times a second by this thread; its exceptions end the fetch. Raises SourceError and CheckpointError.
    """
    directory = folder / FILES_FOLDER
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    wanted = [file for file in pins.files if has_text or file.name not in TOKENIZER_FILES]
    _fetch_missing(source, wanted, directory, check)
    return directory


def fetch_vocabulary(
    source: WeightSource, pins: Pins, directory: Path, *, check: Callable[[], None] = no_check
) -> None:
    """Fetch the file with the tokens' texts for grammars, if there is one. Raises like `fetch_metadata`."""
    files = {file.name: file for file in pins.files}
    found = [files[name] for name in (TOKENIZER_FILE, TEKKEN_FILE) if name in files]
    _fetch_missing(source, found[:1], directory, check)


def _fetch_missing(
    source: WeightSource, wanted: Iterable[PinnedFile], directory: Path, check: Callable[[], None]
) -> None:
    missing = [file for file in wanted if not _is_whole(directory, file)]
    run_requests(
        [functools.partial(_fetch_file, source, file, directory) for file in missing],
        num_threads=NUM_READERS,
        name="weights-metadata",
        abort=source.abort,
        check=check,
    )


def _fetch_file(source: WeightSource, file: PinnedFile, directory: Path, ending: threading.Event) -> None:
    is_sparse = True
    if is_gguf(Path(file.name)):
        content = _read_gguf_header(source, file, directory, ending)
    elif file.name.endswith(".safetensors"):
        content = _read_header(source, file, ending)
    else:
        content, is_sparse = read_small(source, file, ending), False
    path = directory / file.name
    if is_sparse and _has_size(path, file):
        _rewrite_header(path, content)
    else:
        _write(path, content, size_bytes=file.size_bytes)
    record = _record(directory, file)
    record.parent.mkdir(mode=0o700, exist_ok=True)
    with full_disk_named(directory, file.name, len(content)):
        replace_file(record, f"{len(content)} {xxhash.xxh3_128_hexdigest(content)}")


class FileState(Enum):
    """What a folder has of a small file, or of the header of a file with weights."""

    MISSING = auto()
    UNPROVEN = auto()
    """It has the right size, and no record: a kill came between the two, or an older version wrote it."""
    DAMAGED = auto()
    WHOLE = auto()


def file_state(directory: Path, file: PinnedFile) -> FileState:
    """Compare a file with the record of its fetch. Raises OSError."""
    path = directory / file.name
    if not path.is_file():
        return FileState.MISSING
    if not _has_size(path, file):
        return FileState.DAMAGED
    try:
        with _record(directory, file).open("rb") as opened:
            length, _, digest = opened.read(_MAX_RECORD_BYTES).partition(b" ")
    except FileNotFoundError:
        return FileState.UNPROVEN
    if not length.isdigit() or int(length) > file.size_bytes:
        return FileState.DAMAGED
    with path.open("rb") as opened:
        is_same = xxhash.xxh3_128_hexdigest(opened.read(int(length))).encode() == digest
    return FileState.WHOLE if is_same else FileState.DAMAGED


def _is_whole(directory: Path, file: PinnedFile) -> bool:
    state = file_state(directory, file)
    if state is FileState.DAMAGED:
        log.warning("%s differs from its recorded hash: fetched again", directory / file.name)
    return state is FileState.WHOLE


def _has_size(path: Path, file: PinnedFile) -> bool:
    return path.is_file() and path.stat().st_size == file.size_bytes


def _record(directory: Path, file: PinnedFile) -> Path:
    """The record of a file: the number of bytes that were fetched, and their XXH3-128."""
    return directory.parent / HASHES_FOLDER / file.name


def read_small(source: WeightSource, file: PinnedFile, ending: threading.Event | None = None) -> bytes:
    """All of a file other than weights; `ending` ends waits. Raises FileTooLarge and SourceError."""
    limit = _LIMITS.get(file.name, MAX_TEXT_BYTES)
    if file.size_bytes > limit:
        raise FileTooLarge(f"{source.where(file.name)} has {file.size_bytes} bytes, the limit is {limit}")
    return _patiently(source, lambda: source.read(file, 0, file.size_bytes), ending or threading.Event())


def _read_header(source: WeightSource, file: PinnedFile, ending: threading.Event) -> bytes:
    """The length of the header and the header of a safetensors file."""
    where = source.where(file.name)
    if file.size_bytes < 8:
        raise BadHeader(f"{where} has {file.size_bytes} bytes, too few for a safetensors header")
    prefix = _patiently(source, lambda: source.read(file, 0, 8), ending)
    length = int.from_bytes(prefix, "little")
    if length > min(MAX_HEADER_BYTES, file.size_bytes - 8):
        raise BadHeader(f"{where} claims a header of {length} bytes in a file of {file.size_bytes} bytes")
    return prefix + _patiently(source, lambda: source.read(file, 8, 8 + length), ending)


def _read_gguf_header(
    source: WeightSource, file: PinnedFile, directory: Path, ending: threading.Event
) -> bytes:
    """The header of a GGUF file; writes the tensor beside it that belongs to the config, if there is one."""

    def read(begin: int, end: int) -> bytes:
        return _patiently(source, lambda: source.read(file, begin, end), ending)

    stream = RangeStream(read, file.size_bytes)
    found = parse_gguf_file(stream, Path(file.name), size_bytes=file.size_bytes)
    if (factors := found.header.tensors.get(ROPE_FACTORS)) is not None:
        content = read(factors.begin, factors.end)
        beside = factors_beside(directory / file.name)
        _write(beside, content + xxhash.xxh3_128_digest(content), size_bytes=len(content) + 16)
    return stream.before(found.header_bytes)


def _patiently(
    source: WeightSource,
    read: Callable[[], bytes],
    ending: threading.Event,
    policy: TransferPolicy = DEFAULT_TRANSFER,
) -> bytes:
    """Try again while the source is unavailable, until `ending` is set. Raises its last error."""
    for num_failures in range(1, NUM_TRIES):
        try:
            content = read()
        except SourceUnavailable as error:
            source.problem = str(error)
            wait_s = policy.wait_after_s(error.retry_after_s, num_failures)
            if not ending.is_set():
                log.warning("%s: trying again in %.1f s", error, wait_s)
            if ending.wait(wait_s):
                raise
        else:
            source.problem = ""
            return content
    return read()


def _write(path: Path, content: bytes, *, size_bytes: int) -> None:
    """Write a file of `size_bytes`, with a hole after `content`. It has its name when it is on the device.

    Raises CacheFull when the disk is.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:60]}.", dir=path.parent)
    try:
        with full_disk_named(path.parent, path.name, len(content)), os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.truncate(size_bytes)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _rewrite_header(path: Path, header: bytes) -> None:
    """Write a header in its place: the tensors behind it stay, and others may have the file open.

    Raises CacheFull when the disk is full.
    """
    with full_disk_named(path.parent, path.name, len(header)), path.open("r+b") as file:
        file.write(header)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def full_disk_named(directory: Path, what: str, num_bytes: int) -> Iterator[None]:
    """Turn the errors of a full disk, a quota and a limit of file sizes into CacheFull with the numbers."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise CacheFull(
                f"{what} in {directory} is larger than files may be: raise `ulimit -f`, or choose a disk "
                "with large files"
            ) from error
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CacheFull(
            f"the disk of {directory} is full: {num_bytes} bytes of {what} could not be written, "
            f"{free_bytes(directory)} are free"
        ) from error


def free_bytes(directory: Path) -> int:
    """Free bytes of the disk, for this user."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
