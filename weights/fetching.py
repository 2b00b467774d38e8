"""Makes tensors of a remote checkpoint present and proven in a cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

from checkpoint.pins import Pins
from weights.cache import TensorCache
from weights.cached_model import CachedModel
from weights.errors import BadManifest, TensorDamaged
from weights.pieces import DEFAULT_TRANSFER, TensorPiece, TransferPolicy, ranges_of
from weights.progress import FetchProgress, progress_text
from weights.source import WeightSource
from weights.transfer import Transfer
from wire.sizes import format_size

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 10.0
NUM_HASHERS = 4
"""Threads that hash whole tensors; more would only wait for the disk."""
Sha256s = Mapping[str, bytes]
NO_MANIFEST: Sha256s = {}


class TensorFetcher:
    """Fetches tensors of one model. `check` is called several times a second; its exceptions end a fetch."""

    def __init__(
        self,
        cache: TensorCache,
        source: WeightSource,
        pins: Pins,
        *,
        sha256s: Sha256s = NO_MANIFEST,
        progress: FetchProgress,
        check: Callable[[], None],
        policy: TransferPolicy = DEFAULT_TRANSFER,
        keeps_served: bool = False,
    ) -> None:
        """`sha256s` come from the manifest, for all tensors to be fetched; without them none is proven.

        With `keeps_served` no tensor of the worker's last stage is evicted.
        """
        self._cache, self._source, self._pins = cache, source, pins
        self._sha256s = sha256s
        self._progress, self._check, self._policy = progress, check, policy
        self._keeps_served = keeps_served
        self._done_bytes = progress.snapshot().done_bytes
        self._logged_s = monotonic()
        self.received_bytes = 0
        """Bytes that came over the network, without config and headers."""

    def fetch(
        self, model: CachedModel, tensors: Iterable[str], *, keep: Collection[str] | None = None
    ) -> None:
        """Fetch what is missing of `tensors` or is not as it was written, and compare it with the manifest.

        `keep` are the tensors of the model that are not evicted, by default `tensors`.

        Raises:
            BadManifest: A tensor has no hash in it.
            TensorDamaged: A tensor differs from the manifest, however often it is fetched.
            CacheFull: There is no room; nothing was evicted or fetched.
            SourceError: See `Transfer.run`.
        """
        names = list(dict.fromkeys(tensors))
        if self._sha256s and (unknown := [name for name in names if name not in self._sha256s]):
            raise BadManifest(f"the manifest lacks {len(unknown)} tensors, such as {unknown[0]}")
        if damaged := model.damaged(names, lambda _: self._check()):
            log.warning("%s in %s: fetched again", _damaged(damaged, "the recorded hash"), model.directory)
            model.drop(damaged)
        num_bytes = sum(piece.missing_bytes for piece in model.missing(names))
        self._cache.make_room(num_bytes, model, keep or names, keeps_served=self._keeps_served)
        model.mark_used(names)
        wrong, num_damaged = names, 0
        while num_damaged < self._policy.max_damaged:
            self._transfer(model, model.missing(wrong))
            if not (wrong := self._unproven(model, wrong)):
                return
            log.warning("%s from %s: fetched again", _damaged(wrong, "the manifest"), self._pins.source)
            model.drop(wrong)
            if not self._source.blame({tensor: model.headers.tensors[tensor] for tensor in wrong}):
                num_damaged += 1
        raise TensorDamaged(
            f"{_damaged(wrong, 'the manifest')} after {self._policy.max_damaged} fetches from "
            f"{self._pins.source}: the source is damaged, or the manifest is of another version"
        )

    def _transfer(self, model: CachedModel, missing: list[TensorPiece]) -> None:
        if not missing:
            return
        ranges = ranges_of(missing, self._policy)
        num_bytes = sum(piece.missing_bytes for piece in missing)
        log.info(
            "fetching %s of weights from %s: num_ranges=%d, num_bytes=%d",
            *(format_size(num_bytes), self._pins.source, len(ranges), num_bytes),
        )
        self._progress.expect(num_bytes, now_s=monotonic())
        transfer = Transfer(self._source, self._pins, model, self._policy)
        try:
            transfer.run(ranges, lambda: self._look(transfer))
        finally:
            self._source.close()
            self._done_bytes += transfer.done_bytes
            self.received_bytes += transfer.received_bytes
            self._progress.update(self._done_bytes, now_s=monotonic())

    def _look(self, transfer: Transfer) -> None:
        now_s = monotonic()
        self._progress.update(self._done_bytes + transfer.done_bytes, now_s=now_s)
        if now_s - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now_s
            log.info("fetching weights: %s", progress_text(self._progress.snapshot()))
        self._check()

    def _unproven(self, model: CachedModel, tensors: list[str]) -> list[str]:
        """The tensors that differ from the manifest; none without one. Others are recorded as equal."""
        if not self._sha256s:
            return []
        new = [tensor for tensor in tensors if not model.is_verified(tensor)]
        wrong: list[str] = []
        with ThreadPoolExecutor(NUM_HASHERS, thread_name_prefix="weights-hash") as pool:
            for tensor, digest in zip(new, pool.map(model.sha256, new), strict=True):
                self._check()
                if digest == self._sha256s.get(tensor):
                    model.mark_verified(tensor)
                else:
                    wrong.append(tensor)
        return wrong


def _damaged(tensors: list[str], than: str) -> str:
    """Name the first tensors that differ from something."""
    shown = ", ".join(tensors[:3])
    if len(tensors) == 1:
        return f"tensor {shown} differs from {than}"
    more = "" if len(tensors) <= 3 else f" and {len(tensors) - 3} more"
    return f"tensors {shown}{more} differ from {than}"
