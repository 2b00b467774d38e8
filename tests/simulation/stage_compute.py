"""Numbers in the place of layers, such that a wrong page, position or hidden state gives wrong tokens.

The KV entry of a position in a layer is a hash of the entry before it and of what came into the layer there.
What a layer puts out for a position is a hash of its entry and of the last entries of all full blocks before
it, read from the pages of the block table. LAST samples a function of its output.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from checkpoint import BoundaryTensor, DType
from checkpoint.blueprint import HIDDEN_STATES
from stage_worker.assignment import Assignment
from stage_worker.backends.contract import Computed, DeviceError, Finish, StageCompute
from stage_worker.validation import SliceLayout
from wire.frames import Frame
from wire.ids import SequenceKey
from wire.steps import SliceResult, StartRecord, StepResult
from wire.tensors import TensorView

VOCAB_SIZE = 97
NUM_LAYERS = 4
_MASK = 0xFFFFFFFF


class PageUnwritten(Exception):
    """A sequence reads a page that was not computed."""


def mix(one: int, other: int) -> int:
    """A hash of two 32-bit numbers; murmur's finalizer over a linear combination."""
    value = (one * 0x9E3779B1 + other * 0x85EBCA6B + 0x165667B1) & _MASK
    value = ((value ^ (value >> 15)) * 0x2C1B3C6D) & _MASK
    return value ^ (value >> 13)


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
        self._has_head = assignment.role.has_head
        self._num_layers = assignment.layer_end - assignment.layer_begin
        self.begin_epoch(stage=assignment.stage)

    def begin_epoch(self, *, stage: int) -> None:
        self._layers: list[list[list[int | None]]] = [
            [[None] * self._block_size for _ in range(self._num_blocks)] for _ in range(self._num_layers)
        ]

    def start(self, record: StartRecord) -> None:
        pass

    def end(self, sequence: SequenceKey) -> None:
        pass

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
        layouts: Sequence[SliceLayout] = cast(list[SliceLayout], prepared)
        if not frame.hidden:
            inputs = array("I", frame.step.tokens)
        else:
            inputs = array("I", bytes(frame.hidden[0].data))
        outputs, newest = inputs, list[int]()
        for pages in self._layers:
            inputs, outputs, newest, position = outputs, array("I"), [], 0
            for layout in layouts:
                self._run(pages, layout, inputs[position : position + layout.num_tokens], outputs)
                position += layout.num_tokens
                newest.append(outputs[-1])
        if not self._has_head:
            return (TensorView(DType.F32, (len(outputs), 1), outputs.tobytes()),)
        step = frame.step
        results = [
            SliceResult(part.sequence, part.restart_count, value % VOCAB_SIZE)
            for part, value in zip(step.slices, newest, strict=True)
            if part.is_sampled
        ]
        return StepResult.of(step.epoch, step.step_id, results)

    def _run(
        self, store: list[list[int | None]], layout: SliceLayout, inputs: array[int], outputs: array[int]
    ) -> None:
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

    def _read(self, pages: dict[int, list[int | None]], position: int) -> int:
        page = pages.get(position // self._block_size)
        if page is None:
            raise PageUnwritten(f"position {position} lies on no page")
        entry = page[position % self._block_size]
        if entry is None:
            raise PageUnwritten(f"position {position} was never computed")
        return entry


class _Replica:
    """One layer without pages."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._entry = self._context = self._position = 0

    def run(self, value: int) -> int:
        if self._position and self._position % self._block_size == 0:
            self._context = mix(self._context, self._entry)
        self._entry = mix(self._entry, value)
        self._position += 1
        return mix(self._entry, self._context)


def right_tokens(prompt: Sequence[int], count: int, *, block_size: int) -> list[int]:
    """The tokens after the prompt; they do not depend on other requests, cache hits or restarts."""
    layers = [_Replica(block_size) for _ in range(NUM_LAYERS)]
    tokens = list(prompt)
    for position in range(len(prompt) + count - 1):
        value = tokens[position]
        for layer in layers:
            value = layer.run(value)
        if position >= len(prompt) - 1:
            tokens.append(value % VOCAB_SIZE)
    return tokens[len(prompt) :]
