"""Numbers in the place of layers, such that a wrong page, slot, position or hidden state gives wrong tokens.

The KV entry of a position in a layer is a hash of the entry before it and of what came into the layer there.
What a layer puts out for a position is a hash of its entry and of the last entries of all full blocks before
it, read from the pages of the block table. With recurrent states, it is also a hash of all that came into the
layer before, which is kept in the slot of the sequence. LAST samples a function of its output, and some rows
are late.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from checkpoint import BoundaryTensor, DType
from checkpoint.boundary import HIDDEN_STATES
from kvcache import SlotChange
from stage_worker.assignment import Assignment
from stage_worker.backends.contract import Computed, DeviceError, Finish, StageCompute
from stage_worker.validation import SliceLayout, StepSlices
from wire.frames import Frame
from wire.ids import SequenceKey
from wire.steps import SliceResult, StartRecord, Step, StepResult, StepSlice
from wire.tensors import TensorView

VOCAB_SIZE = 97
NUM_LAYERS = 4
ROWS_PER_LATE = 13
_MASK = 0xFFFFFFFF


class PageUnwritten(Exception):
    """A sequence reads a page that was not computed, or a slot without a state."""


def mix(one: int, other: int) -> int:
    """A hash of two 32-bit numbers; murmur's finalizer over a linear combination."""
    value = (one * 0x9E3779B1 + other * 0x85EBCA6B + 0x165667B1) & _MASK
    value = ((value ^ (value >> 15)) * 0x2C1B3C6D) & _MASK
    return value ^ (value >> 13)


def next_state(state: int, value: int) -> int:
    """The recurrent state of a layer after `value` came in."""
    return mix(value, state)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The slices of a step, and the slot of each one's state; none in models without."""

    layouts: list[SliceLayout]
    slots: list[int]


@dataclass(slots=True)
class SimDevice:
    """What one process computes on. It takes `depth` steps, and may fail."""

    depth: int = 1
    failure: str = ""
    """Why every step fails from now on, until the process is another one."""
    num_out_of_memory: int = 0
    """Steps that find too little memory."""
    is_hung: bool = False
    """No further step ends."""

    def check(self) -> None:
        if self.failure:
            raise DeviceError(self.failure)


class SimCompute(StageCompute):
    """The layers of one stage."""

    boundary = (BoundaryTensor(name=HIDDEN_STATES, width=1),)
    vocab_size = VOCAB_SIZE

    def __init__(self, assignment: Assignment, device: SimDevice | None = None) -> None:
        self._device = device or SimDevice()
        self.depth = self._device.depth
        self._block_size = assignment.block_size
        self._num_blocks = assignment.num_blocks
        self._num_states = assignment.num_states
        self._has_head = assignment.role.has_head
        self._num_layers = assignment.layer_end - assignment.layer_begin
        self.begin_epoch(stage=assignment.stage)

    def begin_epoch(self, *, stage: int) -> None:
        self._layers: list[list[list[int | None]]] = [
            [[None] * self._block_size for _ in range(self._num_blocks)] for _ in range(self._num_layers)
        ]
        self._states: list[list[int | None]] = [[None] * self._num_states for _ in range(self._num_layers)]
        self._late_rows: list[SliceResult] = []
        self._next_rows: list[SliceResult] = []

    def start(self, record: StartRecord) -> None:
        pass

    def end(self, sequence: SequenceKey) -> None:
        pass

    def prepare(self, step: Step, layouts: Sequence[SliceLayout]) -> object:
        assert isinstance(layouts, StepSlices)
        return _Prepared(list(layouts), layouts.state_slots())

    def change_states(self, changes: Sequence[SlotChange]) -> None:
        for target, source in changes:
            for states in self._states:
                states[target] = 0 if source is None else states[source]

    def begin(self, frame: Frame, prepared: object) -> Finish:
        """The device may fail between the begin and the end of a step."""
        self._device.check()
        if self._device.num_out_of_memory:
            self._device.num_out_of_memory -= 1
            raise MemoryError("this step was to find too little memory")
        computed = self.compute(frame, prepared)

        def finish() -> Computed:
            self._device.check()
            return computed

        return finish

    def compute(self, frame: Frame, prepared: object) -> Computed:
        assert isinstance(prepared, _Prepared)
        layouts = prepared.layouts
        if not frame.hidden:
            inputs = array("I", frame.step.tokens)
        else:
            inputs = array("I", bytes(frame.hidden[0].data))
        outputs, newest = inputs, list[int]()
        for pages, states in zip(self._layers, self._states, strict=True):
            inputs, outputs, newest, position = outputs, array("I"), [], 0
            for index, layout in enumerate(layouts):
                values = inputs[position : position + layout.num_tokens]
                position += layout.num_tokens
                mixed = self._run(pages, layout, values)
                if prepared.slots:
                    self._add_states(states, prepared.slots[index], values, mixed)
                outputs.extend(mixed)
                newest.append(outputs[-1])
        if not self._has_head:
            return (TensorView(DType.F32, (len(outputs), 1), outputs.tobytes()),)
        step = frame.step
        results = [
            self._row(part, value) for part, value in zip(step.slices, newest, strict=True) if part.is_sampled
        ]
        return StepResult.of(step.epoch, step.step_id, results)

    def _row(self, part: StepSlice, value: int) -> SliceResult:
        row = SliceResult(part.sequence, part.restart_count, value % VOCAB_SIZE)
        if value // VOCAB_SIZE % ROWS_PER_LATE:
            return row
        self._late_rows.append(row)
        return replace(row, outcome=None, is_late=True)

    def take_late_rows(self, *, may_wait: bool) -> tuple[SliceResult, ...]:
        """Rows that were late at the last call or before."""
        rows = self._next_rows
        self._next_rows = self._late_rows
        self._late_rows = []
        return tuple(rows)

    def _add_states(
        self, states: list[int | None], slot: int, inputs: array[int], outputs: array[int]
    ) -> None:
        """Advance the state in `slot`, and mix it into the outputs."""
        state = states[slot]
        if state is None:
            raise PageUnwritten(f"slot {slot} has no state")
        for offset, value in enumerate(inputs):
            state = next_state(state, value)
            outputs[offset] = mix(outputs[offset], state)
        states[slot] = state

    def _run(self, store: list[list[int | None]], layout: SliceLayout, inputs: array[int]) -> array[int]:
        outputs = array("I")
        size = self._block_size
        pages = {layout.first_block + index: store[page] for index, page in enumerate(layout.pages)}
        first = layout.first_position
        entry = self._read(pages, first - 1) if first else 0
        context = 0
        for block in range(first // size):
            context = mix(context, self._read(pages, (block + 1) * size - 1))
        runs = layout.writable_runs or ()
        for offset, value in enumerate(inputs):
            position = first + offset
            if position and position % size == 0 and offset:
                context = mix(context, entry)
            entry = mix(entry, value)
            if any(begin <= position < end for begin, end in runs):
                pages[position // size][position % size] = entry
            elif self._read(pages, position) != entry:
                raise PageUnwritten(f"the cached entry of position {position} is another one")
            outputs.append(mix(entry, context))
        return outputs

    def _read(self, pages: dict[int, list[int | None]], position: int) -> int:
        page = pages.get(position // self._block_size)
        if page is None:
            raise PageUnwritten(f"position {position} lies on no page")
        entry = page[position % self._block_size]
        if entry is None:
            raise PageUnwritten(f"position {position} was never computed")
        return entry


class _Replica:
    """One layer without pages and slots."""

    def __init__(self, block_size: int, *, has_states: bool) -> None:
        self._block_size = block_size
        self._has_states = has_states
        self._entry = self._context = self._position = self._state = 0

    def run(self, value: int) -> int:
        if self._position and self._position % self._block_size == 0:
            self._context = mix(self._context, self._entry)
        self._entry = mix(self._entry, value)
        self._position += 1
        self._state = next_state(self._state, value)
        output = mix(self._entry, self._context)
        return mix(output, self._state) if self._has_states else output


def right_tokens(
    prompt: Sequence[int], count: int, *, block_size: int, has_states: bool = False
) -> list[int]:
    """The tokens after the prompt; they do not depend on other requests, cache hits or restarts."""
    layers = [_Replica(block_size, has_states=has_states) for _ in range(NUM_LAYERS)]
    tokens = list(prompt)
    for position in range(len(prompt) + count - 1):
        value = tokens[position]
        for layer in layers:
            value = layer.run(value)
        if position >= len(prompt) - 1:
            tokens.append(value % VOCAB_SIZE)
    return tokens[len(prompt) :]
