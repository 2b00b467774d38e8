"""Computes a step: embeddings or received hidden states, layers, and sampling on LAST.

Non-finite values caused by a request (its token's embedding, its received rows, or pages with such rows)
fail that request only, on LAST. If no sequence with finite input has finite output, the stage is at fault,
and the coordinator repeats the step.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from kvcache import KvCacheError, group_windows
from kvcache.pages import KvPages, PageGroups
from stage_worker.backends.contract import Computed, StageCompute
from stage_worker.backends.tensor_views import from_frame, to_frame
from stage_worker.backends.torch_device import fault_kind_of, free_memory
from stage_worker.model.decode_rows import PageMatrix
from stage_worker.model.decoder import DecoderStage
from stage_worker.model.step_layout import StepLayout
from stage_worker.sampling import Sampler
from stage_worker.sampling.grammar_masks import GrammarMasks
from stage_worker.validation import DecodeBatch, SliceLayout, StepSlices
from stageline_rpc.internal.v1 import step_pb2
from wire.errors import StepFault, StepFaultKind
from wire.frames import Frame
from wire.ids import SequenceKey
from wire.steps import SliceError, SliceResult, StartRecord, Step, StepResult, StepSlice, pack_column
from wire.tensors import WireDType


def are_finite(hidden: Tensor) -> bool:
    """Whether `hidden` [tokens, hidden_size] is finite, by one sum; False also if the sum overflows."""
    return math.isfinite(hidden.sum(dtype=torch.float32).item())


def _columns(carried: Sequence[Tensor]) -> Tensor:
    """The tensors [tokens, width] of a boundary beside each other, for checks of their values."""
    return carried[0] if len(carried) == 1 else torch.cat([tensor.float() for tensor in carried], dim=1)


class FiniteStates:
    """Tracks sequences with non-finite input; used by the compute thread only."""

    def __init__(self) -> None:
        self._tainted: set[SequenceKey] = set()

    def clear(self) -> None:
        """Drop all sequences."""
        self._tainted.clear()

    def end(self, sequence: SequenceKey) -> None:
        self._tainted.discard(sequence)

    def check_handed_on(self, step: Step, outgoing: Tensor, incoming: Callable[[], Tensor]) -> None:
        """Raises StepFault if this stage produced the non-finite values; both tensors are [tokens,
        hidden_size].
        """
        if not are_finite(outgoing):
            # The begin of a prompt may be finite.
            good = [bool(rows.any()) for rows in _finite_rows(step, outgoing)]
            self._check(step.slices, good, step, incoming())

    def check_answered(self, step: Step, result: StepResult, incoming: Callable[[], Tensor]) -> None:
        """Like `check_handed_on`, for a result with non-finite logits."""
        if not any(_is_not_finite(detail.outcome) for detail in result.details):
            return
        answered = [step_slice for step_slice in step.slices if step_slice.is_answered]
        good = [not _is_not_finite(entry.outcome) for entry in result.results]
        self._check(answered, good, step, incoming())

    def _check(self, parts: Sequence[StepSlice], good: list[bool], step: Step, incoming: Tensor) -> None:
        came_good = self._came_good(step, incoming)
        judged = [
            is_good
            for step_slice, is_good in zip(parts, good, strict=True)
            if step_slice.sequence in came_good
        ]
        if judged and not any(judged):
            raise StepFault(
                StepFaultKind.NON_FINITE,
                f"non-finite output for {len(judged)} of {len(step.slices)} sequences, although their input "
                "is finite",
            )
        self._tainted.update(
            step_slice.sequence for step_slice in step.slices if step_slice.sequence not in came_good
        )

    def _came_good(self, step: Step, incoming: Tensor) -> set[SequenceKey]:
        return {
            step_slice.sequence
            for step_slice, rows in zip(step.slices, _finite_rows(step, incoming), strict=True)
            if step_slice.sequence not in self._tainted and bool(rows.all())
        }


def _finite_rows(step: Step, hidden: Tensor) -> list[Tensor]:
    """Finiteness of each slice's rows, bool [tokens]."""
    are_good = hidden.isfinite().all(dim=1)
    ends = itertools.accumulate(len(step_slice.tokens) for step_slice in step.slices)
    return [
        are_good[end - len(step_slice.tokens) : end]
        for step_slice, end in zip(step.slices, ends, strict=True)
    ]


def _is_not_finite(outcome: object) -> bool:
    kind = step_pb2.SliceError.KIND_NON_FINITE_LOGITS
    return isinstance(outcome, SliceError) and outcome.kind == kind


class ModelCompute(StageCompute):
    """Model, pages and, with the head, sampler of one stage; used from the compute thread only."""

    def __init__(
        self,
        model: DecoderStage,
        pages: KvPages | PageGroups,
        grammars: GrammarMasks | None = None,
        *,
        wire_dtype: WireDType | None = None,
    ) -> None:
        """`pages` cover the model's layers; `grammars` need the head; `wire_dtype` is the output's.

        Raises ValueError for pages of another number of block groups than the layers have windows.
        """
        self.boundary = model.config.boundary
        self.vocab_size = model.config.vocab_size
        self._model = model
        self._pages = pages
        windows = group_windows(model.config.layer_windows)
        self._windows = [(number, window) for number, window in enumerate(windows) if window in model.windows]
        if len(self._windows) != len(pages.groups):
            raise ValueError(f"pages of {len(pages.groups)} block groups for {len(self._windows)} windows")
        self._grammars = grammars
        self._wire_dtype = wire_dtype or model.dtype
        self._sampler: Sampler | None = None
        self._finite = FiniteStates()
        self._matrices: WeakKeyDictionary[DecodeBatch, dict[int, PageMatrix]] = WeakKeyDictionary()

    def begin_epoch(self, *, stage: int) -> None:
        self._finite.clear()
        if self._grammars is not None:
            self._grammars.clear()
        if self._model.has_head:
            self._sampler = Sampler(vocab_size=self.vocab_size, stage=stage, grammars=self._grammars)

    def close(self) -> None:
        """Release model and pages, even if this object is still referenced; it can no longer compute."""
        del self._model, self._pages
        self._sampler = None

    def fault_kind(self, error: Exception) -> StepFaultKind:
        return fault_kind_of(error, self._model.device)

    def free_memory(self) -> None:
        free_memory(self._model.device)

    @torch.inference_mode()
    def start(self, record: StartRecord) -> None:
        if self._sampler is not None:
            self._sampler.start(record)

    def end(self, sequence: SequenceKey) -> None:
        self._finite.end(sequence)
        if self._sampler is not None:
            self._sampler.end(sequence)

    @torch.inference_mode()
    def prepare(self, step: Step, layouts: Sequence[SliceLayout]) -> StepLayout:
        layout = self._layout(layouts)
        self._check_writes(layout)
        return layout

    @torch.inference_mode()
    def compute(self, frame: Frame, prepared: object) -> Computed:
        assert isinstance(prepared, StepLayout)
        carried = self._model.advance(self._input(frame), prepared, self._pages)
        if self._sampler is None:
            self._finite.check_handed_on(frame.step, _columns(carried), lambda: _columns(self._input(frame)))
            return to_frame(carried, self.boundary, self._wire_dtype)
        result = self._answer(frame.step, self._model.leave(carried), self._sampler)
        self._finite.check_answered(frame.step, result, lambda: _columns(self._input(frame)))
        return result

    def _layout(self, slices: Sequence[SliceLayout]) -> StepLayout:
        if not isinstance(slices, StepSlices):
            return self._model.layout(list(slices), block_size=self._pages.block_size)
        first, *others = [
            self._group_layout(slices.groups[number], number, window) for number, window in self._windows
        ]
        return replace(first, others=tuple(others)) if others else first

    def _group_layout(self, slices: StepSlices, number: int, window: int | None) -> StepLayout:
        """The layout for the layers of one block group."""
        windows, block_size = (window,), self._pages.block_size
        if not slices.are_decodes_plain:
            return self._model.layout(list(slices), block_size=block_size, windows=windows)
        matrices = self._matrices.setdefault(slices.decodes, {})
        if (matrix := matrices.get(number)) is None:
            matrix = matrices[number] = PageMatrix(slices.block_tables())
        decodes = matrix.rows(slices.positions)
        return self._model.layout(slices.chunks, block_size=block_size, decodes=decodes, windows=windows)

    def _input(self, frame: Frame) -> tuple[Tensor, ...]:
        if frame.hidden:
            model = self._model
            return from_frame(frame.hidden, self.boundary, device=model.device, dtype=model.torch_dtype)
        step = frame.step
        tokens = np.frombuffer(step.decodes.tokens, "<u4").astype(np.int64)
        if step.chunks:
            tokens = np.array(step.tokens, np.int64)
        return self._model.enter(torch.from_numpy(tokens))

    def _check_writes(self, layout: StepLayout) -> None:
        """Check before the first layer, since all layers write the same slots."""
        try:
            for part, pages in zip(layout.groups, self._pages.groups, strict=True):
                slots = part.writes.slots
                pages.validate_write(
                    slots,
                    shape=(slots.numel(), pages.num_kv_heads, pages.head_dim),
                    dtype=self._model.torch_dtype,
                    device=self._model.device,
                )
        except KvCacheError as error:
            raise StepFault(StepFaultKind.KV_SIGNAL, f"{type(error).__name__}: {error}") from error

    def _answer(self, step: Step, hidden: Tensor, sampler: Sampler) -> StepResult:
        """One row per sampled or scored slice, in slice order."""
        num_decodes = len(step.decodes)
        ends = list(itertools.accumulate((len(chunk.tokens) for chunk in step.chunks), initial=num_decodes))
        rows = [*range(num_decodes)]
        rows += [end - 1 for chunk, end in zip(step.chunks, ends[1:], strict=True) if chunk.is_sampled]
        logits = self._model.logits(hidden if len(rows) == len(hidden) else hidden[rows]) if rows else None
        tokens: list[int] | None = []
        if num_decodes and logits is not None:
            tokens = sampler.choose_plain(step.decodes, logits[:num_decodes])
        if tokens is None:
            results = self._results(step.slices, hidden, logits, sampler)
            return StepResult.of(step.epoch, step.step_id, results)
        if not step.chunks:
            return StepResult(step.epoch, step.step_id, step.decodes.identities, pack_column(tokens))
        rest = None if logits is None else logits[num_decodes:]
        chunks = self._results(step.chunks, hidden[num_decodes:], rest, sampler)
        return StepResult.of(step.epoch, step.step_id, chunks).after(step.decodes.identities, tokens)

    def _results(
        self, slices: Sequence[StepSlice], hidden: Tensor, logits: Tensor | None, sampler: Sampler
    ) -> tuple[SliceResult, ...]:
        """One result per sampled or scored slice of `hidden` [tokens of the slices, hidden_size], in order.

        `logits` has a row for each sampled slice, None if there is none.
        """
        results: dict[SequenceKey, SliceResult] = {}
        if logits is not None:
            chosen = sampler.choose([step_slice for step_slice in slices if step_slice.is_sampled], logits)
            results = {result.sequence: result for result in chosen}
        ends = itertools.accumulate(len(step_slice.tokens) for step_slice in slices)
        for step_slice, end in zip(slices, ends, strict=True):
            if step_slice.is_scored:
                unscored = results.get(
                    step_slice.sequence, SliceResult(step_slice.sequence, step_slice.restart_count, None)
                )
                rows = hidden[end - len(step_slice.tokens) : end]
                results[step_slice.sequence] = sampler.score(step_slice, rows, self._model.logits, unscored)
        return tuple(results[step_slice.sequence] for step_slice in slices if step_slice.is_answered)
