"""Valid steps of any shape, as a coordinator would send them; the tokens are made up.

The scheduler decides what a step has, so the real accounting is used without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.scheduler.kv_manager import KvCacheManager
from kvcache import ActiveSequence
from stage_worker.assignment import Assignment
from wire.ids import SequenceKey, new_request_id
from wire.sampling import StepSampling
from wire.steps import (
    NO_DECODES,
    Decodes,
    EndRecord,
    Prefill,
    StartRecord,
    Step,
    StepSlice,
    identity_of,
    pack_column,
)

FIRST_EPOCH = 1


@dataclass(slots=True)
class BenchSequence:
    """A sequence whose first `num_computed` tokens are in steps."""

    key: SequenceKey
    active: ActiveSequence
    sampling: StepSampling
    num_computed: int = 0

    @property
    def num_left(self) -> int:
        """Tokens of the prompt that are not in a step yet."""
        return self.active.num_prompt_tokens - self.num_computed


class StepMaker:
    """Owns the ledger of one epoch of one stage; steps must be computed in the order they are made in."""

    def __init__(self, assignment: Assignment, *, vocab_size: int) -> None:
        self._kv = KvCacheManager(num_blocks=assignment.num_blocks, block_size=assignment.block_size)
        self._max_tokens = assignment.max_sequence_tokens
        self._max_step_tokens = assignment.max_step_tokens
        self._vocab_size = vocab_size
        self._num_steps = self._num_sequences = 0
        self._ended: list[BenchSequence] = []

    def sequence(self, num_tokens: int, sampling: StepSampling | None = None) -> BenchSequence:
        """A new sequence with a prompt of `num_tokens`, greedy by default, that shares no block."""
        self._num_sequences += 1
        tokens = tuple((self._num_sequences * 7919 + 31 * i) % self._vocab_size for i in range(num_tokens))
        active = self._kv.new_sequence(
            tokens, max_output_tokens=self._max_tokens - num_tokens, salt=self._num_sequences
        )
        return BenchSequence(SequenceKey(new_request_id(), 0), active, sampling or StepSampling())

    def end(self, sequences: Sequence[BenchSequence]) -> None:
        """Free the blocks of sequences, with the next step."""
        for sequence in sequences:
            self._kv.free_blocks(sequence.key, sequence.active, keep_content=False)
        self._ended += sequences

    def chunks(self, work: Sequence[tuple[BenchSequence, int]]) -> Step:
        """A step with the next n tokens of the prompt of each sequence."""
        starts, slices = [], []
        for sequence, num_tokens in work:
            begin, end = sequence.num_computed, sequence.num_computed + num_tokens
            tokens = tuple(sequence.active.tokens)
            if begin == 0:
                starts.append(StartRecord(sequence.key, 0, len(tokens), tokens, sequence.sampling))
            self._kv.allocate(sequence.key, sequence.active, end)
            inference = Prefill(begin, num_tokens, len(tokens))
            slices.append(StepSlice(sequence.key, 0, tokens[begin:end], inference))
            sequence.num_computed = end
        return self._step(starts=tuple(starts), chunks=tuple(slices))

    def prompts(self, sequences: Sequence[BenchSequence]) -> list[Step]:
        """Steps as large as possible that compute the whole prompts."""
        steps: list[Step] = []
        work: list[tuple[BenchSequence, int]] = []
        room = self._max_step_tokens
        for sequence in sequences:
            while sequence.num_left:
                num_tokens = min(sequence.num_left, self._max_step_tokens)
                if num_tokens > room:
                    steps.append(self.chunks(work))
                    work, room = [], self._max_step_tokens
                if num_tokens == sequence.num_left:
                    work.append((sequence, num_tokens))
                    room -= num_tokens
                    break
                steps.append(self.chunks([(sequence, num_tokens)]))
        return [*steps, self.chunks(work)] if work else steps

    def decodes(self, sequences: Sequence[BenchSequence]) -> Step:
        """A step with one token of each sequence, as columns."""
        tokens, positions = [], []
        for sequence in sequences:
            token = (self._num_steps * 131 + sequence.num_computed) % self._vocab_size
            positions.append(len(sequence.active))
            self._kv.push(sequence.key, sequence.active, token)
            sequence.num_computed += 1
            tokens.append(token)
        identities = b"".join([identity_of(sequence.key, 0) for sequence in sequences])
        return self._step(decodes=Decodes(identities, pack_column(tokens), pack_column(positions)))

    def _step(
        self,
        *,
        decodes: Decodes = NO_DECODES,
        chunks: tuple[StepSlice, ...] = (),
        starts: tuple[StartRecord, ...] = (),
    ) -> Step:
        step = Step(
            epoch=FIRST_EPOCH,
            step_id=self._num_steps,
            decodes=decodes,
            chunks=chunks,
            starts=starts,
            ends=tuple(EndRecord(sequence.key, 0) for sequence in self._ended),
            signals=self._kv.take_pending(),
            digest=self._kv.digest,
        )
        self._ended = []
        self._num_steps += 1
        return step
