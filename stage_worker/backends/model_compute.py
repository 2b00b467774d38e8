"""Computes a step: embeddings or received hidden states, layers, and sampling on LAST.

Non-finite values caused by a request (its token's embedding, its received rows, or pages with such rows)
fail that request only, on LAST. If no sequence with finite input has finite output, the stage is at fault,
and the coordinator repeats the step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from checkpoint import ScaledDType
from checkpoint.dtypes import SCALE_BYTES
from kvcache import KvCacheError, SlotChange
from kvcache.pages import KvPages, PageGroups
from stage_worker.backends.contract import Computed, Finish, GraphCounts, StageCompute
from stage_worker.backends.step_graphs import FittedStep, StepGraphs
from stage_worker.backends.tensor_views import (
    RowScaling,
    beside,
    encoded_all,
    from_frame,
    from_wire,
    payload,
    sum_of_scales,
    sum_of_sent,
    views_of,
)
from stage_worker.backends.torch_device import fault_kind_of, free_memory
from stage_worker.backends.transfers import HostTransfers, StepTransfer, StepTransfers
from stage_worker.model.attention_views import HostArray, Place
from stage_worker.model.decode_rows import Column, PageMatrix
from stage_worker.model.pipeline_stage import PipelineStage
from stage_worker.model.step_layout import StepArrays, StepLayout
from stage_worker.sampling import SampledStep, Sampler
from stage_worker.sampling.grammar_masks import GrammarMasks
from stage_worker.validation import DecodeBatch, SliceLayout, StepSlices
from stageline_rpc.internal.v1 import step_pb2
from wire.errors import StepFault, StepFaultKind
from wire.frames import Frame
from wire.ids import SequenceKey
from wire.steps import SliceError, SliceResult, StartRecord, Step, StepResult, StepSlice
from wire.tensors import HiddenStates, TensorView, WireDType, payload_bytes

Carried = Callable[[], Sequence[Tensor]]
"""Tensors [tokens, width] of a boundary, for checks of their values; some have to be computed again."""


class FiniteStates:
    """Tracks sequences with non-finite input; used by the compute thread only."""

    def __init__(self) -> None:
        self._tainted: set[SequenceKey] = set()

    def clear(self) -> None:
        """Drop all sequences."""
        self._tainted.clear()

    def end(self, sequences: Iterable[SequenceKey]) -> None:
        self._tainted.difference_update(sequences)

    def check_handed_on(self, step: Step, total: float, outgoing: Carried, incoming: Carried) -> None:
        """Raises StepFault if this stage produced the non-finite values.

        `total` is `sum_of_sent` of the tensors that go out; these are only looked at if it is not finite.
        """
        if not math.isfinite(total):
            # The begin of a prompt may be finite.
            good = [bool(rows.any()) for rows in _finite_rows(step, beside(outgoing()))]
            self._check(step.slices, good, step, beside(incoming()))

    def check_answered(self, step: Step, result: StepResult, incoming: Carried) -> None:
        """Like `check_handed_on`, for a result with non-finite logits."""
        if not any(_is_not_finite(detail.outcome) for detail in result.details):
            return
        answered = [step_slice for step_slice in step.slices if step_slice.is_answered]
        good = [not _is_not_finite(entry.outcome) for entry in result.results]
        self._check(answered, good, step, beside(incoming()))

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


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A step ahead of its hidden states: `rows` int64 [m] need logits (None: all of them).

    A CPU has the layout already; a device makes it of the arrays, or has them in the bucket of a graph.
    """

    arrays: list[StepArrays]
    layout: StepLayout | None
    in_bucket: FittedStep | None
    rows: Column | None

    @property
    def placed(self) -> Iterator[HostArray]:
        """What the layout needs on the device, unless a graph has it."""
        if self.in_bucket is not None:
            return
        for part in self.arrays:
            yield from part.arrays


class ModelCompute(StageCompute):
    """Model, pages and, with the head, sampler of one stage.

    All but `Finish` runs on the compute thread.
    """

    def __init__(
        self,
        model: PipelineStage,
        pages: KvPages | PageGroups,
        grammars: GrammarMasks | None = None,
        *,
        wire_dtype: WireDType | None = None,
        transfers: StepTransfers | None = None,
        graphs: StepGraphs | None = None,
    ) -> None:
        """`pages` cover the model's layers; `grammars` need the head; `wire_dtype` is the output's.

        `transfers` are to the model's device, by default a CPU. `graphs` are of the model's layers and
        `pages`. Raises ValueError for pages of another number of block groups than the layers have windows.
        """
        self.boundary = model.config.boundary
        self.vocab_size = model.config.vocab_size
        self._model = model
        self._pages = pages
        self._windows = model.group_windows
        if len(self._windows) != len(pages.groups):
            raise ValueError(f"pages of {len(pages.groups)} block groups for {len(self._windows)} windows")
        self._grammars = grammars
        self._wire_dtype = wire_dtype or model.dtype
        self._scaling = RowScaling.of(model.kernels)
        self._transfers = transfers or HostTransfers()
        self._graphs = graphs
        self.depth = self._transfers.depth
        self._sampler: Sampler | None = None
        self._finite = FiniteStates()
        self._ended: list[SequenceKey] = []
        self._matrices: WeakKeyDictionary[DecodeBatch, dict[int, PageMatrix]] = WeakKeyDictionary()

    def begin_epoch(self, *, stage: int) -> None:
        self._transfers.synchronize()
        self._finite.clear()
        self._ended.clear()
        if self._grammars is not None:
            self._grammars.clear()
        if self._model.has_head:
            self._sampler = Sampler(
                vocab_size=self.vocab_size,
                stage=stage,
                grammars=self._grammars,
                has_kernels=self._model.samples_by_kernels,
            )

    def close(self) -> None:
        """Release model, pages and buffers, even if this object is referenced; it can no longer compute."""
        del self._model, self._pages, self._transfers, self._graphs
        self._sampler = None

    @property
    def graphs(self) -> GraphCounts | None:
        return None if self._graphs is None else self._graphs.counts

    def record_graphs(self) -> None:
        """Record the largest graphs, if the stage has any; steps record the others."""
        if self._graphs is not None:
            self._graphs.record_largest()

    def fault_kind(self, error: Exception) -> StepFaultKind:
        return fault_kind_of(error, self._model.device)

    def free_memory(self) -> None:
        free_memory(self._model.device)

    @torch.inference_mode()
    def start(self, record: StartRecord) -> None:
        if self._sampler is not None:
            self._sampler.start(record)

    def end(self, sequence: SequenceKey) -> None:
        # The steps before may not be finished.
        self._ended.append(sequence)
        if self._sampler is not None:
            self._sampler.end(sequence)

    @torch.inference_mode()
    def take_late_rows(self, *, may_wait: bool) -> tuple[SliceResult, ...]:
        return () if self._sampler is None else self._sampler.take_late_rows(may_wait=may_wait)

    @torch.inference_mode()
    def change_states(self, changes: Sequence[SlotChange]) -> None:
        states = self._pages.states
        if states is not None:
            states.change(changes)

    @torch.inference_mode()
    def prepare(self, step: Step, layouts: Sequence[SliceLayout]) -> _Prepared:
        arrays = self._arrays(layouts)
        self._check_writes(arrays)
        layout = self._model.layout(arrays, torch.from_numpy) if self._transfers.is_host else None
        in_bucket = None if self._graphs is None else self._graphs.fit(arrays)
        return _Prepared(arrays, layout, in_bucket, _rows_of_logits(step) if self._model.has_head else None)

    def compute(self, frame: Frame, prepared: object) -> Computed:
        return self.begin(frame, prepared)()

    @torch.inference_mode()
    def begin(self, frame: Frame, prepared: object) -> Finish:
        assert isinstance(prepared, _Prepared)
        transfer, sampler = self._transfers.begin(), self._sampler
        sampled = None if sampler is None else sampler.prepare(frame.step, device=self._model.device)
        if prepared.in_bucket is not None:
            return self._begin_recorded(frame, prepared, prepared.in_bucket, sampled, transfer)
        return self._begin_eagerly(frame, prepared, sampled, transfer)

    def _begin_eagerly(
        self, frame: Frame, prepared: _Prepared, sampled: SampledStep | None, transfer: StepTransfer
    ) -> Finish:
        model, inputs = self._model, _inputs(frame)
        ids = _token_ids(frame.step) if model.needs_tokens else None
        place = transfer.upload(_arrays_of(inputs if ids is None else [*inputs, ids], prepared, sampled))
        entered = self._entered(frame, [place(array) for array in inputs])
        layout = prepared.layout or model.layout(prepared.arrays, place)
        if ids is not None:
            layout = layout.with_tokens(place(ids))
        carried = model.advance(entered, layout, self._pages)
        if self._sampler is None or sampled is None:
            sent = encoded_all(carried, self.boundary, self._wire_dtype, self._scaling)
            hidden = views_of(carried, transfer.hand_on(sent), self.boundary, self._wire_dtype)
            total = transfer.fetch(sum_of_sent(carried, sent, self.boundary, self._wire_dtype))
            return self._hand_on(frame.step, lambda: entered, lambda: carried, hidden, total, transfer)
        rows = None if prepared.rows is None else place(prepared.rows)
        answer = _Answer(frame.step, self._sampler, sampled, model)
        answer.begin(model.leave(carried), rows, place, transfer)
        return self._answer(frame.step, lambda: entered, answer, transfer)

    def _begin_recorded(
        self,
        frame: Frame,
        prepared: _Prepared,
        fitted: FittedStep,
        sampled: SampledStep | None,
        transfer: StepTransfer,
    ) -> Finish:
        """Like `begin`, as one launch: of all that the step is on its device, or but for its sampling."""
        graphs = self._graphs
        assert graphs is not None, "a bucket of no graphs"
        (given,), received = _inputs(frame), frame.hidden[0].dtype if frame.hidden else None
        columns = None
        if sampled is not None and prepared.rows is None and fitted.bucket.is_decode:
            columns = sampled.columns(fitted.bucket.num_tokens)
        step = graphs.step(fitted, given, received, columns=columns)
        others = () if columns is not None else _arrays_of((), prepared, sampled)
        packed, place = transfer.upload_fields(step.fields, others)
        results = graphs.run(step, packed)
        if self._sampler is None or sampled is None:
            return self._hand_on_recorded(frame, results, transfer)
        # The next step may come before this one's end, and its results replace these.
        hidden, answer = results[-1].clone(), _Answer(frame.step, self._sampler, sampled, self._model)
        if columns is not None:
            answer.take(results[0][: frame.step.num_tokens], hidden, transfer)
        else:
            rows = None if prepared.rows is None else place(prepared.rows)
            answer.begin(hidden[: frame.step.num_tokens], rows, place, transfer)
        return self._answer(frame.step, lambda: self._entered_again(frame), answer, transfer)

    def _hand_on_recorded(self, frame: Frame, results: Sequence[Tensor], transfer: StepTransfer) -> Finish:
        (one,), num_tokens = self.boundary, frame.step.num_tokens
        wire_dtype, sent = self._wire_dtype, results[0]
        if isinstance(wire_dtype, ScaledDType):
            # Behind the elements of all rows are their scales.
            num_rows = len(sent) // payload_bytes(wire_dtype, (1, one.width))
            scales = sent[num_rows * one.width :][: SCALE_BYTES * num_tokens]
            sent = torch.cat((sent[: num_tokens * one.width], scales))
            (data,), total = transfer.hand_on([sent]), sum_of_scales(sent, num_tokens * one.width)
        else:
            (data,) = transfer.hand_on([sent[: payload_bytes(wire_dtype, (num_tokens, one.width))]])
            total = results[1]
        hidden = (TensorView(wire_dtype, (num_tokens, one.width), data, one.name),)
        return self._hand_on(
            frame.step,
            lambda: self._entered_again(frame),
            lambda: [self._left_again(view) for view in hidden],
            hidden,
            transfer.fetch(total),
            transfer,
        )

    def _hand_on(
        self,
        step: Step,
        entered: Carried,
        carried: Carried,
        hidden: HiddenStates,
        total: memoryview,
        transfer: StepTransfer,
    ) -> Finish:
        """Download `hidden`, unless it stays on the device, and their `sum_of_sent`, `total`."""
        transfer.download()
        ended = self._take_ended()

        def finish() -> Computed:
            transfer.wait()
            self._finite.end(ended)
            with torch.inference_mode():
                self._finite.check_handed_on(
                    step, float(np.frombuffer(total, np.float32)[0]), carried, entered
                )
            return hidden

        return finish

    def _answer(self, step: Step, entered: Carried, answer: _Answer, transfer: StepTransfer) -> Finish:
        transfer.download()
        ended = self._take_ended()

        def finish() -> Computed:
            transfer.wait()
            self._finite.end(ended)
            with torch.inference_mode():
                result = answer.finish()
                self._finite.check_answered(step, result, entered)
            return result

        return finish

    def _take_ended(self) -> list[SequenceKey]:
        ended, self._ended = self._ended, []
        return ended

    def _arrays(self, slices: Sequence[SliceLayout]) -> list[StepArrays]:
        """Those of each block group."""
        if not isinstance(slices, StepSlices):
            return [self._model.step_arrays(list(slices), block_size=self._pages.block_size)]
        found = [
            self._group_arrays(slices.groups[number], number, window) for number, window in self._windows
        ]
        if self._model.is_recurrent:
            lengths = [1] * len(slices.decodes.sequences) + [chunk.num_tokens for chunk in slices.chunks]
            states = self._model.host_states(lengths, slices.state_slots())
            found[0] = replace(found[0], states=states)
        return found

    def _group_arrays(self, slices: StepSlices, number: int, window: int | None) -> StepArrays:
        """The arrays for the layers of one block group."""
        windows, block_size = (window,), self._pages.block_size
        if not slices.are_decodes_plain:
            return self._model.step_arrays(list(slices), block_size=block_size, windows=windows)
        matrices = self._matrices.setdefault(slices.decodes, {})
        if (matrix := matrices.get(number)) is None:
            matrix = matrices[number] = PageMatrix(slices.block_tables())
        decodes = matrix.rows(slices.positions)
        return self._model.step_arrays(slices.chunks, block_size=block_size, decodes=decodes, windows=windows)

    def _entered(self, frame: Frame, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors of the boundary before the first layer."""
        if frame.hidden:
            return from_frame(frame.hidden, inputs, self.boundary, self._model.torch_dtype, self._scaling)
        return self._model.enter(inputs[0])

    def _entered_again(self, frame: Frame) -> tuple[Tensor, ...]:
        """Like `_entered`, once more, for a look at values."""
        arrays = [self._transfers.on_host(array) for array in _inputs(frame)]
        inputs = [torch.from_numpy(array).to(self._model.device) for array in arrays]
        return self._entered(frame, inputs)

    def _left_again(self, view: TensorView) -> Tensor:
        """Hidden states that were handed on, on the host, for a look at values."""
        content = replace(view, data=self._transfers.on_host(payload(view)).data)
        return from_wire(content, device=torch.device("cpu"), dtype=self._model.torch_dtype)

    def _check_writes(self, arrays: Sequence[StepArrays]) -> None:
        """Check before the first layer, since all layers write the same slots."""
        try:
            for part, pages in zip(arrays, self._pages.groups, strict=True):
                pages.validate_write(
                    part.slots,
                    shape=(part.slots.size, pages.num_kv_heads, pages.head_dim),
                    dtype=self._model.torch_dtype,
                    device=self._model.device,
                )
        except KvCacheError as error:
            raise StepFault(StepFaultKind.KV_SIGNAL, f"{type(error).__name__}: {error}") from error


def _inputs(frame: Frame) -> list[HostArray]:
    """Token ids int64 [n], or the bytes of each tensor of the boundary."""
    return [payload(view) for view in frame.hidden] if frame.hidden else [_token_ids(frame.step)]


def _token_ids(step: Step) -> Column:
    """Those of all rows, int64 [n]; every stage has them."""
    if step.chunks:
        return np.array(step.tokens, np.int64)
    return np.frombuffer(step.decodes.tokens, "<u4").astype(np.int64)


def _arrays_of(
    inputs: Sequence[HostArray], prepared: _Prepared, sampled: SampledStep | None
) -> Iterator[HostArray]:
    """All that the device needs of a step."""
    yield from inputs
    yield from prepared.placed
    if prepared.rows is not None:
        yield prepared.rows
    if sampled is not None and sampled.rows is not None:
        yield from sampled.rows.arrays


def _rows_of_logits(step: Step) -> Column | None:
    """The last row of each sampled slice; None if it is every row of the step."""
    num_decodes = len(step.decodes)
    if not step.chunks:
        return None
    ends = list(itertools.accumulate((len(chunk.tokens) for chunk in step.chunks), initial=num_decodes))
    rows = [*range(num_decodes)]
    rows += [end - 1 for chunk, end in zip(step.chunks, ends[1:], strict=True) if chunk.is_sampled]
    return None if len(rows) == ends[-1] else np.array(rows, np.int64)


class _Answer:
    """The result of a step on LAST: one row per sampled or scored slice, in slice order.

    Nothing waits for a device before `finish`. A CPU samples rows with state when it begins.
    """

    def __init__(self, step: Step, sampler: Sampler, sampled: SampledStep, model: PipelineStage) -> None:
        self._step = step
        self._sampler = sampler
        self._sampled = sampled
        self._model = model
        self._hidden: Tensor | None = None
        self._logits: Tensor | None = None
        self._padded: Tensor | None = None
        self._tokens: memoryview | None = None
        self._result: StepResult | None = None

    def begin(self, hidden: Tensor, rows: Tensor | None, place: Place, transfer: StepTransfer) -> None:
        """Sample from `hidden` [n, hidden_size], whose `rows` int64 [m] (None: all) need logits."""
        sampled, flags = self._sampled, None
        if sampled.states:
            self._logits, flags = self._model.picked_logits(hidden, rows)
        if sampled.scored:
            self._hidden = hidden
        tokens = None
        if sampled.rows is not None:
            assert self._logits is not None, "a sampled row has logits"
            tokens = sampled.rows.choose(self._logits, flags, place)
        if hidden.device.type == "cpu" and (sampled.scored or not sampled.are_plain):
            self._result = self._settled([] if tokens is None else tokens.tolist())
        elif tokens is not None:
            self._tokens = transfer.fetch(tokens)

    def take(self, tokens: Tensor, padded: Tensor, transfer: StepTransfer) -> None:
        """Take `tokens` int64 [n] of a graph, and the hidden states of all its rows.

        If a row needs a look, its logits are computed again, beside the same rows, so that they are the same.
        """
        self._tokens, self._padded = transfer.fetch(tokens), padded

    def finish(self) -> StepResult:
        """The result, once the download has ended."""
        if self._result is None:
            tokens = [] if self._tokens is None else np.frombuffer(self._tokens, np.int64).tolist()
            self._result = self._settled(tokens)
        return self._result

    def _settled(self, tokens: Sequence[int]) -> StepResult:
        step, num_decodes = self._step, len(self._step.decodes)
        if self._padded is not None and min(tokens) < 0:
            self._logits = self._model.picked_logits(self._padded, None)[0][: len(tokens)]
        settled = self._sampler.settle(self._sampled, self._logits, tokens)
        decoded = [token for token in settled[:num_decodes] if isinstance(token, int)]
        chunks = self._chunk_results(settled[num_decodes:])
        if len(decoded) == num_decodes:
            rest = StepResult.of(step.epoch, step.step_id, chunks)
            return rest.after(step.decodes.identities, decoded)
        decodes = _results(step.decodes.slices, settled[:num_decodes])
        return StepResult.of(step.epoch, step.step_id, [*decodes, *chunks])

    def _chunk_results(self, settled: Sequence[int | SliceResult]) -> list[SliceResult]:
        """Results of the step's chunks, whose sampled rows are `settled`."""
        chunks = self._step.chunks
        found = {
            result.sequence: result
            for result in _results([chunk for chunk in chunks if chunk.is_sampled], settled)
        }
        if self._hidden is not None:
            ends = itertools.accumulate(
                (len(chunk.tokens) for chunk in chunks), initial=len(self._step.decodes)
            )
            for chunk, first in zip(chunks, ends, strict=False):
                if chunk.is_scored:
                    rows = self._hidden[first : first + len(chunk.tokens)]
                    unscored = found.get(chunk.sequence) or _results([chunk], [None])[0]
                    prompt = self._sampled.scored[chunk.sequence]
                    found[chunk.sequence] = self._sampler.score(
                        chunk, prompt, rows, self._model.logits, unscored
                    )
        return [found[chunk.sequence] for chunk in chunks if chunk.is_answered]


def _results(slices: Sequence[StepSlice], settled: Sequence[int | SliceResult | None]) -> list[SliceResult]:
    """A result for each slice, of its token."""
    return [
        outcome
        if isinstance(outcome, SliceResult)
        else SliceResult(part.sequence, part.restart_count, outcome)
        for part, outcome in zip(slices, settled, strict=True)
    ]
