"""A whole pipeline without a network: the real scheduler and real stages, frames through the real codec.

For the full matrices of models, cuts and prompts, where starting servers would cost more than computing.
"""

import itertools
from collections.abc import Sequence as Tokens
from pathlib import Path

import torch

from checkpoint import Checkpoint, DType
from coordinator.kv_log import KvLog
from coordinator.scheduler import Scheduler, SchedulerLimits
from coordinator.sequence import Sequence
from kvcache.pages import KvPages
from stage_worker.assignment import Assignment
from stage_worker.executor import StepExecutor
from stage_worker.models import TORCH_DTYPES, DecoderStage
from wire.frames import Frame, FrameAssembler, encode_frame
from wire.ids import SequenceKey, new_request_id
from wire.roles import StageRole
from wire.step_codec import encode_step
from wire.steps import Step, StepResult, StepSampling
from wire.tensors import TensorView

GREEDY = StepSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)


class LocalPipeline:
    """Stages that hold `layers[i]` layers each, one after another in this thread."""

    def __init__(
        self,
        directory: Path,
        layers: Tokens[int],
        *,
        dtype: DType = DType.F32,
        block_size: int = 16,
        num_blocks: int = 256,
        max_step_tokens: int = 64,
        max_step_sequences: int = 16,
        prefix_caching: bool = True,
    ) -> None:
        self._checkpoint = Checkpoint.open(directory)
        self._limits = SchedulerLimits(
            max_step_tokens=max_step_tokens,
            max_step_sequences=max_step_sequences,
            max_steps_in_flight=len(layers),
        )
        self._block_size, self._num_blocks, self._dtype = block_size, num_blocks, dtype
        ends = list(itertools.accumulate(layers))
        self.stages = [
            self._stage(stage, len(layers), end - size, end)
            for stage, (size, end) in enumerate(zip(layers, ends, strict=True))
        ]
        self._prefix_caching = prefix_caching
        self._epoch = 0

    def generate(
        self,
        prompts: Tokens[Tokens[int]],
        *,
        max_tokens: int,
        sampling: StepSampling = GREEDY,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> list[list[int]]:
        """The new tokens of each prompt; all prompts are there from the beginning, in a fresh epoch."""
        self._epoch += 1
        for stage, executor in enumerate(self.stages):
            executor.begin_epoch(self._epoch, stage=stage)
        scheduler = Scheduler()
        kv = KvLog(
            num_blocks=self._num_blocks, block_size=self._block_size, prefix_caching=self._prefix_caching
        )
        scheduler.begin_epoch(self._epoch, kv, self._limits)
        sequences = [
            Sequence(
                SequenceKey(new_request_id(), 0),
                tuple(prompt),
                max_tokens=max_tokens,
                sampling=sampling,
                stop_token_ids=stop_token_ids,
                arrival=arrival,
            )
            for arrival, prompt in enumerate(prompts)
        ]
        for sequence in sequences:
            scheduler.add(sequence)
        self._run(scheduler)
        kv.check_integrity([])
        for executor in self.stages:
            executor.check_integrity()
            assert executor.stats.blocks_active == 0
        return [list(sequence.generated_tokens) for sequence in sequences]

    def _run(self, scheduler: Scheduler) -> None:
        """As many steps in flight as there are stages, each computed as late as possible."""
        in_flight: list[Step] = []
        while True:
            while (step := scheduler.next_step()) is not None:
                in_flight.append(step)
            if not in_flight:
                return
            for progress in scheduler.complete(self._compute(in_flight.pop(0))):
                assert progress.error is None, progress.error

    def _compute(self, step: Step) -> StepResult:
        hidden: TensorView | None = None
        step_bytes = encode_step(step)
        for executor in self.stages:
            output = executor.run(_over_the_wire(step_bytes, step.step_id, hidden))
            if isinstance(output, StepResult):
                return output
            step_bytes, hidden = output.step_bytes, output.hidden
        raise AssertionError("no stage had the head")

    def _stage(self, stage: int, num_stages: int, begin: int, end: int) -> StepExecutor:
        config = self._checkpoint.config
        role = StageRole.of_stage(stage, num_stages)
        assignment = Assignment(
            plan_id=1,
            stage=stage,
            num_stages=num_stages,
            role=role,
            layer_begin=begin,
            layer_end=end,
            model_directory=str(self._checkpoint.directory),
            fingerprint=self._checkpoint.fingerprint,
            dtype=self._dtype,
            block_size=self._block_size,
            num_blocks=self._num_blocks,
            max_step_tokens=self._limits.max_step_tokens,
            max_step_sequences=self._limits.max_step_sequences,
            max_sequence_tokens=min(config.max_position_embeddings, self._num_blocks * self._block_size),
        )
        device = torch.device("cpu")
        model = DecoderStage(
            config,
            layer_begin=begin,
            layer_end=end,
            has_embeddings=role.has_embeddings,
            has_head=role.has_head,
            dtype=self._dtype,
            device=device,
        )
        model.load(self._checkpoint)
        pages = KvPages(
            num_layers=end - begin,
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=TORCH_DTYPES[self._dtype],
            device=device,
        )
        return StepExecutor(assignment, model, pages)


def _over_the_wire(step_bytes: bytes, step_id: int, hidden: TensorView | None) -> Frame:
    assembler = FrameAssembler(max_payload_bytes=1 << 30)
    frame = None
    for message in encode_frame(step_bytes, step_id, hidden):
        frame = assembler.add(message.chunk)
    assert frame is not None
    return frame
