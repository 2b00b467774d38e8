"""Layers of a step as one launch: recorded once for each size of steps, then replayed on the same buffers.

A step is padded to the size of its bucket, and copied to buffers that all buckets share. What is recorded
reads these buffers, weights and pages only: all that differs between steps is in them. The first step of a
bucket runs eagerly on the buffers before it is recorded, since kernels are compiled and tables are made then;
so it has its result whether or not recording succeeds.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from checkpoint.step_graphs import MAX_GRAPHS
from stage_worker.backends.contract import EagerReason, GraphCounts, GraphSize
from stage_worker.backends.transfers import torch_dtype
from stage_worker.model.attention_views import HostArray
from stage_worker.model.pipeline_stage import PipelineStage
from stage_worker.model.step_buckets import StepBucket, StepBuckets
from stage_worker.model.step_layout import PagedLayers, StepArrays
from wire.staging import aligned

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
            self._num_bytes += torch.cuda.memory_reserved(self._device) - before
            computation.wait_stream(self._stream)
        return graph

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


@dataclass(frozen=True, slots=True, eq=False)
class GraphStep:
    """A step in a bucket: padded `arrays`, and all of them as one, uint8, in the same order in every step."""

    bucket: StepBucket
    arrays: list[StepArrays]
    packed: HostArray


class StepGraphs:
    """Graphs of one stage's layers, which take and return one tensor. Used by the compute thread only."""

    def __init__(
        self,
        model: PipelineStage,
        pages: PagedLayers,
        buckets: StepBuckets,
        recorder: GraphRecorder,
        *,
        budget_bytes: int,
    ) -> None:
        """Allocate the shared buffers; graphs may hold `budget_bytes` beside them."""
        self._model, self._pages, self._buckets = model, pages, buckets
        self._recorder, self._budget_bytes = recorder, budget_bytes
        model.reserve_positions(buckets.max_sequence_tokens)
        self._graphs: dict[StepBucket, Graph] = {}
        self._sizes: tuple[GraphSize, ...] = ()
        self._not_recorded: dict[StepBucket, EagerReason] = {}
        self._num_replayed = self._num_failed = 0
        self._eager = dict.fromkeys(EagerReason, 0)
        self._largest = [self._padding_of(bucket) for bucket in buckets.largest()]
        device, num_tokens = model.device, max(step.bucket.num_tokens for step in self._largest)
        num_bytes = max(len(step.packed) for step in self._largest)
        self._block = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        shape = (2, num_tokens, model.config.hidden_size)
        self._hidden, self._output = torch.zeros(shape, dtype=model.torch_dtype, device=device)

    @torch.inference_mode()
    def record_largest(self) -> None:
        """Record the largest step of each kind, so that the memory of all graphs is allocated."""
        for step in self._largest:
            self._block[: len(step.packed)].copy_(torch.from_numpy(step.packed))
            self._begin(step)

    def fit(self, arrays: Sequence[StepArrays]) -> GraphStep | None:
        """The step with `arrays` of each block group, padded; None if it runs eagerly."""
        found = self._buckets.padded(arrays)
        reason = EagerReason.NO_SIZE if found is None else self._not_recorded.get(found[0])
        if reason is not None:
            self._eager[reason] += 1
        return None if found is None or reason is not None else _packed(*found)

    def advance(self, hidden: Tensor, step: GraphStep, packed: Tensor) -> Tensor:
        """Hidden states after the layers, for `hidden` [n, hidden_size] and `packed` on the device."""
        num_tokens = len(hidden)
        self._hidden[:num_tokens].copy_(hidden)
        self._block[: len(packed)].copy_(packed)
        graph = self._graphs.get(step.bucket)
        if graph is None:
            self._eager[self._not_recorded.get(step.bucket, EagerReason.FIRST)] += 1
            self._begin(step)
        else:
            self._num_replayed += 1
            graph.replay()
        # The next step, or a second look at this one's values, may come before this one's end.
        found: Tensor = self._output[:num_tokens].clone()
        return found

    @property
    def packed_bytes(self) -> int:
        """Bytes of `GraphStep.packed`, at most."""
        return len(self._block)

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
        """Run the layers of `step`, whose data are in the buffers, and record them."""
        bucket = step.bucket
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
            self._graphs[bucket] = self._recorder.capture(lambda: self._run(step))
            self._sizes = _sizes(self._graphs)
        except Exception as error:
            self._not_recorded[bucket] = EagerReason.FAILED
            self._num_failed += 1
            log.warning(
                "no CUDA graph for steps of %s: %s: %s: they run eagerly", bucket, type(error).__name__, error
            )
            self._recorder.synchronize()  # a failed device is no failed recording

    def _run(self, step: GraphStep) -> None:
        """The layers, from buffer to buffer. Each call makes its views: their identity is a key of caches."""
        views = dict(_views(step.arrays, self._block))
        layout = self._model.layout(step.arrays, lambda array: views[id(array)])
        num_tokens = step.bucket.num_tokens
        (output,) = self._model.advance((self._hidden[:num_tokens],), layout, self._pages)
        self._output[:num_tokens].copy_(output)

    def _padding_of(self, bucket: StepBucket) -> GraphStep:
        """A step of padding only."""
        empty = self._model.empty_arrays(block_size=self._buckets.block_size)
        return _packed(bucket, self._buckets.empty(bucket, empty))


def _sizes(buckets: Iterable[StepBucket]) -> tuple[GraphSize, ...]:
    """Decodes first, then by size."""
    counts = Counter((not bucket.is_decode, bucket.num_tokens) for bucket in buckets)
    return tuple(
        GraphSize(num_tokens=num_tokens, has_prompts=has_prompts, num_graphs=count)
        for (has_prompts, num_tokens), count in sorted(counts.items())
    )


def _places(arrays: Iterable[StepArrays]) -> Iterable[tuple[HostArray, int]]:
    """Each array of a step, and where it begins in the packed ones."""
    end = 0
    for part in arrays:
        for array in part.arrays:
            yield array, end
            end = aligned(end + array.nbytes)


def _packed(bucket: StepBucket, arrays: list[StepArrays]) -> GraphStep:
    places = list(_places(arrays))
    array, begin = places[-1]
    packed = np.zeros(aligned(begin + array.nbytes), np.uint8)
    for array, begin in places:
        packed[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
    return GraphStep(bucket, arrays, packed)


def _views(arrays: Iterable[StepArrays], block: Tensor) -> Iterable[tuple[int, Tensor]]:
    """The arrays in `block`, which has packed ones, by their identity."""
    for array, begin in _places(arrays):
        part = block.narrow(0, begin, array.nbytes)
        yield id(array), part.view(torch_dtype(array)).view(array.shape)
