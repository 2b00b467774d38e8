"""Test bench for a single stage: one real worker between doubles."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoint import Checkpoint, DType
from coordinator.recovery.policy import DEFAULT_POLICY
from coordinator.scheduler.kv_manager import KvCacheManager
from coordinator.scheduler.policy import SchedulerLimits
from coordinator.scheduler.scheduler import Scheduler
from coordinator.scheduler.sequence import QueueOrder, Sequence
from kvcache import KvGroup
from stage_worker.assignment import Assignment
from stage_worker.backends.tensor_views import to_wire
from stage_worker.config import WorkerConfig
from stage_worker.server import Worker
from stageline_rpc.internal.v1 import forward_pb2, join_pb2
from stageline_rpc.v1 import cluster_pb2
from tests.integration.doubles import (
    CoordinatorDouble,
    NextStageDouble,
    PredecessorDouble,
    StreamEnded,
    WorkerLink,
)
from wire.channels import PROTOCOL_VERSION
from wire.ids import Incarnation, RequestId, SequenceKey, StageRole, new_incarnation, new_request_id
from wire.sampling import StepSampling
from wire.steps import Step, StepResult
from wire.tensors import DTYPE_TO_MESSAGE, HiddenStates, number_of

BLOCK_SIZE = 4
NUM_BLOCKS = 32
GREEDY = StepSampling(temperature=0.0)

_ROLE_MESSAGES = {
    StageRole.FIRST: cluster_pb2.STAGE_ROLE_FIRST,
    StageRole.MIDDLE: cluster_pb2.STAGE_ROLE_MIDDLE,
    StageRole.LAST: cluster_pb2.STAGE_ROLE_LAST,
    StageRole.ONLY: cluster_pb2.STAGE_ROLE_ONLY,
}


def new_assignment(
    directory: Path, *, stage: int, num_stages: int = 3, num_layers: int = 3, plan_id: int = 1
) -> Assignment:
    """Stage `stage` of an even cut."""
    per_stage = num_layers // num_stages
    return Assignment(
        plan_id=plan_id,
        stage=stage,
        num_stages=num_stages,
        role=StageRole.of_stage(stage, num_stages),
        layer_begin=stage * per_stage,
        layer_end=(stage + 1) * per_stage,
        model_directory=str(directory),
        fingerprint=Checkpoint.open(directory).fingerprint,
        dtype=DType.F32,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_step_tokens=32,
        max_step_sequences=8,
        max_sequence_tokens=64,
    )


def assign_message(assignment: Assignment) -> join_pb2.AssignStage:
    return join_pb2.AssignStage(
        plan_id=assignment.plan_id,
        stage=assignment.stage,
        num_stages=assignment.num_stages,
        role=_ROLE_MESSAGES[assignment.role],
        layer_begin=assignment.layer_begin,
        layer_end=assignment.layer_end,
        model=join_pb2.ModelRef(directory=assignment.model_directory, fingerprint=assignment.fingerprint),
        dtype=DTYPE_TO_MESSAGE[assignment.dtype],
        block_size=assignment.block_size,
        num_blocks=assignment.num_blocks,
        max_step_tokens=assignment.max_step_tokens,
        max_step_sequences=assignment.max_step_sequences,
        max_sequence_tokens=assignment.max_sequence_tokens,
    )


def worker_config(coordinator: str, *, name: str | None = None) -> WorkerConfig:
    return WorkerConfig(
        coordinator=coordinator,
        device="cpu",
        memory_bytes=1 << 30,
        name=name,
        listen=None,
        advertise=None,
        model_directory=None,
        num_threads=1,
    )


@asynccontextmanager
async def running_worker(config: WorkerConfig) -> AsyncIterator[Worker]:
    """Run a worker until the block ends."""
    worker = Worker(config)
    await worker.start()
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await worker.stop(), "the compute thread did not end"


class Log:
    """Builds valid steps, one epoch after another, as the coordinator does."""

    def __init__(self, assignment: Assignment, *, other_groups: tuple[KvGroup, ...] = ()) -> None:
        """`other_groups` are the block groups after the first."""
        self._assignment, self._other_groups = assignment, other_groups
        self.scheduler = Scheduler(DEFAULT_POLICY)

    def begin(self, epoch: int) -> None:
        if self.scheduler.kv is not None:
            self.scheduler.end_epoch()
        kv = KvCacheManager(
            num_blocks=self._assignment.num_blocks,
            block_size=self._assignment.block_size,
            other_groups=self._other_groups,
            num_states=self._assignment.num_states,
        )
        limits = SchedulerLimits(
            max_step_tokens=self._assignment.max_step_tokens,
            max_step_sequences=self._assignment.max_step_sequences,
            max_steps_in_flight=1,
        )
        self.scheduler.begin_epoch(epoch, kv, limits)

    def add(
        self,
        prompt: tuple[int, ...],
        *,
        sampling: StepSampling = GREEDY,
        max_tokens: int = 8,
        request_id: RequestId | None = None,
        is_scored: bool = False,
    ) -> Sequence:
        sequence = Sequence(
            SequenceKey(request_id or new_request_id(), 0),
            prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            stop_token_ids=frozenset(),
            order=QueueOrder(0.0, len(self.scheduler.queue) + len(self.scheduler.running)),
            wants_prompt_logprobs=is_scored,
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Step:
        step = self.scheduler.next_step(0.0)
        assert step is not None
        return step

    def complete(self, result: StepResult) -> None:
        self.scheduler.complete(result, 0.0)


def hop_hello(
    assignment: Assignment, epoch: int, *, coordinator: Incarnation, sender: Incarnation
) -> forward_pb2.HopHello:
    """Hello from the predecessor of the assigned stage."""
    return forward_pb2.HopHello(
        protocol_version=PROTOCOL_VERSION,
        coordinator_incarnation=coordinator,
        epoch=epoch,
        sender_stage=assignment.stage - 1,
        sender_incarnation=sender,
        fingerprint=assignment.fingerprint,
        dtype=DTYPE_TO_MESSAGE[assignment.dtype],
        layer_end=assignment.layer_begin,
        block_size=assignment.block_size,
        num_blocks=assignment.num_blocks,
        kv_dtype=number_of(assignment.kv_dtype),
        secret=hop_secret(epoch, assignment.stage),
    )


def hop_secret(epoch: int, stage: int) -> bytes:
    """Secret of the hop into `stage`."""
    return b"%016d%016d" % (epoch, stage)


def hidden_for(step: Step, hidden_size: int, *, seed: int = 0, dtype: DType = DType.F32) -> HiddenStates:
    """Random hidden states of the step's shape, reproducible per seed."""
    generator = torch.Generator().manual_seed(1000 * seed + step.step_id)
    return (to_wire(torch.randn((step.num_tokens, hidden_size), generator=generator), dtype),)


@dataclass
class StageBench:
    """A loaded worker with its predecessor, next stage and coordinator."""

    worker: Worker
    coordinator: CoordinatorDouble
    link: WorkerLink
    next_stage: NextStageDouble
    assignment: Assignment
    predecessor_incarnation: Incarnation
    epoch: int = 0

    async def begin_epoch(self) -> int:
        """Begin the next epoch and wait until the stage is ready."""
        self.epoch += 1
        self.link.send(begin_epoch=self.begin_message())
        ready = await self.link.answer("epoch_ready")
        assert ready.epoch == self.epoch
        return self.epoch

    def begin_message(self) -> join_pb2.BeginEpoch:
        stages = [
            join_pb2.StageEndpoint(worker=f"stage-{index}", incarnation=new_incarnation())
            for index in range(self.assignment.num_stages)
        ]
        stage = self.assignment.stage
        stages[stage].incarnation = self.link.hello.incarnation
        stages[stage].address = self.worker.advertised_address
        if stage > 0:
            stages[stage - 1].incarnation = self.predecessor_incarnation
        if stage + 1 < len(stages):
            stages[stage + 1].incarnation = self.next_stage.incarnation
            stages[stage + 1].address = self.next_stage.address
        return join_pb2.BeginEpoch(
            plan_id=self.assignment.plan_id,
            epoch=self.epoch,
            coordinator_incarnation=self.coordinator.incarnation,
            stages=stages,
            incoming_secret=hop_secret(self.epoch, stage),
            outgoing_secret=hop_secret(self.epoch, stage + 1),
        )

    def hello(self) -> forward_pb2.HopHello:
        """Hello of the current predecessor."""
        return hop_hello(
            self.assignment,
            self.epoch,
            coordinator=self.coordinator.incarnation,
            sender=self.predecessor_incarnation if self.assignment.stage else self.coordinator.incarnation,
        )

    async def predecessor(self) -> PredecessorDouble:
        """An accepted stream into the stage."""
        predecessor = PredecessorDouble(self.worker.advertised_address)
        try:
            await predecessor.hello(self.hello())
        except StreamEnded:
            await predecessor.close()
            raise
        return predecessor

    async def output(self) -> HiddenStates | StepResult:
        """Output for the oldest frame: hidden states, or the result on LAST."""
        if self.assignment.role.has_head:
            return await self.coordinator.result()
        return (await self.next_stage.frame()).hidden

    @property
    def has_output(self) -> bool:
        return not (self.coordinator.results.empty() and self.next_stage.frames.empty())


@asynccontextmanager
async def stage_bench(assignment: Assignment) -> AsyncIterator[StageBench]:
    """A worker that has loaded `assignment`; no epoch has begun."""
    coordinator, next_stage = CoordinatorDouble(), NextStageDouble()
    await coordinator.start()
    await next_stage.start()
    try:
        async with running_worker(worker_config(coordinator.address)) as worker:
            link = await coordinator.link()
            link.send(assign=assign_message(assignment))
            await link.answer("loaded")
            yield StageBench(worker, coordinator, link, next_stage, assignment, new_incarnation())
    finally:
        await next_stage.stop()
        await coordinator.stop()
