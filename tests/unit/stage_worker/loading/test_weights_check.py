"""Weights that are compared with the coordinator's hashes while their file changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from checkpoint import Checkpoint
from checkpoint.hashes import TensorHasher
from stage_worker.loading.weights_check import LoadedFrom, Repair, WeightsVerifier
from stageline_rpc.internal.v1 import join_pb2
from stageline_rpc.v1 import cluster_pb2
from tests.checkpoints import flip_byte, make_checkpoint

TENSOR = "model.layers.0.mlp.gate_proj.weight"
DEADLINE_S = 60.0


async def unreachable(source: LoadedFrom, tensors: Sequence[str]) -> bool:
    raise AssertionError("weights of a directory are not fetched")


class Compared:
    """A stage with all tensors of a checkpoint, and the coordinator's hashes of them."""

    def __init__(self, directory: Path) -> None:
        self.checkpoint = Checkpoint.open(directory)
        names = tuple(self.checkpoint.tensors)
        self.source = LoadedFrom(
            checkpoint=self.checkpoint, files=self.checkpoint.file_identities(), tensors=names
        )
        hasher = TensorHasher(self.checkpoint, names)
        while not hasher.advance():
            pass
        self._hashes = hasher.hashes
        self.verifier = WeightsVerifier()
        self.verifier.begin_stage(self.source)

    async def verify(self, *, idle_ms: int) -> list[str]:
        """The reasons that are reported to the coordinator."""
        tensors = [join_pb2.TensorHash(name=name, xxh3_128=value) for name, value in self._hashes.items()]
        replies: list[join_pb2.JoinRequest] = []
        self.verifier.verify(
            join_pb2.VerifyWeights(plan_id=1, idle_ms=idle_ms, tensors=tensors),
            activity=lambda: 1,
            reply=replies.append,
            repair=Repair(unreachable, lambda: None),
        )
        assert self.verifier._task is not None
        async with asyncio.timeout(DEADLINE_S):
            await self.verifier._task
        return [reply.weights_differ.reason for reply in replies]


@pytest.fixture
def compared(tmp_path: Path) -> Compared:
    return Compared(make_checkpoint(tmp_path / "model", "llama", num_layers=1))


async def test_after_a_failed_check_a_file_that_changed_since_it_was_loaded_is_named(
    compared: Compared,
) -> None:
    entry = compared.checkpoint.tensors[TENSOR]
    file = compared.checkpoint.directory / entry.file
    flip_byte(file, entry.begin + 100)
    (reason,) = await compared.verify(idle_ms=0)
    assert reason.startswith(
        f"{file} has changed since its weights were loaded; {file}: tensor {TENSOR} has the XXH3-128 "
    )
    assert compared.verifier.problem(compared.source) == reason


async def test_a_file_that_changed_is_no_reason_to_exclude_a_worker_while_checks_pass(
    compared: Compared,
) -> None:
    entry = compared.checkpoint.tensors[TENSOR]
    flip_byte(compared.checkpoint.directory / entry.file, entry.begin + 100)
    assert await compared.verify(idle_ms=1) == []


async def test_a_file_that_was_written_with_the_same_weights_is_not_reported(compared: Compared) -> None:
    (compared.checkpoint.directory / compared.checkpoint.tensors[TENSOR].file).touch()
    assert await compared.verify(idle_ms=0) == []
    assert compared.verifier.level == cluster_pb2.WEIGHTS_CHECK_SAMPLED
