"""Validates every frame before it is computed: sequences, positions, pages, limits."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from checkpoint import DType
from kvcache import BlockTables
from stage_worker.assignment import Assignment
from wire.errors import StepFault, StepFaultKind
from wire.frames import Frame
from wire.ids import SequenceKey
from wire.steps import EndRecord, Prefill, StartRecord, Step, StepSampling, StepSlice
from wire.tensors import WireDType, can_carry, payload_bytes


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class SliceLayout:
    """One sequence's part of a step. Not modified once it is made; declaring it frozen would make it slow.

    Positions are absolute, counted from the sequence's first token. `pages[i]` is the physical page of block
    `first_block + i`; `first_block` is above 0 when a sliding window released the head of the sequence. The
    KV slots of the positions below `num_valid` are valid already and are not written again, nor are those
    outside `writable_runs`: (begin, end) positions in order, None for everything that the slice computes.
    """

    first_position: int
    num_tokens: int
    pages: Sequence[int]
    first_block: int = 0
    num_valid: int = 0
    writable_runs: Sequence[tuple[int, int]] | None = None

    @property
    def end_position(self) -> int:
        """One past the last position computed."""
        return self.first_position + self.num_tokens

    def first_visible(self, window: int | None) -> int:
        """The earliest position that any of the slice's queries sees through `window`."""
        return 0 if window is None else max(0, self.first_position - window + 1)

    def check(self, block_size: int, window: int | None) -> None:
        """Raise ValueError, with the numbers, unless the pages hold all positions that the slice needs."""
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
        """The first block that a query sees, and the pages from there to the slice's last position."""
        first = self.first_visible(window) // block_size
        end = (self.end_position - 1) // block_size + 1
        return first, self.pages[first - self.first_block : end - self.first_block]

    def written_runs(self) -> Iterator[tuple[int, int]]:
        """The positions that this slice writes, as (begin, end) pairs in order."""
        runs = (
            ((self.first_position, self.end_position),) if self.writable_runs is None else self.writable_runs
        )
        for begin, end in runs:
            if max(begin, self.num_valid) < end:
                yield max(begin, self.num_valid), end

    def written_blocks(self, block_size: int) -> Iterator[tuple[int, int, int]]:
        """(page, begin, end) of every block this slice writes: offsets [begin, end) within the page."""
        for position, run_end in self.written_runs():
            while position < run_end:
                block, begin = divmod(position, block_size)
                end = min(block_size, run_end - block * block_size)
                yield self.pages[block - self.first_block], begin, end
                position = (block + 1) * block_size


ENDED_REMEMBERED = 4096
"""Ended (sequence, generation) pairs that are remembered, so that a repeated start record is noticed."""


@dataclass(slots=True)
class StageSequence:
    """One (sequence, generation). The stage counts by itself how far it has computed."""

    key: SequenceKey
    generation: int
    prefill_tokens: tuple[int, ...]
    num_prefill_tokens: int
    sampling: StepSampling
    num_computed: int | None = None

    def check(self, part: StepSlice, *, valid_until: int) -> None:
        """Raises StepFault unless `part` is what comes next in this sequence.

        A fresh sequence may begin anywhere inside its `valid_until` cached tokens; from then on, positions
        are strictly consecutive.
        """
        if part.generation != self.generation:
            raise StepFault(
                StepFaultKind.SLICE_SET,
                f"slice of {self.key} generation {part.generation}, generation {self.generation} is live",
            )
        self._check_position(part.first_position, valid_until)
        self._check_phase(part)

    def advance(self, part: StepSlice) -> None:
        """Counts the tokens of a checked slice as computed; a prefill that is done needs no tokens."""
        self.num_computed = part.first_position + len(part.tokens)
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

    def _check_phase(self, part: StepSlice) -> None:
        step = part.inference_step
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
        if part.tokens != self.prefill_tokens[step.start : step.start + step.num_tokens]:
            raise StepFault(
                StepFaultKind.SLICE_SET,
                f"tokens of {self.key} at {step.start} are not those of its start record",
            )


class StageSequences:
    """All live sequences of an epoch on one stage."""

    def __init__(self) -> None:
        self._live: dict[SequenceKey, StageSequence] = {}
        self._ended: OrderedDict[tuple[SequenceKey, int], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[StageSequence]:
        return iter(self._live.values())

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._live

    def start(self, record: StartRecord) -> None:
        """Raises StepFault RECORD for a second record of one generation, or one that contradicts itself."""
        key, generation = record.sequence, record.generation
        live = self._live.get(key)
        if live is not None:
            raise _bad_record(
                key, f"start of {key} generation {generation}, generation {live.generation} is live"
            )
        if (key, generation) in self._ended:
            raise _bad_record(key, f"start of {key} generation {generation}, which has ended already")
        if not 0 < record.num_prompt_tokens <= len(record.tokens):
            raise _bad_record(
                key,
                f"start of {key} with {record.num_prompt_tokens} prompt tokens of {len(record.tokens)}",
            )
        self._live[key] = StageSequence(key, generation, record.tokens, len(record.tokens), record.sampling)

    def end(self, record: EndRecord) -> None:
        """Raises StepFault RECORD for a sequence or generation that is not live."""
        key, generation = record.sequence, record.generation
        live = self._live.get(key)
        if live is None:
            raise _bad_record(key, f"end of {key} generation {generation}, which is not live")
        if live.generation != generation:
            raise _bad_record(
                key, f"end of {key} generation {generation}, generation {live.generation} is live"
            )
        del self._live[key]
        self._ended[key, generation] = None
        if len(self._ended) > ENDED_REMEMBERED:
            self._ended.popitem(last=False)

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
    """The bounds that every step of a stage keeps."""

    takes_hidden: bool
    hidden_size: int
    vocab_size: int
    dtype: DType
    block_size: int
    max_step_tokens: int
    max_step_sequences: int
    max_sequence_tokens: int

    @classmethod
    def of(cls, assignment: Assignment, *, hidden_size: int, vocab_size: int) -> StepRules:
        """The rules for the stage that `assignment` describes; the sizes are those of its model."""
        return cls(
            takes_hidden=not assignment.role.has_embeddings,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            dtype=assignment.dtype,
            block_size=assignment.block_size,
            max_step_tokens=assignment.max_step_tokens,
            max_step_sequences=assignment.max_step_sequences,
            max_sequence_tokens=assignment.max_sequence_tokens,
        )

    def max_hidden_bytes(self, wire_dtype: WireDType) -> int:
        """The largest payload of a frame into this stage, whose hidden states come in `wire_dtype`."""
        return payload_bytes(wire_dtype, (self.max_step_tokens, self.hidden_size)) if self.takes_hidden else 0


def check_hidden_states(frame: Frame, rules: StepRules) -> None:
    """Hidden states are there exactly when they are due, in the right shape and a possible dtype."""
    hidden, step = frame.hidden, frame.step
    if hidden is None:
        if rules.takes_hidden and step.slices:
            raise StepFault(
                StepFaultKind.HIDDEN_STATES_MISSING,
                f"no hidden states for {step.num_tokens} tokens of {len(step.slices)} slices",
            )
        return
    if not rules.takes_hidden or not step.slices:
        why = "the first stage takes tokens" if step.slices else "the step has no slices"
        raise StepFault(
            StepFaultKind.HIDDEN_STATES_UNEXPECTED, f"hidden states {hidden.shape} came, but {why}"
        )
    if not can_carry(hidden.dtype, rules.dtype):
        raise StepFault(
            StepFaultKind.DTYPE, f"hidden states in {hidden.dtype.value}, expected {rules.dtype.value}"
        )
    if hidden.shape != (step.num_tokens, rules.hidden_size):
        raise StepFault(
            StepFaultKind.SHAPE,
            f"hidden states {hidden.shape} for {step.num_tokens} tokens of width {rules.hidden_size}",
        )


def check_limits(step: Step, rules: StepRules) -> None:
    """Not more tokens and sequences than were agreed, and no sequence twice."""
    if step.num_tokens > rules.max_step_tokens:
        raise _slice_set(f"{step.num_tokens} tokens in one step, at most {rules.max_step_tokens} are agreed")
    if len(step.slices) > rules.max_step_sequences:
        raise _slice_set(
            f"{len(step.slices)} sequences in one step, at most {rules.max_step_sequences} are agreed"
        )
    if len({part.sequence for part in step.slices}) < len(step.slices):
        raise _slice_set(f"two slices of {_repeated(step)} in one step")


def _repeated(step: Step) -> SequenceKey:
    """The first sequence that has a second slice."""
    counts = Counter(part.sequence for part in step.slices)
    return next(key for key, count in counts.items() if count > 1)


def slice_layouts(
    slices: Sequence[StepSlice], sequences: StageSequences, tables: BlockTables, rules: StepRules
) -> list[SliceLayout]:
    """Checks every slice against what the stage knows of its sequence, and finds its pages."""
    return [_slice_layout(part, sequences, tables, rules) for part in slices]


def _slice_layout(
    part: StepSlice, sequences: StageSequences, tables: BlockTables, rules: StepRules
) -> SliceLayout:
    key, first_position, num_tokens = part.sequence, part.first_position, len(part.tokens)
    end_position = first_position + num_tokens
    _check_tokens(part, end_position, rules)
    placed = tables.placed(key, first_position, end_position)
    sequences.get(key).check(part, valid_until=placed.valid_until)
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


def _check_tokens(part: StepSlice, end: int, rules: StepRules) -> None:
    """`end`: one past the last position of the slice."""
    step, tokens = part.inference_step, part.tokens
    if len(tokens) != (step.num_tokens if isinstance(step, Prefill) else 1):
        raise _slice_set(f"slice of {part.sequence} has {len(tokens)} tokens, which {step} contradicts")
    if max(tokens) >= rules.vocab_size:
        raise _slice_set(f"token {max(tokens)} of {part.sequence} for a vocabulary of {rules.vocab_size}")
    if end > rules.max_sequence_tokens:
        raise _slice_set(
            f"{part.sequence} reaches {end} tokens, at most {rules.max_sequence_tokens} are agreed"
        )
    if isinstance(step, Prefill) and not step.is_final and end % rules.block_size:
        raise _slice_set(
            f"chunk of {part.sequence} ends at {end}, neither the prompt's end nor a boundary of blocks of "
            f"{rules.block_size} tokens"
        )


def _slice_set(message: str) -> StepFault:
    return StepFault(StepFaultKind.SLICE_SET, message)
