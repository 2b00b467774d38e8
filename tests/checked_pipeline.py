"""A pipeline of real stages in this thread with a reference of its checkpoint, for self-checks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoint import Blueprint, Checkpoint, DType
from coordinator.planner.plan import Plan, StagePlan, StepLimits
from coordinator.recovery.self_check_script import texts_for, write_script
from coordinator.recovery.self_check_verdict import KnownReference, Verdict, judge
from stage_worker.assignment import ReferenceRequest
from stage_worker.backends.backend import LoadProgress
from stage_worker.loading.reference import compute_reference
from stage_worker.model.decoder import DecoderStage
from tests.local_pipeline import LocalPipeline
from wire.ids import StageRole
from wire.reference import NUM_TOP, Reference

NUM_BLOCKS = 32


class CheckedPipeline:
    """Repeated self-checks of stages with `layers[i]` layers each."""

    def __init__(
        self,
        directory: Path,
        layers: Sequence[int],
        dtype: DType,
        *,
        block_size: int = 8,
        reference: Reference | None = None,
        **changes: Any,
    ) -> None:
        """`reference` is another checkpoint's or an earlier one; by default, the checkpoint's own.

        `changes` are options of `LocalPipeline`.
        """
        self.plan = plan_of(layers, dtype, block_size)
        self.pipeline = LocalPipeline(
            directory, layers, dtype=dtype, block_size=block_size, num_blocks=NUM_BLOCKS, **changes
        )
        self.texts = texts_for(self.plan, Checkpoint.open(directory).config.vocab_size)
        self.reference = reference or reference_of(directory, self.plan)
        self.epoch = 0
        self.answers: object = None
        """Results and hidden states of the last check."""

    def model(self, stage: int) -> DecoderStage:
        untyped: Any = self.pipeline.stages[stage]
        model = untyped._compute._model
        assert isinstance(model, DecoderStage)
        return model

    def run(self) -> Verdict:
        self.epoch += 1
        script = write_script(self.plan, self.epoch, self.texts, self.pipeline.new_log())
        results, states = self.pipeline.play(script)
        self.answers = ([result.results for result in results], states)
        known = KnownReference(self.reference, "the reference")
        return judge(script, self.plan, results, states, known)


def three_stages(config: Blueprint) -> tuple[int, ...]:
    """Layers of three stages for a model of `tests.families`: some layers must stay on one stage."""
    cuts = ((2, 4), (1, 3), (1, 4), (3, 4))
    first, second = next(pair for pair in cuts if config.legal_cuts.issuperset(pair))
    return first, second - first, config.num_layers - second


def reference_of(directory: Path, plan: Plan) -> Reference:
    """The reference of a checkpoint for a plan."""
    checkpoint = Checkpoint.open(directory)
    request = ReferenceRequest(
        directory="",
        fingerprint=checkpoint.fingerprint,
        dtype=plan.dtype,
        texts=texts_for(plan, checkpoint.config.vocab_size),
        num_top=NUM_TOP,
        wire_dtype=plan.dtype,
    )
    return compute_reference(request, directory, free_bytes=1 << 30, progress=LoadProgress())


def plan_of(layers: Sequence[int], dtype: DType, block_size: int) -> Plan:
    """A plan with stages w0, w1, ... of `layers[i]` layers each."""
    ends = list(itertools.accumulate(layers))
    stages = tuple(
        StagePlan(
            stage=stage,
            worker=f"w{stage}",
            role=StageRole.of_stage(stage, len(layers)),
            layer_begin=ends[stage] - layers[stage],
            layer_end=ends[stage],
            weight_bytes=0,
            kv_bytes=0,
            activation_bytes=0,
            memory_bytes=0,
            cost=0,
        )
        for stage in range(len(layers))
    )
    limits = StepLimits(max_step_tokens=64, max_step_sequences=16, max_sequence_tokens=128)
    return Plan(stages=stages, num_blocks=NUM_BLOCKS, block_size=block_size, dtype=dtype, limits=limits)
