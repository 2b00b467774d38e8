"""A stage that holds the blocks of its steps, and checks its input.

The KV entry of a position is a hash of all tokens up to there. A stage writes the entries of a slice to the
pages of its block table and then reads the whole sequence back, so a wrong page, a hit that is none, or a
page that was given away too early shows as a wrong entry. The last stage "samples" a function of the newest
entry. A recurrent state is the entry of the last token that it has seen: a state of another sequence or
position shows as a wrong entry, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from coordinator.scheduler.policy import SchedulerLimits
from kvcache import BlockTables, KvGroup, StateSignal, StateTable, combined_digest
from tests.step_slices import all_signals
from wire.ids import SequenceKey
from wire.steps import Decode, Prefill, StartRecord, Step, StepSlice, TokenLogprobs

VOCAB_SIZE = 7


def kv_entry(before: int, token: int) -> int:
    """KV entry of `token` after the entry `before`."""
    return hash((before, token))


def kv_entries(tokens: Sequence[int]) -> list[int]:
    """One entry per token."""
    return list(accumulate(tokens, kv_entry, initial=0))[1:]


def sample(entry: int, choice: int = 0) -> int:
    """The token that follows the position with this entry."""
    return hash((entry, choice)) % VOCAB_SIZE


def score(entry: int, token: int, num_top: int) -> TokenLogprobs:
    """Logprobs of `token` after the position with this entry."""
    top = tuple((other, -(entry % 997 + other) / 997) for other in range(num_top))
    return TokenLogprobs(token, -(entry % 997) / 997, 1 + entry % VOCAB_SIZE, top)


@dataclass(slots=True)
class _Known:
    """State of a sequence on a stage."""

    start: StartRecord
    restart_count: int
    num_prefill_tokens: int
    tokens: list[int]
    entries: list[int]
    num_computed: int | None = None


class _Group:
    """Blocks of the layers with one window."""

    def __init__(self, num_blocks: int, block_size: int, window: int | None) -> None:
        self.tables = BlockTables(num_blocks, block_size=block_size)
        self._window, self._block_size = window, block_size
        self._slots: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]

    def write(self, key: SequenceKey, entries: list[int], start: int, end: int) -> None:
        """Write the entries that are no hits."""
        pages, first_block = self.tables.pages(key), self.tables.first_block(key)
        for run_start, run_end in self.tables.writable_runs(key, start, end):
            for position in range(run_start, run_end):
                block, offset = divmod(position, self._block_size)
                self._slots[pages[block - first_block]][offset] = entries[position]

    def check_entries(self, key: SequenceKey, entries: list[int], start: int, end: int) -> None:
        """Entries read by queries start..end-1 are present and correct."""
        first = 0 if self._window is None else max(0, start - self._window + 1)
        held_from = self.tables.first_block(key) * self._block_size
        assert held_from <= first, f"{key} sees from {first} on, and holds from {held_from} on"
        slots = [slot for page in self.tables.pages(key) for slot in self._slots[page]]
        seen = slots[first - held_from : end - held_from]
        assert seen == entries[first:end], f"{key} reads {seen}, expected {entries[first:end]}"


class StageReplica:
    """One stage in one epoch. A step fault of the design is an AssertionError here."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        limits: SchedulerLimits,
        window: int | None = None,
        other_groups: Sequence[KvGroup] = (),
        num_states: int = 0,
    ) -> None:
        """Queries see `window` positions including their own; None: all."""
        windows = [None if group.window is None else group.window.num_tokens for group in other_groups]
        self.groups = [
            _Group(count, block_size, seen)
            for count, seen in zip(
                (num_blocks, *(group.num_blocks for group in other_groups)), (window, *windows), strict=True
            )
        ]
        self.tables = self.groups[0].tables
        self.states = StateTable(num_states) if num_states else None
        self._entry_of_slot = [-1] * num_states
        self.sequences: dict[SequenceKey, _Known] = {}
        self.first_starts: dict[tuple[SequenceKey, int], int] = {}
        self._limits = limits
        self._block_size = block_size
        self._started: set[tuple[SequenceKey, int]] = set()
        self._next_step_id = 0

    def apply(self, step: Step) -> dict[SequenceKey, int]:
        """Runs a step; returns the sampled token of each final slice."""
        assert step.step_id == self._next_step_id, f"step {step.step_id}, expected {self._next_step_id}"
        self._next_step_id += 1
        assert step.num_tokens <= self._limits.max_step_tokens
        assert len(step.slices) <= self._limits.max_step_sequences
        assert len({part.sequence for part in step.slices}) == len(step.slices), "a sequence twice"
        self._apply_records(step)
        return {
            part.sequence: sample(self.sequences[part.sequence].entries[-1], part.sequence.choice)
            for part in step.slices
            if self._run(part)
        }

    def logprobs(self, part: StepSlice, token: int) -> TokenLogprobs | None:
        """Log-probabilities of the token sampled for a slice of the newest step, if requested."""
        known = self.sequences[part.sequence]
        num_top = known.start.sampling.logprobs
        return None if num_top is None else score(known.entries[-1], token, num_top)

    def prompt_logprobs(self, part: StepSlice) -> tuple[TokenLogprobs, ...]:
        """Logprobs of the prompt tokens after a slice of the newest step, if requested."""
        if not part.is_scored:
            return ()
        known, start = self.sequences[part.sequence], part.first_position
        end = min(start + len(part.tokens), known.start.num_prompt_tokens - 1)
        num_top = known.start.sampling.prompt_logprobs
        return tuple(score(known.entries[i], known.tokens[i + 1], num_top) for i in range(start, end))

    def check_idle(self) -> None:
        """No resource is held."""
        assert not self.sequences
        for group in self.groups:
            assert len(group.tables) == 0
            assert group.tables.pool.num_active == 0
            group.tables.check_integrity()
        if self.states is not None:
            assert self.states.pool.num_live == 0
            self.states.check_integrity()

    def _apply_records(self, step: Step) -> None:
        for end in step.ends:
            assert self.sequences[end.sequence].restart_count == end.restart_count, (
                "end with another restart count"
            )
            del self.sequences[end.sequence]
        for start in step.starts:
            self._start(start)
        for entry in all_signals(step):
            if isinstance(entry.signal, StateSignal):
                self._change_state(entry.sequence, entry.signal)
            else:
                self.groups[entry.group].tables.apply(entry.sequence, entry.signal)
        states = [] if self.states is None else [self.states.digest]
        digest = combined_digest([group.tables.digest for group in self.groups] + states)
        assert digest == step.digest, f"digest diverges in step {step.step_id}"
        for group in self.groups:
            tables = group.tables
            for end in step.ends:
                if end.sequence not in self.sequences and end.sequence in tables:
                    tables.drop(end.sequence)
            assert len(tables) == len(self.sequences), "a table of a sequence that has not started"

    def _change_state(self, key: SequenceKey, signal: StateSignal) -> None:
        assert self.states is not None
        if (change := self.states.apply(key, signal)) is not None:
            slots = self._entry_of_slot
            slots[change.target] = 0 if change.source is None else slots[change.source]

    def _advance_state(self, part: StepSlice, entries: list[int]) -> None:
        """The state continues from the entry before the slice to that of its last token."""
        if self.states is None:
            return
        start, end = part.first_position, part.first_position + len(part.tokens)
        slot = self.states.slot(part.sequence)
        assert self.states.position(part.sequence) == start, "a state of another position"
        assert self._entry_of_slot[slot] == (entries[start - 1] if start else 0), "a state of other tokens"
        self._entry_of_slot[slot] = entries[end - 1]
        self.states.advance(part.sequence, end)

    def _start(self, start: StartRecord) -> None:
        key, restart_count = start.sequence, start.restart_count
        assert key not in self.sequences, "start of a sequence that is live"
        assert (key, restart_count) not in self._started, "second start with one restart count"
        assert 0 < start.num_prompt_tokens <= len(start.tokens)
        self._started.add((key, restart_count))
        tokens = list(start.tokens)
        self.sequences[key] = _Known(start, restart_count, len(tokens), tokens, kv_entries(tokens))

    def _run(self, part: StepSlice) -> bool:
        """Whether a token is due."""
        known = self.sequences[part.sequence]
        assert part.restart_count == known.restart_count, "slice with another restart count"
        self._check_position(part, known)
        step = part.inference_step
        if isinstance(step, Decode):
            assert step.position == len(known.tokens), "decode before the prefill is complete"
            known.tokens.extend(part.tokens)
            known.entries.append(kv_entry(known.entries[-1], part.tokens[0]))
        else:
            self._check_chunk(part, step, known)
        start, end = part.first_position, part.first_position + len(part.tokens)
        known.num_computed = end
        for group in self.groups:
            group.write(part.sequence, known.entries, start, end)
            group.check_entries(part.sequence, known.entries, start, end)
        self._advance_state(part, known.entries)
        return part.is_sampled

    def _check_position(self, part: StepSlice, known: _Known) -> None:
        position = part.first_position
        if known.num_computed is None:
            valid = min(group.tables.valid_until(part.sequence) for group in self.groups)
            valid = min(valid, len(known.tokens) - 1)
            # A scored prompt shares its blocks but is computed from its first token.
            is_scored = known.start.sampling.prompt_logprobs is not None
            # One group may have hits of which the others lack the window.
            # A state may have been saved at fewer tokens.
            is_any = is_scored or len(self.groups) > 1 or self.states is not None
            is_first = position <= valid if is_any else position == valid
            assert is_first, f"begins at {position}, {valid} are cached"
            self.first_starts[part.sequence, part.restart_count] = position
        else:
            assert position == known.num_computed, f"position {position}, expected {known.num_computed}"

    def _check_chunk(self, part: StepSlice, step: Prefill, known: _Known) -> None:
        end = step.start + step.num_tokens
        assert step.num_prefill_tokens == known.num_prefill_tokens == len(known.tokens)
        assert list(part.tokens) == known.tokens[step.start : end]
        assert step.is_final or end % self._block_size == 0, "a chunk that ends inside a block"
