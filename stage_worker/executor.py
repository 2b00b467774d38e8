"""The routine that runs every step on every stage, whatever its role.

take the frame -> apply ends, starts, signals -> compare digests -> check the slices
  -> [embed | take the hidden states] -> layers -> [hand the hidden states on | logits and sampling]
"""

import itertools
import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache import BlockTables, KvCacheError
from kvcache.pages import KvPages
from stage_worker.assignment import Assignment
from stage_worker.models import DecoderStage, SliceLayout, StepLayout
from stage_worker.outputs import HandedOn, StageOutput
from stage_worker.sampling import Sampler
from stage_worker.sampling.grammar_masks import GrammarMasks
from stage_worker.sequences import SequenceStates
from stage_worker.step_checks import StepRules, check_hidden_states, check_limits, slice_layouts
from stage_worker.tensor_views import from_view, to_view
from wire.errors import StepFault, StepFaultKind
from wire.frames import Frame
from wire.ids import SequenceKey
from wire.steps import SliceResult, Step, StepResult

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorStats:
    """What a heartbeat tells of a stage, as of the last step."""

    num_steps: int = 0
    busy_s: float = 0.0
    blocks_active: int = 0
    blocks_inactive: int = 0
    blocks_free: int = 0
    blocks_wanted: int = 0
    blocks_hit: int = 0


class StepExecutor:
    """Owns model, pages, block tables and sequence states of one stage; used from the compute thread only.

    `stats` and `max_hidden_bytes` may be read from anywhere.
    """

    def __init__(
        self,
        assignment: Assignment,
        model: DecoderStage,
        pages: KvPages,
        grammars: GrammarMasks | None = None,
    ) -> None:
        """`pages` has `assignment.num_blocks` pages for the layers of `model`; `grammars` are for LAST."""
        self._grammars = grammars
        self._role = assignment.role
        self._num_blocks = assignment.num_blocks
        self._block_size = assignment.block_size
        self._model = model
        self._pages = pages
        self._rules = StepRules.of(
            assignment, hidden_size=model.config.hidden_size, vocab_size=model.config.vocab_size
        )
        self.max_hidden_bytes = self._rules.max_hidden_bytes
        self.stats = ExecutorStats(blocks_free=assignment.num_blocks)
        self._busy_s = 0.0
        self._refused: StepFault | None = None
        self._epoch = 0
        self.begin_epoch(0, stage=assignment.stage)

    def begin_epoch(self, epoch: int, *, stage: int) -> None:
        """Forgets everything but the weights: an empty pool, no sequences, step 0 next."""
        self._epoch = epoch
        self._stage = stage
        self._next_step_id = 0
        self._refused = None
        self._tables = BlockTables(self._num_blocks, block_size=self._block_size)
        self._sequences = SequenceStates()
        if self._grammars is not None:
            self._grammars.clear()
        self._sampler = (
            Sampler(vocab_size=self._rules.vocab_size, stage=stage, grammars=self._grammars)
            if self._role.has_head
            else None
        )
        self._publish()

    def run(self, frame: Frame) -> StageOutput:
        """One step. Raises StepFault, and from then on refuses every frame of the epoch."""
        started = time.perf_counter()
        try:
            self._check_order(frame.step)
            with torch.inference_mode():
                output = self._run(frame)
        except StepFault as fault:
            raise self._refuse(fault, frame.step) from fault.__cause__
        except Exception as error:
            log.exception("step %d failed", frame.step.step_id)
            device_fault = StepFault(StepFaultKind.DEVICE, f"{type(error).__name__}: {error}")
            raise self._refuse(device_fault, frame.step) from error
        self._next_step_id += 1
        self._busy_s += time.perf_counter() - started
        self._publish()
        return output

    def check_integrity(self) -> None:
        """Proves pool and block tables sound. Raises kvcache.IntegrityBroken."""
        self._tables.check_integrity()

    def _check_order(self, step: Step) -> None:
        if step.epoch != self._epoch:
            raise StepFault(StepFaultKind.EPOCH, f"frame of epoch {step.epoch}, expected {self._epoch}")
        if self._refused is not None:
            raise StepFault(
                self._refused.kind, f"epoch {self._epoch} is refused since {self._refused.message}"
            )
        if step.step_id != self._next_step_id:
            raise StepFault(
                StepFaultKind.STEP_ID, f"frame of step {step.step_id}, expected {self._next_step_id}"
            )

    def _run(self, frame: Frame) -> StageOutput:
        step = frame.step
        check_hidden_states(frame, self._rules)
        check_limits(step, self._rules)
        self._apply(step)
        layouts = slice_layouts(step.slices, self._sequences, self._tables, self._rules)
        hidden = self._compute(frame, layouts) if layouts else None
        for part in step.slices:
            self._sequences.get(part.sequence).advance(part)
        if self._sampler is None:
            return HandedOn(step.step_id, frame.step_bytes, None if hidden is None else to_view(hidden))
        results = () if hidden is None else self._answer(step, hidden, self._sampler)
        return StepResult(step.epoch, step.step_id, results)

    def _apply(self, step: Step) -> None:
        for end in step.ends:
            self._sequences.end(end)
            if self._sampler is not None:
                self._sampler.end(end.sequence)
        for start in step.starts:
            self._sequences.start(start)
            if self._sampler is not None:
                self._sampler.start(start)
        for entry in step.signals:
            try:
                self._tables.apply(entry.sequence, entry.signal)
            except KvCacheError as error:
                raise StepFault(
                    StepFaultKind.KV_SIGNAL,
                    f"{type(error).__name__} for a signal of {entry.sequence}: {error}",
                    request_ids=(entry.sequence.request_id,),
                ) from error
        if self._tables.digest != step.digest:
            raise StepFault(
                StepFaultKind.KV_DIVERGENCE,
                f"KV digest after step {step.step_id}: expected {step.digest:016x}, "
                f"got {self._tables.digest:016x}",
            )
        self._drop_tables(step)

    def _drop_tables(self, step: Step) -> None:
        """An ended sequence has freed its blocks in this step at the latest."""
        for end in step.ends:
            key = end.sequence
            if key in self._sequences or key not in self._tables:
                continue
            try:
                self._tables.drop(key)
            except KvCacheError as error:
                raise StepFault(
                    StepFaultKind.RECORD, f"end of {key}: {error}", request_ids=(key.request_id,)
                ) from error

    def _compute(self, frame: Frame, layouts: list[SliceLayout]) -> Tensor:
        model = self._model
        layout = model.layout(layouts, block_size=self._block_size)
        self._check_writes(layout)
        if frame.hidden is None:
            tokens = [token for part in frame.step.slices for token in part.tokens]
            hidden = model.embed(torch.tensor(tokens, dtype=torch.int64))
        else:
            hidden = from_view(frame.hidden, device=model.device)
        return model.forward(hidden, layout, self._pages)

    def _check_writes(self, layout: StepLayout) -> None:
        """All layers write the same slots: what is wrong with them is found before the first is written."""
        slots, pages = layout.writes.slots, self._pages
        try:
            pages.validate_write(
                slots,
                shape=(slots.numel(), pages.num_kv_heads, pages.head_dim),
                dtype=self._model.torch_dtype,
                device=self._model.device,
            )
        except KvCacheError as error:
            raise StepFault(StepFaultKind.KV_SIGNAL, f"{type(error).__name__}: {error}") from error

    def _answer(self, step: Step, hidden: Tensor, sampler: Sampler) -> tuple[SliceResult, ...]:
        """One result per slice that is sampled or scored, in slice order."""
        ends = list(itertools.accumulate(len(part.tokens) for part in step.slices))
        sampled = [(part, end - 1) for part, end in zip(step.slices, ends, strict=True) if part.is_sampled]
        results: dict[SequenceKey, SliceResult] = {}
        if sampled:
            logits = self._model.logits(hidden[[row for _, row in sampled]])
            chosen = sampler.choose([part for part, _ in sampled], logits)
            results = {result.sequence: result for result in chosen}
        for part, end in zip(step.slices, ends, strict=True):
            if part.is_scored:
                unscored = results.get(part.sequence, SliceResult(part.sequence, part.generation, None))
                rows = hidden[end - len(part.tokens) : end]
                results[part.sequence] = sampler.score(part, rows, self._model.logits, unscored)
        return tuple(results[part.sequence] for part in step.slices if part.is_answered)

    def _refuse(self, fault: StepFault, step: Step) -> StepFault:
        if self._refused is None and step.epoch == self._epoch:
            self._refused = fault
        fault.step_id = step.step_id
        fault.request_ids = tuple(dict.fromkeys((*step.request_ids, *fault.request_ids)))
        return fault

    def _publish(self) -> None:
        pool = self._tables.pool
        self.stats = ExecutorStats(
            num_steps=self._next_step_id,
            busy_s=self._busy_s,
            blocks_active=pool.num_active,
            blocks_inactive=pool.num_inactive,
            blocks_free=pool.num_free,
            blocks_wanted=self._tables.num_wanted_blocks,
            blocks_hit=self._tables.num_hit_blocks,
        )
