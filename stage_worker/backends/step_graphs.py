"""A step as one launch: recorded once for each size of steps, then replayed on the same buffers.

A graph begins with token ids or received bytes, and ends with the bytes for the next stage, with hidden
states that are sampled beside it, or with tokens. A step is padded to the size of its bucket, and copied to a
buffer that all graphs share; results are in another one, until the next step. What is recorded reads these
buffers, weights and pages only: all that differs between steps is in them. The first step of a size runs
eagerly on the buffers before it is recorded, since kernels are compiled and tables are made then; so it has
its result whether or not recording succeeds.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from checkpoint import DType, ScaledDType
from checkpoint.step_graphs import MAX_GRAPHS
from stage_worker.backends.contract import EagerReason, GraphCounts, GraphSize
from stage_worker.backends.tensor_views import RowScaling, decoded_rows, encoded, sum_of
from stage_worker.backends.torch_device import free_workspaces
from stage_worker.backends.transfers import Field, field_places, torch_dtype
from stage_worker.model.attention_views import HostArray
from stage_worker.model.pipeline_stage import PipelineStage
from stage_worker.model.step_buckets import StepBucket, StepBuckets
from stage_worker.model.step_layout import PagedLayers, StepArrays
from stage_worker.sampling.step_rows import Columns, choose_by_columns, greedy_columns
from wire.staging import aligned
from wire.tensors import WireDType, payload_bytes

log = logging.getLogger(__name__)


class Graph(Protocol):
    """Recorded work of a device."""

    def replay(self) -> None:
        """Enqueue it as one launch, behind earlier computation; it reads and writes the memory that was
        recorded.
        """


class GraphRecorder(ABC):
    """Records what a device is asked to do, without doing it."""

    @abstractmethod
    def capture(self, run: Callable[[], None]) -> Graph:
        """Record what `run` enqueues. It must neither wait for the device nor depend on values there.

        Memory that it allocates stays allocated, and later records use it again. Raises RuntimeError.
        """

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory that records hold."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has nothing to do. Raises its error."""


class CudaRecorder(GraphRecorder):
    """CUDA graphs, with intermediate results in one pool: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # The default stream cannot be recorded.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._num_bytes = 0

    def capture(self, run: Callable[[], None]) -> Graph:
        """Only this thread's calls are recorded: another one waits for steps meanwhile."""
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.memory_reserved(self._device)
        computation = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(computation)
        free_workspaces()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    run()
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            # Recorded products keep using the pool's memory; no later owner of the stream gets it.
            free_workspaces()
            self._num_bytes += torch.cuda.memory_reserved(self._device) - before
            computation.wait_stream(self._stream)
        return graph

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


class GraphEnd(Enum):
    """What a graph computes last.

    SENT: the bytes of hidden states for the next stage, and unless these have scales, a float32 sum that is
    finite if they are. HIDDEN: hidden states of the last layer. SAMPLED: tokens, and these hidden states.
    """

    SENT = "sent"
    HIDDEN = "hidden"
    SAMPLED = "sampled"


@dataclass(frozen=True, slots=True)
class GraphKind:
    """Steps that have a graph: `received` is the dtype of hidden states that come in, None for token ids."""

    bucket: StepBucket
    received: WireDType | None
    end: GraphEnd

    def __str__(self) -> str:
        return str(self.bucket)


@dataclass(frozen=True, slots=True, eq=False)
class FittedStep:
    """A step in a bucket: padded `arrays` of each block group."""

    bucket: StepBucket
    arrays: list[StepArrays]


@dataclass(frozen=True, slots=True, eq=False)
class GraphStep:
    """A step of a kind with all that differs between its steps: the input, then arrays of the layout, then
    `columns` of rows that are sampled.
    """

    kind: GraphKind
    arrays: list[StepArrays]
    input: Field
    columns: Columns | None

    @property
    def host_arrays(self) -> Iterator[HostArray]:
        """What follows the input."""
        for part in self.arrays:
            yield from part.arrays
        yield from self.columns or ()

    @property
    def fields(self) -> list[Field]:
        """To be uploaded, one after the other."""
        return [self.input, *map(Field.of, self.host_arrays)]


class StepGraphs:
    """Graphs of one stage, whose cuts are crossed by one tensor. Used by the compute thread only."""

    def __init__(
        self,
        model: PipelineStage,
        pages: PagedLayers,
        buckets: StepBuckets,
        recorder: GraphRecorder,
        *,
        wire_dtype: WireDType,
        budget_bytes: int,
    ) -> None:
        """Allocate the shared buffers; graphs may hold `budget_bytes` beside them.

        Hidden states are sent in `wire_dtype`.
        """
        self._model, self._pages, self._buckets = model, pages, buckets
        self._width, self._vocab_size = model.config.hidden_size, model.config.vocab_size
        self._recorder, self._budget_bytes = recorder, budget_bytes
        self._wire_dtype, self._scaling = wire_dtype, RowScaling.of(model.kernels)
        model.reserve_positions(buckets.max_sequence_tokens)
        self._graphs: dict[GraphKind, Graph] = {}
        self._sizes: tuple[GraphSize, ...] = ()
        self._not_recorded: dict[StepBucket, EagerReason] = {}
        self._num_replayed = self._num_failed = 0
        self._eager = dict.fromkeys(EagerReason, 0)
        self._largest = [self._padding_of(bucket) for bucket in buckets.largest()]
        self._packed_bytes = max(_total(step.fields[1:]) for step in self._largest)
        most_tokens = max(step.kind.bucket.num_tokens for step in self._largest)
        sizes = [
            aligned(4 * most_tokens * model.config.hidden_size) + self._packed_bytes,
            max(end for step in self._largest for _, end in self._result_places(step.kind)),
        ]
        self._block, self._output = (
            torch.zeros(size, dtype=torch.uint8, device=model.device) for size in sizes
        )

    @torch.inference_mode()
    def record_largest(self) -> None:
        """Record the largest step of each kind, so that the memory of all graphs is allocated.

        Received hidden states are taken to be in the dtype in which the stage sends.
        """
        for step in self._largest:
            for field, (begin, end) in zip(step.fields, field_places(step.fields), strict=True):
                content = np.empty(end - begin, np.uint8)
                field.write(content)
                self._block[begin:end].copy_(torch.from_numpy(content))
            self._begin(step)

    def fit(self, arrays: Sequence[StepArrays]) -> FittedStep | None:
        """The step with `arrays` of each block group, padded; None if it runs eagerly."""
        found = self._buckets.padded(arrays)
        reason = EagerReason.NO_SIZE if found is None else self._not_recorded.get(found[0])
        if reason is not None:
            self._eager[reason] += 1
        return None if found is None or reason is not None else FittedStep(*found)

    def step(
        self,
        fitted: FittedStep,
        given: HostArray,
        received: WireDType | None,
        *,
        columns: Columns | None = None,
    ) -> GraphStep:
        """A step with `given`, ids int64 [n], or the bytes of hidden states in the dtype `received`.

        With `columns` of all rows of the bucket, it ends with tokens.
        """
        end = GraphEnd.SENT
        if self._model.has_head:
            end = GraphEnd.HIDDEN if columns is None else GraphEnd.SAMPLED
        kind = GraphKind(fitted.bucket, received, end)
        return GraphStep(kind, fitted.arrays, self._input_of(kind, given), columns)

    def run(self, step: GraphStep, packed: Tensor) -> tuple[Tensor, ...]:
        """Results of `step`, see `GraphEnd`, whose fields are `packed` on the device.

        They have the rows of the bucket, and are valid until the next step.
        """
        self._block[: len(packed)].copy_(packed)
        graph = self._graphs.get(step.kind)
        if graph is None:
            self._eager[self._not_recorded.get(step.kind.bucket, EagerReason.FIRST)] += 1
            self._begin(step)
        else:
            self._num_replayed += 1
            graph.replay()
        return tuple(self._results(step.kind))

    @property
    def packed_bytes(self) -> int:
        """Bytes of a step's fields behind its input, at most."""
        return self._packed_bytes

    @property
    def counts(self) -> GraphCounts:
        return GraphCounts(
            num_replayed=self._num_replayed,
            eager=dict(self._eager),
            sizes=self._sizes,
            num_failed=self._num_failed,
            pool_bytes=self._recorder.num_bytes,
        )

    def _begin(self, step: GraphStep) -> None:
        """Run `step`, whose data are in the buffers, and record it."""
        bucket = step.kind.bucket
        self._run(step)
        if bucket in self._not_recorded:
            return
        if len(self._graphs) >= MAX_GRAPHS or self._recorder.num_bytes > self._budget_bytes:
            self._not_recorded[bucket] = EagerReason.LIMIT
            log.warning(
                "no CUDA graph for steps of %s: %d graphs hold %d bytes, the limits are %d and %d: they run "
                "eagerly",
                *(bucket, len(self._graphs), self._recorder.num_bytes, MAX_GRAPHS, self._budget_bytes),
            )
            return
        try:
            self._graphs[step.kind] = self._recorder.capture(lambda: self._run(step))
            self._sizes = _sizes(kind.bucket for kind in self._graphs)
        except Exception as error:
            self._not_recorded[bucket] = EagerReason.FAILED
            self._num_failed += 1
            log.warning(
                "no CUDA graph for steps of %s: %s: %s: they run eagerly", bucket, type(error).__name__, error
            )
            self._recorder.synchronize()  # a failed device is no failed recording

    def _run(self, step: GraphStep) -> None:
        """From buffer to buffer. Each call makes its views: their identity is a key of caches."""
        (begin, end), *places = field_places(step.fields)
        views = {
            id(array): self._block[first:last].view(torch_dtype(array)).view(array.shape)
            for array, (first, last) in zip(step.host_arrays, places, strict=True)
        }
        hidden = self._entered(step.kind, self._block[begin:end])
        layout = self._model.layout(step.arrays, lambda array: views[id(array)])
        carried = self._model.advance((hidden,), layout, self._pages)
        columns = [views[id(array)] for array in step.columns or ()]
        for result, computed in zip(
            self._results(step.kind), self._left(step.kind, carried, columns), strict=True
        ):
            result.copy_(computed)

    def _entered(self, kind: GraphKind, given: Tensor) -> Tensor:
        """Hidden states before the first layer, of the bytes `given`."""
        if kind.received is None:
            return self._model.embed_valid(given.view(torch.int64))
        shape = kind.bucket.num_tokens, self._width
        return decoded_rows(given, kind.received, shape, self._model.torch_dtype, self._scaling)

    def _left(self, kind: GraphKind, carried: tuple[Tensor, ...], columns: Sequence[Tensor]) -> list[Tensor]:
        """What is computed of the hidden states after the layers, see `GraphEnd`."""
        model = self._model
        if kind.end is GraphEnd.SENT:
            (hidden,) = carried
            sent = encoded(hidden, self._wire_dtype, self._scaling).contiguous().view(torch.uint8).flatten()
            return [sent, sum_of(carried).view(1)] if isinstance(self._wire_dtype, DType) else [sent]
        hidden = model.leave(carried)
        if kind.end is GraphEnd.HIDDEN:
            return [hidden]
        logits, flags = model.picked_logits(hidden, None)
        reals, top_k = columns
        return [choose_by_columns(logits, reals, top_k, flags), hidden]

    def _results(self, kind: GraphKind) -> Iterator[Tensor]:
        """The results in the output buffer."""
        for (dtype, shape), (begin, end) in zip(
            self._result_shapes(kind), self._result_places(kind), strict=True
        ):
            yield self._output[begin:end].view(dtype).view(shape)

    def _result_shapes(self, kind: GraphKind) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        num_tokens, width = kind.bucket.num_tokens, self._width
        if kind.end is GraphEnd.SENT:
            sent = torch.uint8, (payload_bytes(self._wire_dtype, (num_tokens, width)),)
            return [sent, (torch.float32, (1,))] if isinstance(self._wire_dtype, DType) else [sent]
        hidden = self._model.torch_dtype, (num_tokens, width)
        return [hidden] if kind.end is GraphEnd.HIDDEN else [(torch.int64, (num_tokens,)), hidden]

    def _result_places(self, kind: GraphKind) -> list[tuple[int, int]]:
        shapes = self._result_shapes(kind)
        return field_places(Field(dtype.itemsize * math.prod(shape), ()) for dtype, shape in shapes)

    def _input_of(self, kind: GraphKind, given: HostArray) -> Field:
        """The ids or bytes `given`, with zeros as those of the padding."""
        num_tokens, width = kind.bucket.num_tokens, self._width
        if kind.received is None:
            return Field(8 * num_tokens, ((0, given),))
        num_bytes = payload_bytes(kind.received, (num_tokens, width))
        if not isinstance(kind.received, ScaledDType):
            return Field(num_bytes, ((0, given),))
        # Behind the elements of all rows are their scales.
        num_rows = len(given) * num_tokens // num_bytes
        elements, scales = given[: num_rows * width], given[num_rows * width :]
        return Field(num_bytes, ((0, elements), (num_tokens * width, scales)))

    def _padding_of(self, bucket: StepBucket) -> GraphStep:
        """A step of padding only."""
        empty = self._model.empty_arrays(block_size=self._buckets.block_size)
        fitted = FittedStep(bucket, self._buckets.empty(bucket, empty))
        columns = None
        if self._model.has_head and bucket.is_decode and self._model.samples_by_kernels:
            columns = greedy_columns(bucket.num_tokens, self._vocab_size)
        received = None if self._model.has_embeddings else self._wire_dtype
        return self.step(fitted, np.zeros(0, np.uint8), received, columns=columns)


def _total(fields: Sequence[Field]) -> int:
    """Bytes of fields one after the other."""
    return field_places(fields)[-1][1]


def _sizes(buckets: Iterable[StepBucket]) -> tuple[GraphSize, ...]:
    """Decodes first, then by size."""
    counts = Counter((not bucket.is_decode, bucket.num_tokens) for bucket in buckets)
    return tuple(
        GraphSize(num_tokens=num_tokens, has_prompts=has_prompts, num_graphs=count)
        for (has_prompts, num_tokens), count in sorted(counts.items())
    )
