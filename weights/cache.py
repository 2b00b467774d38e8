"""A directory with cached models of one process, within a limit of its size."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from checkpoint.directory import headers_of
from checkpoint.errors import BadHeader, CheckpointError, CheckpointNotFound
from checkpoint.files import TOKENIZER_FILES, read_json_object, replace_file
from checkpoint.gguf.files import checkpoint_in
from checkpoint.pins import PinnedFile, Pins
from weights.cached_model import CachedModel, disk_bytes
from weights.errors import CacheFull, CacheInUse
from weights.metadata import (
    FILES_FOLDER,
    HASHES_FOLDER,
    WEIGHT_SUFFIXES,
    FileState,
    fetch_metadata,
    file_state,
    free_bytes,
    full_disk_named,
)
from weights.parallel import no_check
from weights.pieces import DEFAULT_TRANSFER, TransferPolicy
from weights.source import WeightSource
from wire.sizes import format_size

log = logging.getLogger(__name__)

MODELS_FOLDER = "models"
PINS_FILE = "pins.json"
SERVED_FILE = "served.json"
"""Names the tensors that the worker's last stage was loaded from."""
_LOCK_FILE = "lock"
_MAX_PINS_BYTES = 8 * 1024 * 1024
_MAX_SERVED_BYTES = 64 * 1024 * 1024
DISK_RESERVE_BYTES = 64 * 1024 * 1024
"""Left free on the disk."""


@dataclass(frozen=True, slots=True)
class _Unit:
    key: str
    model: CachedModel
    name: str
    tensors: tuple[str, ...]


class TensorCache:
    """Cached models. Not thread-safe; locked against other processes until `close`."""

    def __init__(
        self, directory: Path, *, limit_bytes: int | None = None, policy: TransferPolicy = DEFAULT_TRANSFER
    ) -> None:
        """Create the directory if needed. Raises CacheInUse and OSError."""
        self.directory = directory
        self._limit_bytes = limit_bytes
        self._policy = policy
        (directory / MODELS_FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _locked(directory)
        _sweep(directory)
        self._models: dict[str, CachedModel] = {}
        self._unusable: set[str] = set()

    def close(self) -> None:
        for model in self._models.values():
            model.close()
        self._models.clear()
        os.close(self._lock)

    def model(self, source: WeightSource, pins: Pins, *, check: Callable[[], None] = no_check) -> CachedModel:
        """The model at this version, with config and headers at least.

        `check` is called several times a second; its exceptions end the fetch. Raises CheckpointError and
        OSError.
        """
        folder = self.directory / MODELS_FOLDER / pins.key
        folder.mkdir(mode=0o700, exist_ok=True)
        write_pins(folder / PINS_FILE, pins)
        fetch_metadata(source, pins, folder, has_text=False, check=check)
        if pins.key not in self._models:
            self._models[pins.key] = CachedModel(folder, piece_bytes=self._policy.piece_bytes)
        return self._models[pins.key]

    def opened(self, pins: Pins) -> CachedModel | None:
        """The model at this version if this process has used it."""
        return self._models.get(pins.key)

    def record_served(self, pins: Pins, tensors: Collection[str]) -> None:
        """Remember the tensors that a stage is loaded from, also for the next process.

        A disk that refuses them is a warning, since only a prefetch needs them.
        """
        if self._served() == (pins.key, set(tensors)):
            return
        path = self.directory / SERVED_FILE
        try:
            replace_file(path, json.dumps({"key": pins.key, "tensors": sorted(tensors)}))
        except OSError as error:
            log.warning(
                "a prefetch may evict the layers of this stage: %s cannot be written: %s", path, error
            )

    def make_room(
        self, num_bytes: int, model: CachedModel, tensors: Collection[str], *, keeps_served: bool = False
    ) -> None:
        """Evict units, the least recently used first, until `num_bytes` more fit; `tensors` of `model` stay.

        With `keeps_served` the tensors of the last stage stay, too. Raises CacheFull with the numbers, before
        it evicts anything, if they cannot fit.
        """
        used = disk_bytes(self.directory)
        limit = self._limit(used)
        kept_of = {model.directory.parent.name: set(tensors)}
        if keeps_served:
            key, served = self._served()
            kept_of[key] = kept_of.get(key, set()) | served
        evictable = [
            unit for unit in self._units() if not kept_of.get(unit.key, set()).intersection(unit.tensors)
        ]
        sizes = {id(unit): sum(map(unit.model.num_bytes, unit.tensors)) for unit in evictable}
        unusable = {key: disk_bytes(self._folder(key)) for key in self._unusable - kept_of.keys()}
        kept = used - sum(sizes.values()) - sum(unusable.values())
        if kept + num_bytes > limit.num_bytes:
            raise CacheFull(
                f"{format_size(num_bytes)} of weights must be fetched beside {format_size(kept)} that stay in"
                f" {self.directory}, {format_size(kept + num_bytes)} in all, but {limit.text}"
            )
        used -= self._evict_unusable(unusable, used + num_bytes - limit.num_bytes)
        for unit in sorted(evictable, key=lambda unit: unit.model.last_use_s(unit.name)):
            if used + num_bytes <= limit.num_bytes:
                return
            used -= unit.model.drop(unit.tensors)
            log.info("evicted %s of %s from the cache", unit.name, unit.key)

    def _evict_unusable(self, sizes: Mapping[str, int], num_bytes: int) -> int:
        """Evict models of these sizes until `num_bytes` are free; return what is."""
        freed = 0
        for key, size in sizes.items():
            if freed >= num_bytes:
                break
            shutil.rmtree(self._folder(key))
            freed += size
            log.info("evicted %s, whose config or headers are damaged, from the cache", key)
        return freed

    def _limit(self, used: int) -> _Limit:
        """The tighter one of --cache-size and the disk."""
        free = free_bytes(self.directory)
        disk = _Limit(
            used + max(0, free - DISK_RESERVE_BYTES),
            f"{format_size(free)} of the disk are free, and {format_size(DISK_RESERVE_BYTES)} stay so: free "
            "some, or choose another --cache-dir",
        )
        if self._limit_bytes is None or disk.num_bytes < self._limit_bytes:
            return disk
        size = format_size(self._limit_bytes)
        return _Limit(self._limit_bytes, f"--cache-size is {size}: raise it, or use more workers")

    def _units(self) -> Iterator[_Unit]:
        for key in stored_keys(self.directory):
            model = self._models.get(key) or self._reopened(key)
            if model is not None:
                for name, tensors in model.units().items():
                    yield _Unit(key, model, name, tuple(tensors))

    def _served(self) -> tuple[str, set[str]]:
        """Model and tensors of the last stage; empty without one."""
        try:
            found = read_json_object(self.directory / SERVED_FILE, max_bytes=_MAX_SERVED_BYTES)
        except CheckpointNotFound:
            return "", set()
        except (CheckpointError, OSError) as error:
            log.warning("the layers of the last stage are not known: %s", error)
            return "", set()
        tensors = found.get("tensors")
        return str(found.get("key", "")), set(map(str, tensors)) if isinstance(tensors, list) else set()

    def _reopened(self, key: str) -> CachedModel | None:
        """A model of earlier processes; None if its config or headers are damaged, which its use mends, or if
        they cannot be read.
        """
        try:
            self._models[key] = CachedModel(self._folder(key), piece_bytes=self._policy.piece_bytes)
        except CheckpointError:
            self._unusable.add(key)
            return None
        except OSError as error:
            log.warning("%s of the cache cannot be read: %s", key, error)
            return None
        return self._models[key]

    def _folder(self, key: str) -> Path:
        return self.directory / MODELS_FOLDER / key


@dataclass(frozen=True, slots=True)
class _Limit:
    num_bytes: int
    text: str


def stored_keys(directory: Path) -> list[str]:
    """Names of the folders of models in a cache."""
    return sorted(path.name for path in (directory / MODELS_FOLDER).iterdir() if path.is_dir())


class ModelState(Enum):
    """What a folder of a cache has of config and headers; any number of tensors may be there."""

    USABLE = "usable"
    INCOMPLETE = "incomplete"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A folder of a cache; `problem` says why it cannot be used, in the state INCOMPLETE or DAMAGED."""

    folder: Path
    source: str
    """Empty if the pins are missing or damaged."""
    state: ModelState
    problem: str = ""

    @property
    def key(self) -> str:
        return self.folder.name


def stored_models(directory: Path) -> Iterator[StoredModel]:
    """The models of a cache, by key; a model that cannot be used hides no other. Raises OSError."""
    for key in stored_keys(directory):
        yield stored_model(directory / MODELS_FOLDER / key)


def stored_model(folder: Path) -> StoredModel:
    """Compare config and headers with the records of their fetch, without changing them. Raises OSError."""
    try:
        pins = read_pins(folder / PINS_FILE)
    except CheckpointNotFound:
        problem = f"it lacks {PINS_FILE}"
        return StoredModel(folder=folder, source="", state=ModelState.INCOMPLETE, problem=problem)
    except CheckpointError as error:
        return StoredModel(folder=folder, source="", state=ModelState.DAMAGED, problem=str(error))
    state, problem = _metadata_state(folder / FILES_FOLDER, pins)
    return StoredModel(folder=folder, source=pins.source, state=state, problem=problem)


def _metadata_state(directory: Path, pins: Pins) -> tuple[ModelState, str]:
    """The state of a folder, and the problem."""
    states = {file.name: file_state(directory, file) for file in pins.files}
    if damaged := [name for name, state in states.items() if state is FileState.DAMAGED]:
        return ModelState.DAMAGED, f"not as fetched: {', '.join(damaged)}"
    missing = [name for name, state in states.items() if state is FileState.MISSING]
    if wanted := [name for name in missing if name not in TOKENIZER_FILES]:
        return ModelState.INCOMPLETE, f"it lacks {', '.join(wanted)}"
    try:
        headers_of(checkpoint_in(directory))
    except CheckpointError as error:
        return ModelState.DAMAGED, str(error)
    return ModelState.USABLE, ""


def write_pins(path: Path, pins: Pins) -> None:
    """Write the pins of a folder, unless they are there. Raises CacheFull and OSError."""
    text = json.dumps(asdict(pins))
    with full_disk_named(path.parent, path.name, len(text)):
        if not path.exists() or path.read_bytes() != text.encode("ascii"):
            replace_file(path, text)


def read_pins(path: Path) -> Pins:
    """Raises CheckpointError."""
    found = read_json_object(path, max_bytes=_MAX_PINS_BYTES)
    try:
        files = found["files"]
        assert isinstance(files, list)
        return Pins(
            source=str(found["source"]),
            files=tuple(PinnedFile(**file) for file in files),
            manifest_sha256=str(found["manifest_sha256"]),
            sampled_values=_number(found.get("sampled_values")),
        )
    except (KeyError, TypeError, AssertionError) as error:
        raise BadHeader(f"{path} is not a description of a model: {type(error).__name__}") from error


def _number(value: object) -> int | None:
    assert value is None or type(value) is int
    return value


def _sweep(directory: Path) -> None:
    """Remove what a kill has left of files that had no name yet; nothing else writes into a locked cache.

    Their names begin with a dot and end with random letters; a file with weights may begin with a dot, too.
    """
    places = [directory, *(directory / MODELS_FOLDER).iterdir()]
    places += [place / part for place in places[1:] for part in (FILES_FOLDER, HASHES_FOLDER)]
    for path in (path for place in places if place.is_dir() for path in place.glob(".*")):
        if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES):
            log.info("removed %s, which was not written to its end", path)
            path.unlink()


def _locked(directory: Path) -> int:
    """Lock the cache; the kernel unlocks it when the process ends, however it ends."""
    descriptor = os.open(directory / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise CacheInUse(
            f"the cache {directory} is in use by process {owner}: give each worker its own --name or "
            "--cache-dir"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor
