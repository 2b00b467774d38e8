"""Weights of remote models: opens them from the worker's cache, and fetches what a stage lacks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from checkpoint import Checkpoint
from checkpoint.grammar_tokenizer import TOKENIZER_FILE
from checkpoint.pins import Pins
from stage_worker.assignment import Assignment
from stage_worker.backends.backend import LoadProgress, OtherCheckpoint, StageLoadError
from weights.cache import TensorCache
from weights.cached_model import CachedModel
from weights.errors import SourceChanged
from weights.fetching import TensorFetcher
from weights.location import remote_model
from weights.metadata import fetch_file
from weights.progress import FetchProgress
from weights.remote import open_source

log = logging.getLogger(__name__)


class StageFiles:
    """The files that a stage is read from."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.fetched_bytes = 0
        """Bytes of weights that came over the network."""

    def prepare(self, tensors: Sequence[str]) -> None:
        """Make stored tensors readable. Raises StageLoadError and CheckpointError."""


class RemoteWeights:
    """The worker's cache, locked with the first remote model. Used by the compute thread only."""

    def __init__(self, directory: Path | None, *, limit_bytes: int | None = None) -> None:
        """`directory` is None if this worker has no place for a cache."""
        self._directory, self._limit_bytes = directory, limit_bytes
        self._cache: TensorCache | None = None

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()
        self._cache = None

    def open(self, assignment: Assignment, pins: Pins, progress: LoadProgress) -> StageFiles:
        """Open the assigned model. Raises StageLoadError, CheckpointError and OSError."""
        cache = self._opened()
        source = open_source(remote_model(pins.source))
        with closing(source), _change_is_final():
            cached = cache.model(source, pins)
            if assignment.role.has_head:
                fetch_file(source, pins, TOKENIZER_FILE, cached.directory)
        progress.fetch = FetchProgress()
        fetcher = TensorFetcher(
            cache,
            source,
            pins,
            sha256s=assignment.manifest,
            progress=progress.fetch,
            check=lambda: progress.advance(0),
        )
        return _RemoteFiles(Checkpoint.open(cached.directory, pins=pins), fetcher, cached)

    def _opened(self) -> TensorCache:
        if self._directory is None:
            raise StageLoadError(
                "this worker has no cache directory for a remote model: pass --cache-dir DIR"
            )
        if self._cache is None:
            self._cache = TensorCache(self._directory, limit_bytes=self._limit_bytes)
        return self._cache


class _RemoteFiles(StageFiles):
    def __init__(self, checkpoint: Checkpoint, fetcher: TensorFetcher, cached: CachedModel) -> None:
        super().__init__(checkpoint)
        self._fetcher, self._cached = fetcher, cached

    def prepare(self, tensors: Sequence[str]) -> None:
        with _change_is_final():
            self._fetcher.fetch(self._cached, tensors)
        self.fetched_bytes = self._fetcher.received_bytes
        log.info("weights are present: num_tensors=%d, fetched_bytes=%d", len(tensors), self.fetched_bytes)


@contextmanager
def _change_is_final() -> Iterator[None]:
    """A source that has changed stays so: the coordinator must not order another try."""
    try:
        yield
    except SourceChanged as error:
        raise OtherCheckpoint(str(error)) from error
