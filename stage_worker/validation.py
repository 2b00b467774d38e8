"""Validates every frame before it is computed: sequences, positions, pages, limits."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, overload

from checkpoint import BoundaryTensor, DType
from kvcache import BlockTable, BlockTables, KvCacheError, StateTable
from stage_worker.assignment import Assignment
from wire.errors import StepFault, StepFaultKind
from wire.frames import Frame
from wire.ids import SequenceKey
from wire.sampling import StepSampling
from wire.steps import (
    Decode,
    Decodes,
    EndRecord,
    Prefill,
    StartRecord,
    Step,
    StepSlice,
    identity_of,
    key_of,
    split_identities,
    unpack_column,
)
from wire.tensors import TensorView, WireDType, can_carry, payload_bytes


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class SliceLayout:
    """Layout of one slice of a step. Immutable; not declared frozen, since that slows construction.

    Positions are absolute, counted from the sequence's first token. `pages[i]` is the physical page of block
    `first_block + i`; `first_block` is above 0 when a sliding window released the head of the sequence.
    Positions below `num_valid`, and those outside `writable_runs`, are not written; `writable_runs` are
    ordered (begin, end) positions, None for all positions of the slice.
    """

    first_position: int
    num_tokens: int
    pages: Sequence[int]
    first_block: int = 0
    num_valid: int = 0
    writable_runs: Sequence[tuple[int, int]] | None = None

    @property
    def end_position(self) -> int:
        return self.first_position + self.num_tokens

    def first_visible(self, window: int | None) -> int:
        """Earliest position that a query of the slice sees through `window`."""
        return 0 if window is None else max(0, self.first_position - window + 1)

    def check(self, block_size: int, window: int | None) -> None:
        """Raises ValueError if the pages lack positions that the slice needs."""
        if self.num_tokens < 1 or self.first_position < 0 or self.first_block < 0:
            raise ValueError(f"a slice of {self.num_tokens} tokens at {self.first_position} is impossible")
        held_end = (self.first_block + len(self.pages)) * block_size
        if self.end_position > held_end:
            raise ValueError(f"pages hold positions below {held_end}, the slice ends at {self.end_position}")
        held_begin = self.first_block * block_size
        if self.first_visible(window) < held_begin:
            raise ValueError(
                f"pages hold positions from {held_begin}, the slice at {self.first_position} sees"
                f" {self.first_visible(window)} with window {window}"
            )

    def visible_pages(self, block_size: int, window: int | None) -> tuple[int, Sequence[int]]:
        """The first visible block, and the pages from there to the slice's last position."""
        first = self.first_visible(window) // block_size
        end = (self.end_position - 1) // block_size + 1
        return first, self.pages[first - self.first_block : end - self.first_block]

    def written_runs(self) -> Iterator[tuple[int, int]]:
        """Positions that this slice writes, as ordered (begin, end) pairs."""
        runs = (
            ((self.first_position, self.end_position),) if self.writable_runs is None else self.writable_runs
        )
        for begin, end in runs:
            if max(begin, self.num_valid) < end:
                yield max(begin, self.num_valid), end

    def written_blocks(self, block_size: int) -> Iterator[tuple[int, int, int]]:
        """(page, begin, end) of every block that this slice writes: offsets [begin, end) within the page."""
        for position, run_end in self.written_runs():
            while position < run_end:
                block, begin = divmod(position, block_size)
                end = min(block_size, run_end - block * block_size)
                yield self.pages[block - self.first_block], begin, end
                position = (block + 1) * block_size


ENDED_REMEMBERED = 4096
"""Number of ended (sequence, restart) pairs kept to detect repeated start records."""
MAX_BATCHES = 64
"""Batches of decoding sequences kept: more than the steps in flight, which repeat them."""


@dataclass(slots=True)
class StageSequence:
    """One run of a sequence; the stage counts the computed tokens itself."""

    key: SequenceKey
    restart_count: int
    prefill_tokens: tuple[int, ...]
    num_prefill_tokens: int
    sampling: StepSampling
    num_computed: int | None = None
    decode_end: int = 0
    """End of the positions that decodes may use without another look at the block table."""

    def check(self, step_slice: StepSlice, *, valid_until: int) -> None:
        """Raises StepFault unless the slice continues this sequence, or begins in its cached tokens."""
        if step_slice.restart_count != self.restart_count:
            raise StepFault(
                StepFaultKind.SLICE_SET,
                f"slice of {self.key} restart count {step_slice.restart_count}, "
                f"restart count {self.restart_count} is live",
            )
        self._check_position(step_slice.first_position, valid_until)
        self._check_phase(step_slice)

    def advance(self, step_slice: StepSlice) -> None:
        """Count the tokens of a checked slice as computed; a finished prefill releases its tokens."""
        self.num_computed = step_slice.first_position + len(step_slice.tokens)
        if self.num_computed >= self.num_prefill_tokens:
            self.prefill_tokens = ()

    def _check_position(self, position: int, valid_until: int) -> None:
        if self.num_computed is None:
            if position > valid_until:
                raise StepFault(
                    StepFaultKind.POSITION,
                    f"{self.key} begins at position {position}, its cached tokens end at {valid_until}",
                )
        elif position != self.num_computed:
            raise StepFault(
                StepFaultKind.POSITION,
                f"slice of {self.key} at position {position}, "
                f"this stage has computed {self.num_computed} tokens",
            )

    def _check_phase(self, step_slice: StepSlice) -> None:
        step = step_slice.inference_step
        if not isinstance(step, Prefill):
            if (self.num_computed or 0) < self.num_prefill_tokens:
                raise StepFault(
                    StepFaultKind.SLICE_SET,
                    f"decode of {self.key} at {step.position}, "
                    f"before its {self.num_prefill_tokens} tokens are prefilled",
                )
            return
        if step.num_prefill_tokens != self.num_prefill_tokens:
            raise StepFault(
                StepFaultKind.SLICE_SET,
                f"chunk of {self.key} is of {step.num_prefill_tokens} tokens, "
                f"its start record has {self.num_prefill_tokens}",
            )
        if step_slice.tokens != self.prefill_tokens[step.start : step.start + step.num_tokens]:
            raise StepFault(
                StepFaultKind.SLICE_SET,
                f"tokens of {self.key} at {step.start} are not those of its start record",
            )


@dataclass(slots=True, eq=False, weakref_slot=True)
class DecodeBatch:
    """Sequences that decode in one step, in order; the same object for every such step."""

    sequences: list[StageSequence]


class StageSequences:
    """All live sequences of an epoch on one stage."""

    def __init__(self) -> None:
        self._live: dict[SequenceKey, StageSequence] = {}
        self._by_identity: dict[bytes, StageSequence] = {}
        self._batches: dict[bytes, DecodeBatch] = {}
        self._ended: OrderedDict[tuple[SequenceKey, int], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[StageSequence]:
        return iter(self._live.values())

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._live

    def start(self, record: StartRecord) -> None:
        """Raises StepFault RECORD for a repeated or inconsistent record."""
        key, restart_count = record.sequence, record.restart_count
        live = self._live.get(key)
        if live is not None:
            raise _bad_record(
                key,
                f"start of {key} restart count {restart_count}, restart count {live.restart_count} is live",
            )
        if (key, restart_count) in self._ended:
            raise _bad_record(key, f"start of {key} restart count {restart_count}, which has ended already")
        if not 0 < record.num_prompt_tokens <= len(record.tokens):
            raise _bad_record(
                key,
                f"start of {key} with {record.num_prompt_tokens} prompt tokens of {len(record.tokens)}",
            )
        state = StageSequence(key, restart_count, record.tokens, len(record.tokens), record.sampling)
        self._live[key] = self._by_identity[identity_of(key, restart_count)] = state
        self._batches.clear()

    def end(self, record: EndRecord) -> None:
        """Raises StepFault RECORD for a sequence or restart count that is not live."""
        key, restart_count = record.sequence, record.restart_count
        live = self._live.get(key)
        if live is None:
            raise _bad_record(key, f"end of {key} restart count {restart_count}, which is not live")
        if live.restart_count != restart_count:
            raise _bad_record(
                key, f"end of {key} restart count {restart_count}, restart count {live.restart_count} is live"
            )
        del self._live[key], self._by_identity[identity_of(key, restart_count)]
        self._batches.clear()
        self._ended[key, restart_count] = None
        if len(self._ended) > ENDED_REMEMBERED:
            self._ended.popitem(last=False)

    def decoding(self, decodes: Decodes) -> DecodeBatch:
        """Sequences of `decodes`, in order. Steady decoding repeats its batches, which are kept.

        Raises StepFault SLICE_SET for a sequence that was not started, or that is named twice.
        """
        batch = self._batches.get(decodes.identities)
        if batch is None:
            identities = split_identities(decodes.identities)
            sequences = [self._by_identity.get(identity) or self._stale(identity) for identity in identities]
            if len(set(identities)) < len(identities):
                raise _repeated([sequence.key for sequence in sequences])
            batch = DecodeBatch(sequences)
            if len(self._batches) >= MAX_BATCHES:
                self._batches.clear()
            self._batches[decodes.identities] = batch
        return batch

    def blocks_changed(self, key: SequenceKey) -> None:
        if (state := self._live.get(key)) is not None:
            state.decode_end = 0

    def grown(self, identity: bytes, rules: StepRules) -> SequenceKey:
        """Return the sequence of `identity`, which has a further block; decodes may use its positions."""
        state = self._by_identity.get(identity)
        if state is None:
            key, _ = key_of(identity)
            self.blocks_changed(key)
            return key
        if state.decode_end:
            state.decode_end = min(state.decode_end + rules.block_size, rules.max_sequence_tokens)
        return state.key

    def _stale(self, identity: bytes) -> NoReturn:
        sequence, restart_count = key_of(identity)
        live = self.get(sequence)
        raise StepFault(
            StepFaultKind.SLICE_SET,
            f"slice of {sequence} restart count {restart_count}, restart count {live.restart_count} is live",
        )

    def get(self, key: SequenceKey) -> StageSequence:
        """Raises StepFault SLICE_SET for a sequence that was not started."""
        state = self._live.get(key)
        if state is None:
            raise StepFault(
                StepFaultKind.SLICE_SET,
                f"slice of {key}, which was not started",
                request_ids=(key.request_id,),
            )
        return state


def _bad_record(key: SequenceKey, message: str) -> StepFault:
    return StepFault(StepFaultKind.RECORD, message, request_ids=(key.request_id,))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """Upper bounds of every step of a stage."""

    takes_hidden: bool
    boundary: tuple[BoundaryTensor, ...]
    vocab_size: int
    dtype: DType
    block_size: int
    max_step_tokens: int
    max_step_sequences: int
    max_sequence_tokens: int

    @classmethod
    def of(
        cls, assignment: Assignment, *, boundary: tuple[BoundaryTensor, ...], vocab_size: int
    ) -> StepRules:
        """Rules for the stage of `assignment`, with boundary and vocabulary of its model."""
        return cls(
            takes_hidden=not assignment.role.has_embeddings,
            boundary=boundary,
            vocab_size=vocab_size,
            dtype=assignment.dtype,
            block_size=assignment.block_size,
            max_step_tokens=assignment.max_step_tokens,
            max_step_sequences=assignment.max_step_sequences,
            max_sequence_tokens=assignment.max_sequence_tokens,
        )

    def max_hidden_bytes(self, wire_dtype: WireDType) -> int:
        """Largest payload of a frame into this stage, with hidden states in `wire_dtype`."""
        if not self.takes_hidden:
            return 0
        return sum(
            payload_bytes(tensor.dtype or wire_dtype, (self.max_step_tokens, tensor.width))
            for tensor in self.boundary
        )


def check_hidden_states(frame: Frame, rules: StepRules) -> None:
    """Hidden states must be present exactly when expected, with right names, shapes and dtypes."""
    hidden, step = frame.hidden, frame.step
    if not hidden:
        if rules.takes_hidden and step.num_slices:
            raise StepFault(
                StepFaultKind.HIDDEN_STATES_MISSING,
                f"no hidden states for {step.num_tokens} tokens of {step.num_slices} slices",
            )
        return
    if not rules.takes_hidden or not step.num_slices:
        why = "the first stage takes tokens" if step.num_slices else "the step has no slices"
        raise StepFault(
            StepFaultKind.HIDDEN_STATES_UNEXPECTED, f"unexpected hidden states {hidden[0].shape}: {why}"
        )
    names, expected = [[tensor.name for tensor in tensors] for tensors in (hidden, rules.boundary)]
    if names != expected:
        raise StepFault(
            StepFaultKind.SHAPE, f"tensors {names!r:.200} in the frame, expected {', '.join(expected)}"
        )
    for received, tensor in zip(hidden, rules.boundary, strict=True):
        _check_tensor(received, tensor, step.num_tokens, rules.dtype)


def _check_tensor(received: TensorView, tensor: BoundaryTensor, num_tokens: int, run_dtype: DType) -> None:
    dtype, expected = received.dtype, tensor.dtype or run_dtype
    if dtype is not expected and (tensor.dtype is not None or not can_carry(dtype, run_dtype)):
        raise StepFault(StepFaultKind.DTYPE, f"{received.label} in {dtype.value}, expected {expected.value}")
    if received.shape != (num_tokens, tensor.width):
        raise StepFault(
            StepFaultKind.SHAPE,
            f"{received.label} {received.shape} for {num_tokens} tokens of width {tensor.width}",
        )


def check_limits(step: Step, rules: StepRules) -> None:
    """Check the number of tokens and sequences, and that no sequence has two slices."""
    if step.num_tokens > rules.max_step_tokens:
        raise _slice_set(f"{step.num_tokens} tokens in one step, the limit is {rules.max_step_tokens}")
    if step.num_slices > rules.max_step_sequences:
        raise _slice_set(f"{step.num_slices} sequences in one step, the limit is {rules.max_step_sequences}")


def _repeated(keys: Sequence[SequenceKey]) -> StepFault:
    key = next(key for key, count in Counter(keys).items() if count > 1)
    return _slice_set(f"two slices of {key} in one step")


class StepSlices(Sequence[SliceLayout]):
    """The checked slices of a step: the batch of its decodes, and the layout of every slice by row.

    `chunks` are the layouts of its chunks. Layouts of decodes are made when first read: mocks do not need
    them, and models only where `are_decodes_plain` is false. They belong to the first block group;
    `groups` has the slices in every group. `states` are the recurrent states of the sequences; None in
    models without.
    """

    def __init__(
        self,
        step: Step,
        decodes: DecodeBatch,
        chunks: list[SliceLayout],
        tables: BlockTables,
        others: Sequence[StepSlices] = (),
        states: StateTable | None = None,
    ) -> None:
        self._others = tuple(others)
        self._states = states
        self.decodes = decodes
        self.chunks = chunks
        self._columns = step.decodes
        self._step = step
        self._tables = tables
        self._layouts: list[SliceLayout] | None = None

    @property
    def groups(self) -> tuple[StepSlices, ...]:
        """The slices in every block group, these first."""
        return (self, *self._others)

    @property
    def positions(self) -> tuple[int, ...]:
        """Absolute positions of the decodes."""
        return unpack_column(self._columns.positions)

    @property
    def are_decodes_plain(self) -> bool:
        """There are decodes, and each writes its position."""
        sequences = self.decodes.sequences
        return bool(sequences) and all(sequence.decode_end for sequence in sequences)

    def block_tables(self) -> list[BlockTable]:
        """Return the tables of the decodes, which stay the same for every step of the batch."""
        return [self._tables.table(sequence.key) for sequence in self.decodes.sequences]

    def state_slots(self) -> list[int]:
        """Return the slot of each slice's recurrent state, now; empty in models without."""
        if self._states is None:
            return []
        keys = [sequence.key for sequence in self.decodes.sequences]
        keys += [chunk.sequence for chunk in self._step.chunks]
        return [self._states.slot(key) for key in keys]

    def __len__(self) -> int:
        return len(self.decodes.sequences) + len(self.chunks)

    @overload
    def __getitem__(self, index: int) -> SliceLayout: ...

    @overload
    def __getitem__(self, index: slice) -> list[SliceLayout]: ...

    def __getitem__(self, index: int | slice) -> SliceLayout | list[SliceLayout]:
        return self._made()[index]

    def advance(self, sequences: StageSequences) -> None:
        for sequence in self.decodes.sequences:
            assert sequence.num_computed is not None
            sequence.num_computed += 1
        for chunk in self._step.chunks:
            sequences.get(chunk.sequence).advance(chunk)
        if self._states is not None:
            for sequence in self.decodes.sequences:
                self._states.advance(sequence.key, sequence.num_computed or 0)
            for chunk in self._step.chunks:
                self._states.advance(chunk.sequence, chunk.first_position + len(chunk.tokens))

    def _made(self) -> list[SliceLayout]:
        if self._layouts is None:
            rows = zip(self.decodes.sequences, self.positions, strict=True)
            layouts = [_decode_layout(self._tables, sequence.key, position) for sequence, position in rows]
            self._layouts = [*layouts, *self.chunks]
        return self._layouts


def check_slices(
    step: Step,
    sequences: StageSequences,
    groups: Sequence[BlockTables],
    rules: StepRules,
    states: StateTable | None = None,
) -> StepSlices:
    """Check every slice against its sequence, its blocks in each group, and its state. Raises StepFault."""
    batch = sequences.decoding(step.decodes) if step.decodes else DecodeBatch([])
    if step.chunks:
        keys = [sequence.key for sequence in batch.sequences] + [chunk.sequence for chunk in step.chunks]
        if len(set(keys)) < len(keys):
            raise _repeated(keys)
    _check_decodes(step.decodes, batch.sequences, sequences, groups, rules)
    chunks = [[_slice_layout(chunk, sequences, tables, rules) for chunk in step.chunks] for tables in groups]
    others = [
        StepSlices(step, batch, layouts, tables)
        for layouts, tables in zip(chunks[1:], groups[1:], strict=True)
    ]
    if states is not None:
        _check_states(step, batch.sequences, states)
    return StepSlices(step, batch, chunks[0], groups[0], others, states)


def _check_states(step: Step, decoding: list[StageSequence], states: StateTable) -> None:
    """Check that the state of each sequence has seen exactly the tokens before its slice."""
    positions = unpack_column(step.decodes.positions)
    slices = [(sequence.key, position) for sequence, position in zip(decoding, positions, strict=True)]
    slices += [(chunk.sequence, chunk.first_position) for chunk in step.chunks]
    for key, position in slices:
        try:
            seen = states.position(key)
        except KvCacheError as error:
            raise StepFault(StepFaultKind.POSITION, f"slice of {key}: {error}") from error
        if seen != position:
            raise StepFault(
                StepFaultKind.POSITION,
                f"slice of {key} at position {position}, its recurrent state has seen {seen} tokens",
            )


def _check_decodes(
    decodes: Decodes,
    decoding: list[StageSequence],
    sequences: StageSequences,
    groups: Sequence[BlockTables],
    rules: StepRules,
) -> None:
    tokens, positions = unpack_column(decodes.tokens), unpack_column(decodes.positions)
    is_known = max(tokens, default=0) < rules.vocab_size
    for row, (sequence, position) in enumerate(zip(decoding, positions, strict=True)):
        if is_known and position == sequence.num_computed and position < sequence.decode_end:
            continue
        decode = StepSlice(sequence.key, sequence.restart_count, (tokens[row],), Decode(position))
        sequence.decode_end = min(_decode_end(decode, sequences, tables, rules) for tables in groups)


def _decode_end(decode: StepSlice, sequences: StageSequences, tables: BlockTables, rules: StepRules) -> int:
    """End of the positions that decodes may use, from `decode`'s on; 0 unless it writes them all."""
    key, position = decode.sequence, decode.first_position
    layout = _slice_layout(decode, sequences, tables, rules)
    held_end = min((layout.first_block + len(layout.pages)) * rules.block_size, rules.max_sequence_tokens)
    is_plain = tables.writable_runs(key, position, held_end) == [(position, held_end)]
    return held_end if is_plain else 0


def _decode_layout(tables: BlockTables, key: SequenceKey, position: int) -> SliceLayout:
    """Layout of a checked decode."""
    placed = tables.placed(key, position, position + 1)
    return SliceLayout(
        first_position=position,
        num_tokens=1,
        pages=placed.pages,
        first_block=placed.first_block,
        num_valid=placed.valid_until,
        writable_runs=placed.writable_runs,
    )


def _slice_layout(
    step_slice: StepSlice, sequences: StageSequences, tables: BlockTables, rules: StepRules
) -> SliceLayout:
    key, first_position, num_tokens = step_slice.sequence, step_slice.first_position, len(step_slice.tokens)
    end_position = first_position + num_tokens
    _check_tokens(step_slice, end_position, rules)
    placed = tables.placed(key, first_position, end_position)
    sequences.get(key).check(step_slice, valid_until=placed.valid_until)
    if placed.writable_runs is None:
        held_begin = placed.first_block * rules.block_size
        held_end = held_begin + len(placed.pages) * rules.block_size
        raise StepFault(
            StepFaultKind.POSITION,
            f"slice of {key} at positions [{first_position}, {end_position}), its blocks hold "
            f"[{held_begin}, {held_end})",
        )
    return SliceLayout(
        first_position=first_position,
        num_tokens=num_tokens,
        pages=placed.pages,
        first_block=placed.first_block,
        num_valid=placed.valid_until,
        writable_runs=placed.writable_runs,
    )


def _check_tokens(step_slice: StepSlice, end: int, rules: StepRules) -> None:
    """`end` is one past the last position of the slice."""
    step, tokens = step_slice.inference_step, step_slice.tokens
    if len(tokens) != (step.num_tokens if isinstance(step, Prefill) else 1):
        raise _slice_set(f"slice of {step_slice.sequence} has {len(tokens)} tokens, which {step} contradicts")
    if max(tokens) >= rules.vocab_size:
        raise _slice_set(
            f"token {max(tokens)} of {step_slice.sequence} for a vocabulary of {rules.vocab_size}"
        )
    if end > rules.max_sequence_tokens:
        raise _slice_set(
            f"{step_slice.sequence} reaches {end} tokens, the limit is {rules.max_sequence_tokens}"
        )
    if isinstance(step, Prefill) and not step.is_final and end % rules.block_size:
        raise _slice_set(
            f"chunk of {step_slice.sequence} ends at {end}, neither the prompt's end nor a boundary of "
            f"blocks of {rules.block_size} tokens"
        )


def _slice_set(message: str) -> StepFault:
    return StepFault(StepFaultKind.SLICE_SET, message)
