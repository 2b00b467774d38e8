"""Weights of remote models: opens them from the worker's cache, and fetches what a stage lacks."""

from __future__ import annotations

import logging
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from checkpoint import Checkpoint, stage_tensor_names
from checkpoint.gguf.files import checkpoint_in
from checkpoint.pins import Pins
from stage_worker.assignment import Prefetch, WantedModel
from stage_worker.backends.backend import LoadProgress, OtherCheckpoint, StageLoadError
from weights.cache import TensorCache
from weights.cached_model import CachedModel
from weights.errors import CacheFull, SourceChanged, SourceError
from weights.fetching import TensorFetcher
from weights.location import remote_model
from weights.metadata import fetch_vocabulary
from weights.peers import CoordinatorSource, PeerAddress, PeerConnections, SharedSource
from weights.pieces import DEFAULT_TRANSFER
from weights.progress import FetchProgress
from weights.remote import open_source
from weights.serving import CachedFiles, DirectoryFiles, HeldRegistry
from weights.source import WeightSource
from wire.sizes import format_size

log = logging.getLogger(__name__)

PREFETCH_TRANSFER = replace(DEFAULT_TRANSFER, num_connections=2)
"""Fewer connections than of a load, which others may have at the same time."""


class StageFiles:
    """The files that a stage is read from."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.fetched_bytes = 0
        """Bytes of weights that came over the network."""

    def prepare(self, tensors: Sequence[str]) -> None:
        """Make stored tensors readable. Raises StageLoadError and CheckpointError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """What a worker serves to others, and how it reaches them.

    `context` returns TLS with this worker's certificate, or None in plain text.
    """

    registry: HeldRegistry = field(default_factory=HeldRegistry)
    context: Callable[[], ssl.SSLContext | None] = lambda: None
    serves_directory: bool = False


class RemoteWeights:
    """The worker's cache, locked with the first remote model. One load or prefetch uses it at a time."""

    def __init__(
        self, directory: Path | None, *, limit_bytes: int | None = None, sharing: Sharing | None = None
    ) -> None:
        """`directory` is None if this worker has no place for a cache."""
        self._directory, self._limit_bytes = directory, limit_bytes
        self._sharing = sharing or Sharing()
        self._registry = self._sharing.registry
        self._cache: TensorCache | None = None
        self._refetched: dict[str, Counter[str]] = {}
        """By model: tensors that had wrong bytes, and how often."""
        self._lock = threading.Lock()

    def close(self) -> None:
        """Wait for a prefetch, which must have been cancelled, and close the cache."""
        with self._lock:
            self._registry.clear()
            if self._cache is not None:
                self._cache.close()
            self._cache = None

    def share_directory(self, checkpoint: Checkpoint) -> None:
        """Serve a checkpoint's directory or GGUF file to others, if this worker does. Raises OSError."""
        if self._sharing.serves_directory:
            held = DirectoryFiles(checkpoint.directory, checkpoint.tensors, checkpoint.fingerprint)
            self._registry.put(held)

    def open(self, model: WantedModel, progress: LoadProgress, *, has_head: bool) -> StageFiles:
        """Open the assigned model. Raises StageLoadError, CheckpointError and OSError."""
        with self._lock:
            return self._open(model, progress, has_head=has_head)

    def prefetch(self, order: Prefetch, model: WantedModel, progress: LoadProgress) -> None:
        """Fetch layers of `model` that a later assignment may want, within the room of the cache.

        Raises StageLoadError, also when it is cancelled, CheckpointError and OSError.
        """
        with self._lock:
            files = self._open(model, progress, has_head=order.has_head)
            config = files.checkpoint.config
            wanted = [
                stage_tensor_names(
                    *(config, part.layer_begin, part.layer_end),
                    has_embeddings=part.has_embeddings,
                    has_head=part.has_head,
                )
                for part in order.layers
            ]
            num_done = files.prefetch(wanted)
        text = f"holds the layers of {num_done} of {len(wanted)} possible re-plans"
        progress.fetch_detail = "; ".join(filter(None, (text, progress.fetch_detail)))
        log.info("prefetched: %s", progress.fetch_detail)

    def refetch(self, pins: Pins, tensors: Collection[str]) -> bool:
        """Drop tensors whose bytes are wrong; the next load fetches them from their origin, no other worker.

        Returns False if that has not helped DEFAULT_TRANSFER.max_damaged times.
        """
        with self._lock:
            cached = None if self._cache is None else self._cache.opened(pins)
            counts = self._refetched.setdefault(pins.key, Counter())
            if cached is None or max(counts[name] for name in tensors) >= DEFAULT_TRANSFER.max_damaged:
                return False
            counts.update(tensors)
            num_bytes = cached.drop(tensors)
        log.warning(
            "dropped %d tensors with wrong bytes from the cache, the first is %s: they are fetched again "
            "from their origin, num_bytes=%d",
            *(len(tensors), next(iter(tensors)), num_bytes),
        )
        return True

    def _open(self, model: WantedModel, progress: LoadProgress, *, has_head: bool) -> _RemoteFiles:
        cache, pins = self._opened(), model.pins
        connections = PeerConnections(model.fingerprint, self._sharing.context())
        origin = _origin(model, connections)

        def check() -> None:
            progress.advance(0)

        progress.sources = (origin,)
        with closing(origin), _change_is_final():
            cached = cache.model(origin, pins, check=check)
            if has_head:
                fetch_vocabulary(origin, pins, cached.directory, check=check)
        checkpoint = Checkpoint.open(checkpoint_in(cached.directory), pins=pins)
        if checkpoint.fingerprint == model.fingerprint:
            held = CachedFiles(cached, model.fingerprint, has_manifest=bool(pins.manifest_sha256))
            self._registry.put(held)
        sources = _Sources(
            origin=origin,
            shared=_source(model, origin, connections, cached),
            from_origin=frozenset(self._refetched.get(pins.key, ())),
        )
        progress.sources = (sources.origin, sources.shared)
        return _RemoteFiles(checkpoint, model, sources, cache, cached, progress, self._lock)

    def _opened(self) -> TensorCache:
        if self._directory is None:
            raise StageLoadError(
                "this worker has no cache directory for a remote model: pass --cache-dir DIR"
            )
        if self._cache is None:
            self._cache = TensorCache(self._directory, limit_bytes=self._limit_bytes)
        return self._cache


def _origin(model: WantedModel, connections: PeerConnections) -> WeightSource:
    """The source itself, or the coordinator's directory."""
    if model.pins.is_of_coordinator:
        return CoordinatorSource(model.sources.coordinator, model.pins.source, connections)
    return open_source(remote_model(model.pins.source))


def _source(
    model: WantedModel, origin: WeightSource, connections: PeerConnections, cached: CachedModel
) -> WeightSource:
    """The origin, after others that have the bytes."""
    sources = model.sources
    if not sources.peers and not sources.trackers:
        return origin

    def find_peers() -> list[PeerAddress]:
        return [*sources.peers, *_tracked(sources.trackers, connections)]

    return SharedSource(origin, find_peers, connections, cached.unit_at)


def _tracked(trackers: Sequence[str], connections: PeerConnections) -> Iterator[PeerAddress]:
    """Workers of other coordinators; one that does not answer has none."""
    for address in trackers:
        try:
            yield from connections.ask_tracker(address)
        except SourceError as error:
            log.warning("no workers of the coordinator with weights at %s are asked: %s", address, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sources:
    """The origin of a model, others that are asked before it, and tensors that others sent wrong bytes of."""

    origin: WeightSource
    shared: WeightSource
    from_origin: frozenset[str]


class _RemoteFiles(StageFiles):
    def __init__(
        self,
        checkpoint: Checkpoint,
        model: WantedModel,
        sources: _Sources,
        cache: TensorCache,
        cached: CachedModel,
        progress: LoadProgress,
        lock: threading.Lock,
    ) -> None:
        super().__init__(checkpoint)
        self._model, self._sources, self._cache, self._cached = model, sources, cache, cached
        self._progress, self._lock = progress, lock
        progress.fetch = FetchProgress()

    def prepare(self, tensors: Sequence[str]) -> None:
        with self._lock, _change_is_final():
            self._fetch(tensors, keep=tensors)
            self._cache.record_served(self._model.pins, tensors)
        log.info("weights are present: num_tensors=%d, fetched_bytes=%d", len(tensors), self.fetched_bytes)

    def prefetch(self, wanted: Sequence[Sequence[str]]) -> int:
        """Fetch sets of tensors while there is room; return the number of sets that are present.

        The caller has the lock.
        """
        keep = {tensor for tensors in wanted for tensor in tensors}
        for number, tensors in enumerate(wanted):
            try:
                self._fetch(tensors, keep=keep, is_prefetch=True)
            except CacheFull as error:
                log.info("layers of %d possible re-plans are not prefetched: %s", len(wanted) - number, error)
                return number
        return len(wanted)

    def _fetch(self, tensors: Sequence[str], *, keep: Collection[str], is_prefetch: bool = False) -> None:
        """Fetch tensors; those that others sent wrong bytes of come from the origin."""
        distrusted = [tensor for tensor in tensors if tensor in self._sources.from_origin]
        for source, names in ((self._sources.origin, distrusted), (self._sources.shared, tensors)):
            if names:
                fetcher = self._fetcher(source, is_prefetch=is_prefetch)
                try:
                    fetcher.fetch(self._cached, names, keep=keep)
                finally:
                    self.fetched_bytes += fetcher.received_bytes
                    self._progress.fetch_detail = _detail(self.fetched_bytes, self._sources.shared)

    def _fetcher(self, source: WeightSource, *, is_prefetch: bool) -> TensorFetcher:
        progress = self._progress
        assert progress.fetch is not None
        return TensorFetcher(
            self._cache,
            source,
            self._model.pins,
            sha256s=self._model.manifest,
            progress=progress.fetch,
            check=lambda: progress.advance(0),
            policy=PREFETCH_TRANSFER if is_prefetch else DEFAULT_TRANSFER,
            keeps_served=is_prefetch,
        )


def _detail(received_bytes: int, source: WeightSource) -> str:
    """For example "fetched 1.2 GiB, 95% of it from other workers; not from gpu-a: ..."; empty for nothing."""
    if not received_bytes:
        return ""
    text = f"fetched {format_size(received_bytes)}"
    if isinstance(source, SharedSource):
        text += f", {source.peer_bytes / received_bytes:.0%} of it from other workers"
        text = "; ".join((text, *(f"not from {left}" for left in source.left)))
    return text


@contextmanager
def _change_is_final() -> Iterator[None]:
    """A source that has changed stays so: the coordinator must not order another try."""
    try:
        yield
    except SourceChanged as error:
        raise OtherCheckpoint(str(error)) from error
