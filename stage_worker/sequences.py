"""What a stage knows of each live sequence, and the checks that its slices and records must pass."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from wire.errors import StepFault, StepFaultKind
from wire.ids import SequenceKey
from wire.steps import EndRecord, Prefill, Slice, StartRecord, StepSampling

ENDED_REMEMBERED = 4096
"""Ended (sequence, generation) pairs that are remembered, so that a repeated start record is noticed."""


@dataclass(slots=True)
class SequenceState:
    """One (sequence, generation). The stage counts by itself how far it has computed."""

    key: SequenceKey
    generation: int
    prefill_tokens: tuple[int, ...]
    num_prefill_tokens: int
    sampling: StepSampling
    num_computed: int | None = None

    def check(self, part: Slice, *, valid_until: int) -> None:
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

    def advance(self, part: Slice) -> None:
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

    def _check_phase(self, part: Slice) -> None:
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


class SequenceStates:
    """All live sequences of an epoch on one stage."""

    def __init__(self) -> None:
        self._live: dict[SequenceKey, SequenceState] = {}
        self._ended: OrderedDict[tuple[SequenceKey, int], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[SequenceState]:
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
        self._live[key] = SequenceState(key, generation, record.tokens, len(record.tokens), record.sampling)

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

    def get(self, key: SequenceKey) -> SequenceState:
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
