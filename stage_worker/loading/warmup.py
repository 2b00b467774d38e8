"""Warm-up: the first steps of a stage, in real shapes and through the regular executor."""

import time
from collections.abc import Iterator
from itertools import count

import torch

from checkpoint import Blueprint
from kvcache import ActiveSequence, BlockPool, combined_digest
from stage_worker.assignment import Assignment
from stage_worker.backends.tensor_views import to_frame
from stage_worker.executor import StepExecutor
from stage_worker.model.layer_weights import TORCH_DTYPES
from wire.frames import Frame
from wire.ids import RequestId, SequenceKey
from wire.sampling import StepSampling
from wire.steps import Decode, EndRecord, Prefill, SequenceSignal, StartRecord, Step, StepSlice

_SAMPLING = (
    StepSampling(temperature=0.0),
    StepSampling(temperature=1.0),
    StepSampling(temperature=1.0, top_k=40, top_p=0.95),
)
_FIRST_CHUNK = 16


def warm_up(executor: StepExecutor, assignment: Assignment, config: Blueprint, *, budget_s: float) -> None:
    """Run chunks and batches up to the largest sizes or `budget_s`, then reset. Raises StepFault."""
    started = time.perf_counter()
    steps = _WarmupSteps(executor, assignment, config)
    for sizes, run in (
        (_doubling(_FIRST_CHUNK, _largest_chunk(assignment)), steps.prefill),
        (_doubling(1, _largest_batch(assignment)), steps.decode),
    ):
        spent_before = time.perf_counter() - started
        last_s = 0.0
        for size in sizes:
            # Each size costs about twice the one before; half of the budget is for prefill.
            if last_s and time.perf_counter() - started + 2 * last_s > (budget_s + spent_before) / 2:
                break
            began = time.perf_counter()
            run(size)
            last_s = time.perf_counter() - began
    executor.begin_epoch(0, stage=assignment.stage)


def _doubling(first: int, largest: int) -> Iterator[int]:
    size = min(first, largest)
    while size < largest:
        yield size
        size *= 2
    yield largest


def _largest_chunk(assignment: Assignment) -> int:
    held = min(assignment.group_blocks) * assignment.block_size
    return min(assignment.max_step_tokens, assignment.max_sequence_tokens, held)


def _largest_batch(assignment: Assignment) -> int:
    return min(assignment.max_step_sequences, assignment.max_step_tokens, *assignment.group_blocks)


class _WarmupSteps:
    """Stands in for the coordinator: its own block pools yield signals and digests."""

    def __init__(self, executor: StepExecutor, assignment: Assignment, config: Blueprint) -> None:
        self._executor = executor
        self._assignment = assignment
        self._config = config
        self._pools = [BlockPool(num_blocks) for num_blocks in assignment.group_blocks]
        self._new_id = count(1).__next__
        self._step_id = 0
        self._num_requests = 0

    def prefill(self, num_tokens: int) -> None:
        """Run one sequence of `num_tokens` in one chunk."""
        self._run_batch(num_sequences=1, num_tokens=num_tokens, decodes=False)

    def decode(self, num_sequences: int) -> None:
        """Run one-token prompts, then a decode step if the limits leave room for a second token."""
        decodes = self._assignment.block_size > 1 and self._assignment.max_sequence_tokens > 1
        self._run_batch(num_sequences=num_sequences, num_tokens=1, decodes=decodes)

    def _run_batch(self, *, num_sequences: int, num_tokens: int, decodes: bool) -> None:
        keys = [self._new_key() for _ in range(num_sequences)]
        tokens = tuple(index % self._config.vocab_size for index in range(num_tokens))
        sequences = [
            ActiveSequence(
                tokens,
                block_size=self._assignment.block_size,
                max_output_tokens=1,
                prefix_caching=False,
                new_id=self._new_id,
                group=group,
            )
            for _ in keys
            for group in range(len(self._pools))
        ]
        keyed = list(zip([key for key in keys for _ in self._pools], sequences, strict=True))
        self._run(
            starts=tuple(
                StartRecord(key, 0, num_tokens, tokens, _SAMPLING[index % len(_SAMPLING)])
                for index, key in enumerate(keys)
            ),
            signals=[self._used(key, sequence) for key, sequence in keyed],
            slices=tuple(StepSlice(key, 0, tokens, Prefill(0, num_tokens, num_tokens)) for key in keys),
        )
        if decodes:
            self._run(slices=tuple(StepSlice(key, 0, tokens[:1], Decode(num_tokens)) for key in keys))
        freed = [
            SequenceSignal(key, signal, sequence.group)
            for key, sequence in keyed
            for signal in sequence.destroy_signals()
        ]
        self._run(ends=tuple(EndRecord(key, 0) for key in keys), signals=freed)

    def _used(self, key: SequenceKey, sequence: ActiveSequence) -> SequenceSignal:
        use = sequence.prepare(len(sequence))
        assert use is not None, "a prompt needs blocks"
        sequence.commit(len(sequence))
        return SequenceSignal(key, use, sequence.group)

    def _run(
        self,
        *,
        slices: tuple[StepSlice, ...] = (),
        starts: tuple[StartRecord, ...] = (),
        ends: tuple[EndRecord, ...] = (),
        signals: list[SequenceSignal] | None = None,
    ) -> None:
        for entry in signals or ():
            self._pools[entry.group].apply(entry.signal)
        step = Step.of(
            slices,
            epoch=0,
            step_id=self._step_id,
            starts=starts,
            ends=ends,
            signals=tuple(signals or ()),
            digest=combined_digest([pool.digest for pool in self._pools]),
        )
        self._step_id += 1
        self._executor.run(self._frame(step))

    def _frame(self, step: Step) -> Frame:
        assignment = self._assignment
        if assignment.role.has_embeddings or not step.num_slices:
            return Frame(step, ())
        generator = torch.Generator().manual_seed(0)
        hidden = [
            torch.randn((step.num_tokens, tensor.width), generator=generator).to(
                TORCH_DTYPES[tensor.dtype or assignment.dtype]
            )
            for tensor in self._config.boundary
        ]
        return Frame(step, to_frame(hidden, self._config.boundary, assignment.sent_dtype))

    def _new_key(self) -> SequenceKey:
        self._num_requests += 1
        return SequenceKey(RequestId(self._num_requests.to_bytes(16)), 0)
