"""Has every byte of the stages' weights compared with the coordinator's checkpoint, while nothing runs."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from checkpoint import Checkpoint, CheckpointError, stage_tensor_names
from checkpoint.errors import FileChanged
from checkpoint.full_hash import Hashes, TensorHasher, hash_when_idle
from checkpoint.hash_cache import CACHE_FOLDER, HashCache
from coordinator.cluster.membership import WorkerIdentity
from coordinator.model import ServedModel
from coordinator.planning.plan import StagePlan
from stageline_rpc.v1 import cluster_pb2

log = logging.getLogger(__name__)

Send = Callable[[WorkerIdentity, cluster_pb2.CoordinatorMessage], None]


class WeightsCheck:
    """Hashes the checkpoint once, then asks the workers of each plan that serves. They hash their own files
    and report what differs; what is equal their heartbeats say.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        activity: Callable[[], object | None],
        send: Send,
        idle_s: float,
        cache_directory: Path | None,
    ) -> None:
        """`activity` is that of the cluster, see `hash_when_idle`. `cache_directory` is the user's."""
        self._model = model
        self._activity = activity
        self._send = send
        self._idle_s = idle_s
        self._cache = None if cache_directory is None else HashCache(cache_directory / CACHE_FOLDER)
        self._hashes: Hashes = {}
        self._plan_id = 0
        self._stages: tuple[tuple[WorkerIdentity, StagePlan], ...] = ()
        self._asked_plan_id = 0

    async def run(self) -> None:
        """Ends when all hashes are known, or the checkpoint cannot be hashed."""
        try:
            hasher = await asyncio.get_running_loop().run_in_executor(None, self._new_hasher)
            self._hashes = await hash_when_idle(hasher, self._activity, idle_s=self._idle_s)
        except CheckpointError as error:
            log.warning("weights are compared by samples only, the checkpoint cannot be hashed: %s", error)
            return
        log.info("hashed %d tensors of the checkpoint, read_bytes=%d", len(self._hashes), hasher.read_bytes)
        self._ask()

    def plan_serves(self, plan_id: int, stages: Iterable[tuple[WorkerIdentity, StagePlan]]) -> None:
        """In each of its epochs; the workers are asked once."""
        self._plan_id, self._stages = plan_id, tuple(stages)
        self._ask()

    def _new_hasher(self) -> TensorHasher:
        assert self._model.directory is not None, "a mock has no weights to compare"
        checkpoint = Checkpoint.open(self._model.directory)
        if checkpoint.fingerprint != self._model.fingerprint:
            raise FileChanged(f"{checkpoint.directory} has changed since the coordinator started")
        config = checkpoint.config
        names = stage_tensor_names(config, 0, config.num_layers, has_embeddings=True, has_head=True)
        return TensorHasher(checkpoint, names, cache=self._cache)

    def _ask(self) -> None:
        if not self._hashes or self._plan_id == self._asked_plan_id:
            return
        self._asked_plan_id = self._plan_id
        for worker, stage in self._stages:
            self._send(worker, self._encode(stage))

    def _encode(self, stage: StagePlan) -> cluster_pb2.CoordinatorMessage:
        names = stage_tensor_names(
            self._model.config,
            stage.layer_begin,
            stage.layer_end,
            has_embeddings=stage.role.has_embeddings,
            has_head=stage.role.has_head,
        )
        verify = cluster_pb2.VerifyWeights(
            plan_id=self._plan_id,
            idle_ms=round(self._idle_s * 1000),
            tensors=[cluster_pb2.TensorHash(name=name, xxh3_128=self._hashes[name]) for name in names],
        )
        return cluster_pb2.CoordinatorMessage(verify_weights=verify)
