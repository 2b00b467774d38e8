"""Compares all bytes of weights with the coordinator's hashes, while no step runs or at once."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoint import Checkpoint, CheckpointError
from checkpoint.errors import FileChanged
from checkpoint.files import FileIdentity, stat_files
from checkpoint.hashes import HashCache, Hashes, TensorHasher, Urgency, hash_when_idle
from stageline_rpc.internal.v1 import join_pb2
from stageline_rpc.v1 import cluster_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedFrom:
    """Origin of a stage's weights: `tensors` of a checkpoint, and identities of its `files`."""

    checkpoint: Checkpoint
    files: tuple[FileIdentity, ...]
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Repair:
    """How wrong weights of a cache are replaced.

    `refetch` drops tensors from the cache; False if it cannot. `rejoin` joins the coordinator again, which
    excludes this worker until then.
    """

    refetch: Callable[[LoadedFrom, Sequence[str]], Awaitable[bool]]
    rejoin: Callable[[], None]


class WeightsVerifier:
    """Verification level of the loaded weights, which a background task compares.

    Files that differ are remembered while unchanged, so that rejoining does not serve them again. Tensors of
    a cache are fetched again instead, and the worker rejoins.
    """

    def __init__(self, cache: HashCache | None = None) -> None:
        self._cache = cache
        self._source: LoadedFrom | None = None
        self._level = cluster_pb2.WEIGHTS_CHECK_UNSPECIFIED
        self._task: asyncio.Task[None] | None = None
        self._checkpoint_task: asyncio.Task[None] | None = None
        self._problems: dict[tuple[FileIdentity, ...], dict[str, str]] = {}
        self._finding: _Finding | None = None
        self.must_reload = False
        """The loaded weights are wrong and came from a cache: no part in memory may be used again."""

    @property
    def level(self) -> cluster_pb2.WeightsCheck.ValueType:
        """Unspecified without a stage, and for a mock."""
        return self._level

    def problem(self, source: LoadedFrom | None) -> str:
        """Return the known reason why a stage from `source` must not serve; empty without one."""
        if source is None:
            return ""
        known = self._problems.get(source.files, {})
        return next((known[name] for name in source.tensors if name in known), "")

    def begin_stage(self, source: LoadedFrom | None) -> None:
        """Reset to the level of a newly loaded stage (its fingerprint matches), or of none."""
        self.cancel()
        self._source = source
        self._level = _level_when_loaded(source)
        self.must_reload = self.must_reload and source is None
        if source is not None and source.files not in self._problems:
            self._finding = None

    def verify(
        self,
        order: join_pb2.VerifyWeights,
        *,
        activity: Callable[[], object | None],
        reply: Callable[[join_pb2.JoinRequest], None],
        repair: Repair,
    ) -> None:
        """Start to compare the stage's weights; if they differ, `reply` is called, then `repair`."""
        self.cancel()
        if self._source is not None:
            check = self._check_stage(self._source, order, activity, reply, repair)
            self._task = asyncio.create_task(check, name="weights-check")

    def verify_checkpoint(
        self,
        order: join_pb2.VerifyWeights,
        directory: Path,
        *,
        reply: Callable[[join_pb2.JoinRequest], None],
    ) -> None:
        """Start to compare the whole checkpoint, not only the loaded stage; call `reply` if it differs."""
        if self._checkpoint_task is not None:
            self._checkpoint_task.cancel()
        check = self._check_checkpoint(directory, order, reply)
        self._checkpoint_task = asyncio.create_task(check, name="checkpoint-check")

    async def finding(self, *, fingerprint: str) -> join_pb2.JoinRequest | None:
        """The report of differing weights for a new connection; None for none, or another checkpoint."""
        finding = self._finding
        if finding is None or finding.source.checkpoint.fingerprint != fingerprint:
            return None
        return finding.message if await asyncio.to_thread(finding.is_current) else None

    def cancel(self) -> None:
        """Cancel the comparison of the stage's weights."""
        if self._task is not None:
            self._task.cancel()
        self._task = None

    def close(self) -> None:
        """Cancel every comparison."""
        self.cancel()
        if self._checkpoint_task is not None:
            self._checkpoint_task.cancel()

    async def _check_stage(
        self,
        source: LoadedFrom,
        order: join_pb2.VerifyWeights,
        activity: Callable[[], object | None],
        reply: Callable[[join_pb2.JoinRequest], None],
        repair: Repair,
    ) -> None:
        if await self._check(source, order, activity, reply, repair):
            self._level = cluster_pb2.WEIGHTS_CHECK_FULL

    async def _check_checkpoint(
        self,
        directory: Path,
        order: join_pb2.VerifyWeights,
        reply: Callable[[join_pb2.JoinRequest], None],
    ) -> None:
        try:
            source = await asyncio.to_thread(_whole_checkpoint, directory, order)
        except CheckpointError as error:
            log.warning("the checkpoint cannot be compared: %s", error)
            return
        await self._check(source, order, lambda: None, reply)

    async def _check(
        self,
        source: LoadedFrom,
        order: join_pb2.VerifyWeights,
        activity: Callable[[], object | None],
        reply: Callable[[join_pb2.JoinRequest], None],
        repair: Repair | None = None,
    ) -> bool:
        """Return whether all weights are equal. An order without idle time does not wait for `activity`."""
        try:
            problems = await self._compare(
                source, order, activity if order.idle_ms else lambda: Urgency.AT_ONCE
            )
        except CheckpointError as error:
            log.warning("weights stay compared by samples only, their files cannot be hashed: %s", error)
            return False
        if not problems:
            return True
        reason = next(iter(problems.values()))
        log.error("%s", reason)
        differ = join_pb2.JoinRequest(
            weights_differ=join_pb2.WeightsDiffer(plan_id=order.plan_id, reason=reason)
        )
        if repair is not None and source.checkpoint.pins is not None:
            self.must_reload = True
            if await repair.refetch(source, list(problems)):
                reply(differ)
                repair.rejoin()
                return False
        self._problems[source.files] = self._problems.get(source.files, {}) | problems
        self._finding = _Finding(source, differ)
        reply(differ)
        return False

    async def _compare(
        self, source: LoadedFrom, order: join_pb2.VerifyWeights, seen: Callable[[], object | None]
    ) -> dict[str, str]:
        """Describe differing tensors by name.

        After a failed self-check (an order without idle time), a file that has changed since it was loaded is
        compared too: the next load would read it.
        """
        expected = {tensor.name: tensor.xxh3_128 for tensor in order.tensors}
        hasher = self._hasher(source)
        try:
            hashes = await hash_when_idle(hasher, seen, idle_s=order.idle_ms / 1000)
        except FileChanged as error:
            if order.idle_ms:
                raise
            hasher = TensorHasher(source.checkpoint, source.tensors)
            hashes = await hash_when_idle(hasher, seen, idle_s=0.0)
            if not (problems := _differences(source, expected, hashes)):
                raise
            return {name: f"{error}; {problem}" for name, problem in problems.items()}
        if not (problems := _differences(source, expected, hashes)):
            log.info("weights are equal: %d tensors, read_bytes=%d", len(hashes), hasher.read_bytes)
        return problems

    def _hasher(self, source: LoadedFrom) -> TensorHasher:
        """Files of a cache change with each fetched tensor: their pins identify them, and no hash is kept."""
        if source.checkpoint.pins is not None:
            return TensorHasher(source.checkpoint, source.tensors)
        return TensorHasher(source.checkpoint, source.tensors, files=source.files, cache=self._cache)


def _level_when_loaded(source: LoadedFrom | None) -> cluster_pb2.WeightsCheck.ValueType:
    if source is None:
        return cluster_pb2.WEIGHTS_CHECK_UNSPECIFIED
    if (pins := source.checkpoint.pins) is None:
        return cluster_pb2.WEIGHTS_CHECK_SAMPLED
    is_proven = bool(pins.manifest_sha256)
    return cluster_pb2.WEIGHTS_CHECK_FULL if is_proven else cluster_pb2.WEIGHTS_CHECK_NOT_VERIFIED


@dataclass(frozen=True, slots=True)
class _Finding:
    """Files of a stage that differ, with the report."""

    source: LoadedFrom
    message: join_pb2.JoinRequest

    def is_current(self) -> bool:
        """Whether the files are unchanged since the comparison."""
        names, checkpoint = [file.name for file in self.source.files], self.source.checkpoint
        if checkpoint.pins is not None:
            return checkpoint.pins.identities(names) == self.source.files
        return stat_files(checkpoint.directory, names) == self.source.files


def _whole_checkpoint(directory: Path, order: join_pb2.VerifyWeights) -> LoadedFrom:
    checkpoint = Checkpoint.open(directory)
    tensors = tuple(tensor.name for tensor in order.tensors if tensor.name in checkpoint.tensors)
    return LoadedFrom(checkpoint=checkpoint, files=checkpoint.file_identities(), tensors=tensors)


def _differences(source: LoadedFrom, expected: Hashes, hashes: Hashes) -> dict[str, str]:
    """Describe differing tensors by name, in the order of the stage's tensors."""
    differing = [name for name in source.tensors if hashes[name] != expected.get(name)]
    count = f"{len(differing)} of {len(source.tensors)} tensors differ"
    return {
        name: f"{_path(source, name)}: tensor {name} has the XXH3-128 {hashes[name].hex()}, "
        f"the coordinator's {expected.get(name, b'').hex() or 'none'}; {count}"
        for name in differing
    }


def _path(source: LoadedFrom, name: str) -> str:
    return str(source.checkpoint.directory / source.checkpoint.tensors[name].file)
