"""Warm-up: the first steps of a stage, in real shapes and through the regular executor."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch

from checkpoint import Blueprint
from kvcache import (
    ActiveSequence,
    BlockPool,
    FreeState,
    KvWindow,
    LiveState,
    StatePool,
    StateSignal,
    TakeState,
    combined_digest,
    first_needed_block,
    group_windows,
)
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
    states = [assignment.num_states] if assignment.num_states else []
    limits = (assignment.max_step_sequences, assignment.max_step_tokens)
    return min(*limits, *assignment.group_blocks, *states)


def run_largest_step(executor: StepExecutor, assignment: Assignment, config: Blueprint) -> None:
    """Run a step that takes the most memory, then reset: a chunk behind the longest history, and decodes of
    all other sequences behind as much history as the KV cache holds. Then run one token behind the longest
    history of all: kernels of a step without a chunk may be others, and those decodes may have no history.

    Nothing computes the histories, whose pages and recurrent states have zeros. Raises StepFault.
    """
    steps = _WarmupSteps(executor, assignment, config)
    batch = LargestStep.of(assignment, config)
    decoding = [steps.add_cached(number + 1, batch.decoded_blocks, 1) for number in range(batch.num_decodes)]
    chunk = steps.add_cached(0, batch.chunk_blocks, batch.chunk_tokens)
    steps.run_behind_history(decoding, chunk)
    alone = LargestStep.of(replace(assignment, max_step_sequences=1, max_step_tokens=1), config)
    steps.run_behind_history([], steps.add_cached(0, alone.chunk_blocks, alone.chunk_tokens))
    executor.begin_epoch(0, stage=assignment.stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestStep:
    """A chunk of `chunk_tokens` behind `chunk_blocks` blocks, and decodes behind `decoded_blocks` each."""

    num_decodes: int
    decoded_blocks: int
    chunk_tokens: int
    chunk_blocks: int

    @classmethod
    def of(cls, assignment: Assignment, config: Blueprint) -> LargestStep:
        """Within the limits of `assignment`: as many decodes and tokens as possible, then the longest history
        of the chunk, then the histories of the decodes.
        """
        size, longest, groups = assignment.block_size, assignment.max_sequence_tokens, assignment.group_blocks
        visible = [_most_visible(window, size) for window in group_windows(config.cache_windows)]
        own = -(-2 // size)  # blocks of a decode: the last token of its prompt, and a second one
        states = assignment.num_states or _ANY
        sequences = min(assignment.max_step_sequences, states)
        num_decodes = min(sequences, assignment.max_step_tokens, min(groups) // own) - 1
        num_decodes = max(0, num_decodes) if longest > 1 else 0
        free = [blocks - own * num_decodes for blocks in groups]
        tokens = min(assignment.max_step_tokens - num_decodes, longest, min(free) * size)
        free = [blocks - -(-tokens // size) for blocks in free]
        chunk = min((longest - tokens) // size, *_histories(visible, free))
        share = [
            (blocks - min(chunk, most)) // max(1, num_decodes)
            for blocks, most in zip(free, visible, strict=True)
        ]
        decoded = min((longest - 2) // size, *_histories(visible, share)) if num_decodes else 0
        return cls(num_decodes=num_decodes, decoded_blocks=decoded, chunk_tokens=tokens, chunk_blocks=chunk)


_ANY = 1 << 40


def _most_visible(window: int | None, block_size: int) -> int:
    """Blocks of a history that a query sees at most."""
    return _ANY if window is None else -(-window // block_size) + 1


def _histories(visible: Sequence[int], free: Sequence[int]) -> list[int]:
    """Blocks of the longest history in each group."""
    return [_ANY if blocks >= most else blocks for most, blocks in zip(visible, free, strict=True)]


@dataclass(frozen=True, slots=True)
class _Cached:
    """A sequence behind `num_cached` tokens of history, with its blocks in each group, and its state."""

    key: SequenceKey
    tokens: tuple[int, ...]
    num_cached: int
    groups: list[ActiveSequence]
    state: LiveState | None = None

    @property
    def start(self) -> StartRecord:
        return StartRecord(self.key, 0, len(self.tokens), self.tokens, _SAMPLING[self.tokens[0] % 3])

    @property
    def prefill(self) -> StepSlice:
        tokens = self.tokens[self.num_cached :]
        return StepSlice(self.key, 0, tokens, Prefill(self.num_cached, len(tokens), len(self.tokens)))


class _WarmupSteps:
    """Stands in for the coordinator: its own block pools yield signals and digests."""

    def __init__(self, executor: StepExecutor, assignment: Assignment, config: Blueprint) -> None:
        self._executor = executor
        self._assignment = assignment
        self._config = config
        self._pools = [BlockPool(num_blocks) for num_blocks in assignment.group_blocks]
        self._states = StatePool(assignment.num_states) if assignment.num_states else None
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

    def add_cached(self, number: int, num_blocks: int, num_tokens: int) -> _Cached:
        """Begin a sequence of `num_tokens` behind `num_blocks` blocks that count as cached.

        Its tokens are unlike those of other numbers.
        """
        history, vocab_size = num_blocks * self._assignment.block_size, self._config.vocab_size
        pair = [number % vocab_size, number // vocab_size % vocab_size]
        tokens = tuple((pair * (history + num_tokens))[: history + num_tokens])
        if history:
            cached = _Cached(self._new_key(), tokens[:history], 0, self._groups(tokens[:history], history))
            self._run(starts=(cached.start,), signals=self._uses(cached))
            freed = [
                SequenceSignal(cached.key, signal, group.group)
                for group in cached.groups
                for signal in group.free_signals()
            ]
            self._run(ends=(EndRecord(cached.key, 0),), signals=freed)
        state = None if self._states is None else LiveState(self._new_id())
        return _Cached(self._new_key(), tokens, history, self._groups(tokens, history), state)

    def run_behind_history(self, decoding: Sequence[_Cached], chunk: _Cached) -> None:
        """Compute the last tokens of `decoding`, then decode them beside `chunk`."""
        everything = [*decoding, chunk]
        self._begin(decoding)
        self._run(slices=tuple(one.prefill for one in decoding))
        self._begin([chunk])
        grown = [
            SequenceSignal(one.key, signal, group.group)
            for one in decoding
            for group in one.groups
            for signal in group.push(0)
        ]
        self._run(
            signals=grown,
            slices=(
                *(StepSlice(one.key, 0, (0,), Decode(len(one.tokens))) for one in decoding),
                chunk.prefill,
            ),
        )
        freed = [
            SequenceSignal(one.key, signal, group.group)
            for one in everything
            for group in one.groups
            for signal in group.destroy_signals()
        ]
        states = ((one.key, one.state) for one in everything)
        freed += [SequenceSignal(key, FreeState(state)) for key, state in states if state is not None]
        self._run(ends=tuple(EndRecord(one.key, 0) for one in everything), signals=freed)

    def _begin(self, sequences: Sequence[_Cached]) -> None:
        """Run the step in which `sequences` begin behind their histories."""
        self._run(
            starts=tuple(one.start for one in sequences),
            signals=[signal for one in sequences for signal in self._uses(one)],
        )
        for one in sequences:
            self._executor.assume_history(one.key, one.num_cached)

    def _groups(self, tokens: tuple[int, ...], history: int) -> list[ActiveSequence]:
        """The blocks of a sequence, without those that no query behind `history` tokens sees."""
        assignment, found = self._assignment, []
        for number, width in enumerate(group_windows(self._config.cache_windows)):
            sequence = ActiveSequence(
                tokens,
                block_size=assignment.block_size,
                max_output_tokens=1,
                new_id=self._new_id,
                group=number,
            )
            window = KvWindow.of(width, assignment.max_step_tokens)
            sequence.skip_blocks(first_needed_block(window, history, assignment.block_size))
            found.append(sequence)
        return found

    def _uses(self, one: _Cached) -> list[SequenceSignal]:
        taken = [] if one.state is None else [SequenceSignal(one.key, TakeState(one.state))]
        return [*taken, *(self._used(one.key, group) for group in one.groups)]

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
        states = [LiveState(self._new_id()) for _ in keys] if self._states is not None else []
        taken = [SequenceSignal(key, TakeState(state)) for key, state in zip(keys, states, strict=False)]
        keyed = list(zip([key for key in keys for _ in self._pools], sequences, strict=True))
        self._run(
            starts=tuple(
                StartRecord(key, 0, num_tokens, tokens, _SAMPLING[index % len(_SAMPLING)])
                for index, key in enumerate(keys)
            ),
            signals=[*taken, *(self._used(key, sequence) for key, sequence in keyed)],
            slices=tuple(StepSlice(key, 0, tokens, Prefill(0, num_tokens, num_tokens)) for key in keys),
        )
        if decodes:
            self._run(slices=tuple(StepSlice(key, 0, tokens[:1], Decode(num_tokens)) for key in keys))
        freed = [
            SequenceSignal(key, signal, sequence.group)
            for key, sequence in keyed
            for signal in sequence.destroy_signals()
        ]
        freed += [SequenceSignal(key, FreeState(state)) for key, state in zip(keys, states, strict=False)]
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
            if not isinstance(entry.signal, StateSignal):
                self._pools[entry.group].apply(entry.signal)
            elif self._states is not None:
                self._states.apply(entry.signal)
        states = [] if self._states is None else [self._states.digest]
        step = Step.of(
            slices,
            epoch=0,
            step_id=self._step_id,
            starts=starts,
            ends=ends,
            signals=tuple(signals or ()),
            digest=combined_digest([pool.digest for pool in self._pools] + states),
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
