"""What must hold of a frame before anything is computed from it; else a StepFault with the numbers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from checkpoint import DType
from kvcache import BlockTables
from stage_worker.assignment import Assignment
from stage_worker.sequences import SequenceStates
from stage_worker.slice_layout import SliceLayout
from wire.errors import StepFault, StepFaultKind
from wire.frames import Frame
from wire.ids import SequenceKey
from wire.steps import Prefill, Slice, Step
from wire.wire_dtypes import WireDType, can_carry, payload_bytes


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
    def of(cls, assignment: Assignment, *, hidden_size: int, vocab_size: int) -> "StepRules":
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
    slices: Sequence[Slice], sequences: SequenceStates, tables: BlockTables, rules: StepRules
) -> list[SliceLayout]:
    """Checks every slice against what the stage knows of its sequence, and finds its pages."""
    return [_slice_layout(part, sequences, tables, rules) for part in slices]


def _slice_layout(
    part: Slice, sequences: SequenceStates, tables: BlockTables, rules: StepRules
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


def _check_tokens(part: Slice, end: int, rules: StepRules) -> None:
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
