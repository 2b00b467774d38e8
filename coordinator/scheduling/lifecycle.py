"""The states of a sequence and the one table of legal transitions (docs/structure.md has the picture)."""

from enum import Enum, auto

from wire.ids import SequenceKey


class SequenceState(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    PREEMPTED = auto()
    FINISHED = auto()
    CANCELLED = auto()
    FAILED = auto()

    @property
    def is_live(self) -> bool:
        return self in _LIVE

    @property
    def is_queued(self) -> bool:
        """Holds no blocks and waits for its (next) prefill."""
        return self in (SequenceState.WAITING, SequenceState.PREEMPTED)


_LIVE = frozenset(
    {SequenceState.WAITING, SequenceState.PREFILL, SequenceState.DECODE, SequenceState.PREEMPTED}
)

LEGAL_TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.PREFILL, SequenceState.CANCELLED, SequenceState.FAILED}),
    SequenceState.PREFILL: frozenset(
        {
            SequenceState.DECODE,
            SequenceState.FINISHED,
            SequenceState.PREEMPTED,
            SequenceState.CANCELLED,
            SequenceState.FAILED,
        }
    ),
    SequenceState.DECODE: frozenset(
        {SequenceState.FINISHED, SequenceState.PREEMPTED, SequenceState.CANCELLED, SequenceState.FAILED}
    ),
    SequenceState.PREEMPTED: frozenset(
        {
            SequenceState.PREFILL,
            # The text of its last token ends it, found after it made way for a suspect.
            SequenceState.FINISHED,
            SequenceState.CANCELLED,
            SequenceState.FAILED,
        }
    ),
    SequenceState.FINISHED: frozenset(),
    SequenceState.CANCELLED: frozenset(),
    SequenceState.FAILED: frozenset(),
}


class IllegalTransition(RuntimeError):
    """A sequence was to go from one state to another that does not follow it: a bug of ours."""

    def __init__(self, sequence: SequenceKey, current: SequenceState, wanted: SequenceState) -> None:
        super().__init__(f"sequence {sequence} cannot go from {current.name} to {wanted.name}")
        self.sequence = sequence
        self.current = current
        self.wanted = wanted


def check_transition(sequence: SequenceKey, current: SequenceState, wanted: SequenceState) -> None:
    """Raises IllegalTransition unless the table has `current` -> `wanted`."""
    if wanted not in LEGAL_TRANSITIONS[current]:
        raise IllegalTransition(sequence, current, wanted)
