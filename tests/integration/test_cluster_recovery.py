"""Workers that stop, rejoin or return invalid results; isolated failures; repeated faults."""

import asyncio
import gc
import os
import re
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from coordinator.cluster.pipeline import PipelineLink
from stage_worker.epoch_session import EpochSession
from stage_worker.next_stage_stream import NextStageStream
from stageline.client.errors import ServerError
from stageline_rpc.internal.v1 import step_pb2
from stageline_rpc.v1 import cluster_pb2
from telemetry.settings import DISABLED
from tests.checkpoints import make_checkpoint
from tests.integration.alterations import cut, drop, flip_byte
from tests.integration.cluster import DEADLINE_S, Answer, Cluster, RequestCase
from tests.integration.request_cases import VOCAB_SIZE, SoloRuns, mixed_cases
from tests.integration.stream_proxy import Alteration
from wire.frames import Frame
from wire.ids import SequenceKey, new_request_id
from wire.steps import IDENTITY_BYTES, identity_of, key_of, pack_column, split_identities

LAYERS = (1, 1, 1)
NUM_STREAMS = 6
POISON = VOCAB_SIZE - 1
"""Token with a NaN embedding in `poisoned_llama`."""


@pytest.fixture(scope="module")
def solo(varied_llama: Path) -> SoloRuns:
    return SoloRuns(varied_llama)


@pytest.fixture(scope="module")
def poisoned_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_checkpoint(
        tmp_path_factory.mktemp("poisoned") / "model", "llama", num_layers=3, initializer_range=0.3
    )
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    # The model never generates the poisoned token by itself.
    tensors["lm_head.weight"][POISON] = 0.0
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


async def until_tokens(answers: list[Answer], count: int) -> None:
    """Wait until every request has `count` tokens."""
    async with asyncio.timeout(DEADLINE_S):
        while min(len(answer.tokens) for answer in answers) < count:
            await asyncio.sleep(0.002)


def places(status: cluster_pb2.GetStatusResponse) -> dict[int, str]:
    """Worker name per stage."""
    return {worker.stage: worker.name for worker in status.workers if worker.HasField("stage")}


@pytest.mark.matrix(1)
@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_streams_continue_when_a_worker_restarts(
    varied_llama: Path, solo: SoloRuns, stage: int
) -> None:
    async with Cluster(varied_llama, layers=LAYERS) as cluster:
        epoch, before = cluster.epoch, cluster.incarnations()
        async with cluster.generating(mixed_cases(NUM_STREAMS, max_tokens=24)) as answers:
            await until_tokens(answers, 3)
            await cluster.workers[f"w{stage}"].stop()
            await cluster.start_worker(f"w{stage}")
        solo.check(answers)
        after = cluster.incarnations()
        assert cluster.epoch > epoch
        assert {name for name in after if after[name] != before[name]} == {f"w{stage}"}
        await cluster.wait_drained()


@pytest.mark.matrix(1)
@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_a_spare_replaces_a_lost_worker(varied_llama: Path, solo: SoloRuns, stage: int) -> None:
    async with Cluster(varied_llama, layers=LAYERS, num_workers=4) as cluster:
        before = places(await cluster.wait_status(lambda status: len(status.workers) == 4))
        (spare,) = set(cluster.workers) - set(before.values())
        async with cluster.generating(mixed_cases(NUM_STREAMS, max_tokens=24)) as answers:
            await until_tokens(answers, 3)
            await cluster.workers[before[stage]].stop()
        solo.check(answers)
        assert places(await cluster.wait_drained()) == before | {stage: spare}


@pytest.mark.full
async def test_streams_continue_when_all_workers_restart(varied_llama: Path, solo: SoloRuns) -> None:
    async with Cluster(varied_llama, layers=LAYERS) as cluster:
        async with cluster.generating(mixed_cases(NUM_STREAMS, max_tokens=24)) as answers:
            await until_tokens(answers, 3)
            for name in ("w2", "w0", "w1"):
                await cluster.workers[name].stop()
            for name in ("w1", "w0", "w2"):
                await cluster.start_worker(name)
        solo.check(answers)
        await cluster.wait_drained()


def result_of_another_step(result: step_pb2.StepResult) -> None:
    result.step_id += 1


def result_of_another_epoch(result: step_pb2.StepResult) -> None:
    result.epoch += 1


def result_of_another_sequence(result: step_pb2.StepResult) -> None:
    _change_identity(result, sequence=SequenceKey(new_request_id(), 0))


def result_of_another_restart_count(result: step_pb2.StepResult) -> None:
    _change_identity(result, restart_count=99)


def _change_identity(
    result: step_pb2.StepResult, *, sequence: SequenceKey | None = None, restart_count: int | None = None
) -> None:
    """Change the identity of the first row."""
    first, *others = split_identities(result.identities)
    key, count = key_of(first)
    changed = identity_of(sequence or key, count if restart_count is None else restart_count)
    result.identities = b"".join((changed, *others))


def one_result_too_few(result: step_pb2.StepResult) -> None:
    result.identities, result.tokens = result.identities[:-IDENTITY_BYTES], result.tokens[:-4]
    del result.details[:]


def no_outcome(result: step_pb2.StepResult) -> None:
    del result.details[:]
    result.details.add(row=0)


def token_outside_the_vocabulary(result: step_pb2.StepResult) -> None:
    result.tokens = pack_column([4_000_000]) + result.tokens[4:]


@pytest.mark.matrix(0, full=2)
@pytest.mark.parametrize(
    "alter",
    [
        result_of_another_step,
        result_of_another_epoch,
        result_of_another_sequence,
        result_of_another_restart_count,
        one_result_too_few,
        no_outcome,
        token_outside_the_vocabulary,
    ],
)
async def test_an_invalid_result_begins_a_new_epoch_and_fails_no_request(
    varied_llama: Path, solo: SoloRuns, alter: Callable[[step_pb2.StepResult], None]
) -> None:
    async with Cluster(varied_llama, layers=LAYERS, is_coordinator_proxied=True) as cluster:
        proxy, epoch = cluster.coordinator_proxy, cluster.epoch
        assert proxy is not None
        async with cluster.generating(mixed_cases(NUM_STREAMS)) as answers:
            await until_tokens(answers, 3)
            proxy.alter_result = alter
        assert proxy.num_altered == 1
        solo.check(answers)
        assert cluster.epoch == epoch + 1
        await cluster.wait_drained()


@pytest.mark.full
async def test_a_slice_error_fails_its_request_alone(poisoned_llama: Path) -> None:
    healthy = SoloRuns(poisoned_llama)
    async with Cluster(poisoned_llama, layers=LAYERS) as cluster:
        epoch = cluster.epoch
        poisoned = [
            RequestCase(prompt=(POISON,), max_tokens=8),
            RequestCase(prompt=(*range(1, 40), POISON), max_tokens=8, seed=3),
            RequestCase(prompt=(1, POISON, 3), max_tokens=8),
        ]
        fine = mixed_cases(NUM_STREAMS, tokens_below=POISON)
        assert not any(POISON in (*case.prompt, *healthy.tokens(case)) for case in fine)
        answers = await cluster.generate_all([*fine[:3], *poisoned, *fine[3:]])
        failed = [answer for answer in answers if answer.case in poisoned]
        for answer in failed:
            assert isinstance(answer.error, ServerError)
            assert answer.error.code == "INTERNAL"
            assert re.match(r"stage 2, step \d+: logits", answer.error.message)
            assert not answer.tokens
        healthy.check([answer for answer in answers if answer not in failed])
        assert cluster.epoch == epoch
        # Its blocks are never shared: the same prompt fails again, and its clean prefix serves others.
        beginning = RequestCase(prompt=tuple(range(1, 40)), max_tokens=8)
        again, shared = await cluster.generate_all([poisoned[1].again(), beginning])
        assert again.error is not None and again.error.code == "INTERNAL"
        healthy.check([shared])
        await cluster.wait_drained()


def every(number: int) -> Callable[[Frame], bool]:
    """True for every `number`-th frame with slices."""
    seen = 0

    def is_due(frame: Frame) -> bool:
        nonlocal seen
        seen += bool(frame.step.slices)
        return bool(frame.step.slices) and seen % number == 0

    return is_due


@pytest.mark.full
@pytest.mark.parametrize("alter", [cut, flip_byte], ids=["cut", "flipped-byte"])
async def test_requests_finish_despite_repeated_faults(
    varied_llama: Path, solo: SoloRuns, alter: Alteration
) -> None:
    async with Cluster(varied_llama, layers=LAYERS, hop_proxies=[1]) as cluster:
        epoch = cluster.epoch
        injection = cluster.proxy(1).inject(alter, when=every(5), times=8)
        answers = await cluster.generate_all(mixed_cases(NUM_STREAMS))
        failed = [answer for answer in answers if not answer.succeeded]
        assert all(answer.error is not None and answer.error.code == "ABORTED" for answer in failed)
        solo.check([answer for answer in answers if answer.succeeded])
        if alter is cut:
            assert not failed
            assert len(injection.steps) == 8
        assert cluster.epoch == epoch + len(injection.steps)
        cluster.proxy(1).injection = None
        solo.check(await cluster.generate_all(mixed_cases(2, seed=1)))
        await cluster.wait_drained()


@dataclass(frozen=True)
class Footprint:
    """Resources of this process; `num_epoch_objects` exist for one epoch."""

    num_tasks: int
    num_files: int
    num_epoch_objects: int

    @classmethod
    def of_this_process(cls) -> "Footprint":
        gc.collect()
        kinds = (EpochSession, NextStageStream, PipelineLink)
        return cls(
            num_tasks=len(asyncio.all_tasks()),
            num_files=len(os.listdir("/proc/self/fd")),
            num_epoch_objects=sum(type(obj) in kinds for obj in gc.get_objects()),
        )

    def is_within(self, other: "Footprint") -> bool:
        mine, limits = astuple(self), astuple(other)
        return all(count <= limit for count, limit in zip(mine, limits, strict=True))


@pytest.mark.full
async def test_many_epochs_leak_no_tasks_files_or_objects(varied_llama: Path) -> None:
    # Exporters connect at their first export.
    async with Cluster(varied_llama, layers=LAYERS, hop_proxies=[1], telemetry=DISABLED) as cluster:

        async def one_fault(alter: Alteration) -> None:
            epoch = cluster.epoch
            cluster.proxy(1).inject(alter, when=every(3))
            await cluster.generate_all(mixed_cases(3, max_tokens=8))
            await cluster.wait_status(
                lambda status: status.epoch > epoch and status.state == cluster_pb2.CLUSTER_STATE_SERVING
            )
            await cluster.wait_drained()

        for alter in (flip_byte, drop):
            await one_fault(alter)
        before = Footprint.of_this_process()
        for number in range(20):
            await one_fault(flip_byte if number % 2 else drop)
        async with asyncio.timeout(DEADLINE_S):
            # Connections are torn down by gRPC's own threads, a moment later.
            while not Footprint.of_this_process().is_within(before):
                await asyncio.sleep(0.05)
