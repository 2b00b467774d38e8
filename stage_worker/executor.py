"""The routine that runs every step on every stage, for all roles and backends, in three parts.

prepare, when the step arrives:          apply ends, starts, signals -> compare digests -> check the slices
begin, when its hidden states arrive:    check them -> start the computation
finish, when the device has computed:    [hidden states for the next stage | results]

Each part runs in the order of the steps; several steps may be prepared, and begun, ahead.
"""

import logging
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from kvcache import (
    BlockTables,
    IntegrityMonitor,
    IntegrityReport,
    InvalidSignal,
    KvCacheError,
    SlotChange,
    StateSignal,
    StateTable,
    combined_digest,
)
from stage_worker.assignment import Assignment
from stage_worker.backends.contract import (
    DeviceError,
    Finish,
    GraphCounts,
    HandedOn,
    StageCompute,
    StageOutput,
)
from stage_worker.validation import (
    StageSequences,
    StepRules,
    check_hidden_states,
    check_limits,
    check_slices,
)
from wire.errors import InvariantBroken, StepFault, StepFaultKind
from wire.frames import Frame
from wire.ids import CHECK_REQUEST, SequenceKey
from wire.log_context import log_context
from wire.steps import Grows, SequenceSignal, Step, StepResult
from wire.tensors import WireDType

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorStats:
    """Executor counters for heartbeats."""

    num_steps: int = 0
    busy_s: float = 0.0
    blocks_active: int = 0
    blocks_inactive: int = 0
    blocks_free: int = 0
    blocks_wanted: int = 0
    blocks_hit: int = 0
    states_live: int = 0
    states_saved: int = 0
    states_free: int = 0
    integrity: IntegrityReport = field(default_factory=IntegrityReport)
    graphs: GraphCounts | None = None


@dataclass(slots=True)
class _PreparedStep:
    """A step that waits for its hidden states.

    `refusal` is raised in the place of its computation. `has_records` says that the stage's computation has
    still to take its ends and starts. `states` change before the step is computed. `prepared` is None for a
    step without slices.
    """

    step: Step
    refusal: StepFault | None = None
    states: list[SlotChange] = field(default_factory=list)
    has_records: bool = False
    prepared: object = None


@dataclass(frozen=True, slots=True)
class BegunStep:
    """A step to be finished: `refusal` is raised, or `finish` called. A step without slices has neither."""

    step: Step
    step_checksum: int
    refusal: StepFault | None = None
    finish: Finish | None = None


T = TypeVar("T")


class StepExecutor:
    """Owns block tables and sequences of one stage.

    One thread prepares and begins steps; the same or another one finishes them. Otherwise thread-safe are
    `stats` and `max_hidden_bytes` only.
    """

    def __init__(self, assignment: Assignment, compute: StageCompute) -> None:
        """`compute` holds the assigned layers and their KV blocks.

        The executor accounts for the blocks of all groups, also those that no layer of the stage uses, and
        for recurrent states.
        """
        self._role = assignment.role
        self._group_blocks = assignment.group_blocks
        self._num_states = assignment.num_states
        self._block_size = assignment.block_size
        self._compute = compute
        self._rules = StepRules.of(assignment, boundary=compute.boundary, vocab_size=compute.vocab_size)
        self._busy_s = 0.0
        self._integrity = IntegrityMonitor()
        self._refused: StepFault | None = None
        self._failed: StepFault | None = None
        self._device_failure: str | None = None
        self._epoch = 0
        self.begin_epoch(0, stage=assignment.stage)

    def begin_epoch(self, epoch: int, *, stage: int) -> None:
        """Reset all but the weights, with step 0 next, once all begun steps are finished.

        Raises DeviceError once the device has failed.
        """
        if self._device_failure is not None:
            raise DeviceError(self._device_failure)
        self._epoch = epoch
        self._next_step_id = 0
        self._num_steps = 0
        self._ahead: deque[_PreparedStep] = deque()
        self._refused = self._failed = None
        self._integrity.restart()
        self._groups = [BlockTables(count, block_size=self._block_size) for count in self._group_blocks]
        self._tables = self._groups[0]
        self._states = StateTable(self._num_states) if self._num_states else None
        self._sequences = StageSequences()
        self._begin_computation(stage)

    def _begin_computation(self, stage: int) -> None:
        try:
            self._compute.begin_epoch(stage=stage)
        except Exception as error:
            if self._compute.fault_kind(error) is not StepFaultKind.DEVICE:
                raise
            self._device_failure = f"{type(error).__name__}: {error}"
        if self._device_failure is not None:
            raise DeviceError(self._device_failure)

    def max_hidden_bytes(self, wire_dtype: WireDType) -> int:
        """Maximum size of a frame's hidden states."""
        return self._rules.max_hidden_bytes(wire_dtype)

    @property
    def exact_tensors(self) -> frozenset[str]:
        """Hidden states that do not travel in a frame's wire dtype."""
        return frozenset(tensor.name for tensor in self._rules.boundary if tensor.dtype is not None)

    @property
    def depth(self) -> int:
        """Steps that may be begun before the first of them is finished; with 1, `begin` computes the step."""
        return self._compute.depth

    def run(self, frame: Frame) -> StageOutput:
        self.prepare(frame.step)
        return self.compute(frame)

    def compute(self, frame: Frame) -> StageOutput:
        """Begin and finish the oldest prepared step. Raises like `finish`."""
        return self.finish(self.begin(frame))

    def prepare(self, step: Step) -> None:
        """Account for the next step and prepare its computation, ahead of its hidden states.

        A refusal is kept for `finish`, so that all steps before it are computed.
        """
        ahead = _PreparedStep(step)
        self._ahead.append(ahead)
        fault = self._fault_in(partial(self._check_and_prepare, ahead), step)
        if isinstance(fault, StepFault):
            ahead.refusal = self._refuse(fault, step)
        else:
            self._next_step_id += 1

    def begin(self, frame: Frame) -> BegunStep:
        """Begin to compute the oldest prepared step; `finish` has its output, or raises its fault."""
        ahead = self._ahead.popleft()
        refusal = ahead.refusal or self._refusal_after_failure(frame.step)
        if refusal is not None:
            return BegunStep(frame.step, frame.step_checksum, refusal)
        finish = self._fault_in(partial(self._begin, frame, ahead), frame.step)
        if isinstance(finish, StepFault):
            return BegunStep(frame.step, frame.step_checksum, self._fail(finish, frame.step))
        return BegunStep(frame.step, frame.step_checksum, finish=finish)

    def finish(self, begun: BegunStep) -> StageOutput:
        """Wait for the oldest begun step. Raises StepFault; then all later steps are refused."""
        refusal = begun.refusal or self._refusal_after_failure(begun.step)
        if refusal is not None:
            raise refusal from refusal.__cause__
        output = self._fault_in(partial(self._finish, begun), begun.step)
        if isinstance(output, StepFault):
            raise self._fail(output, begun.step) from output.__cause__
        self._num_steps += 1
        return output

    def assume_history(self, sequence: SequenceKey, num_tokens: int) -> None:
        """Count the zeroed recurrent state of `sequence`, if the model has states, as the state after
        `num_tokens` tokens: warm-up runs steps behind histories that nothing has computed.
        """
        if self._states is not None:
            self._states.advance(sequence, num_tokens)

    def note_busy(self, seconds: float) -> None:
        """Add the computation time of the last step."""
        self._busy_s += seconds

    @property
    def stats(self) -> ExecutorStats:
        """Current counters; during a step, some of them may include it already."""
        pools = [tables.pool for tables in self._groups]
        states = None if self._states is None else self._states.pool
        return ExecutorStats(
            num_steps=self._num_steps,
            busy_s=self._busy_s,
            blocks_active=sum(pool.num_active for pool in pools),
            blocks_inactive=sum(pool.num_inactive for pool in pools),
            blocks_free=sum(pool.num_free for pool in pools),
            blocks_wanted=self._tables.num_wanted_blocks,
            blocks_hit=self._tables.num_hit_blocks,
            states_live=0 if states is None else states.num_live,
            states_saved=0 if states is None else states.num_snapshots,
            states_free=0 if states is None else states.num_free,
            integrity=self._integrity.report,
            graphs=self._compute.graphs,
        )

    def check_integrity(self) -> None:
        """Verify pools, block tables and recurrent states. Raises kvcache.IntegrityBroken."""
        for tables in self._groups:
            tables.check_integrity()
        if self._states is not None:
            self._states.check_integrity()

    @property
    def is_check_due(self) -> bool:
        """Whether the stage is idle and an integrity check is due; to be polled regularly."""
        return self._refused is None and self._integrity.is_due_when_idle()

    def verify_accounting(self) -> None:
        """Check pool and block tables and keep the result in `stats`. Raises StepFault."""
        if problem := self._integrity.run(self.check_integrity):
            raise StepFault(StepFaultKind.KV_DIVERGENCE, f"KV accounting is broken: {problem}")

    def _check_order(self, step: Step) -> None:
        if step.epoch != self._epoch:
            raise StepFault(StepFaultKind.EPOCH, f"frame of epoch {step.epoch}, expected {self._epoch}")
        if self._refused is not None:
            raise self._since(self._refused)
        if step.step_id != self._next_step_id:
            raise StepFault(
                StepFaultKind.STEP_ID, f"frame of step {step.step_id}, expected {self._next_step_id}"
            )

    def _check_and_prepare(self, ahead: _PreparedStep) -> None:
        step = ahead.step
        self._check_order(step)
        check_limits(step, self._rules)
        self._apply(step, ahead.states)
        ahead.has_records = bool(step.ends or step.starts)
        if len(self._ahead) == 1:
            self._take_records(ahead)
        if self._integrity.count_step():
            self.verify_accounting()
        slices = check_slices(step, self._sequences, self._groups, self._rules, self._states)
        ahead.prepared = self._compute.prepare(step, slices) if slices else None
        slices.advance(self._sequences)

    def _take_records(self, ahead: _PreparedStep) -> None:
        """Pass ends and starts to the computation, once all earlier steps are computed."""
        if ahead.has_records:
            ahead.has_records = False
            for end in ahead.step.ends:
                self._compute.end(end.sequence)
            for start in ahead.step.starts:
                self._compute.start(start)

    def _begin(self, frame: Frame, ahead: _PreparedStep) -> Finish | None:
        step = frame.step
        if step is not ahead.step:
            raise InvariantBroken(f"step {step.step_id} is computed where {ahead.step.step_id} was prepared")
        check_hidden_states(frame, self._rules)
        self._take_records(ahead)
        if ahead.states:
            self._compute.change_states(ahead.states)
        return self._compute.begin(frame, ahead.prepared) if step.num_slices else None

    def _finish(self, begun: BegunStep) -> StageOutput:
        step = begun.step
        computed = None if begun.finish is None else begun.finish()
        if self._role.has_head:
            if computed is not None and not isinstance(computed, StepResult):
                raise InvariantBroken("LAST computed hidden states, expected results")
            result = computed or StepResult(step.epoch, step.step_id)
            late_rows = self._compute.take_late_rows(may_wait=computed is None)
            return replace(result, late_rows=late_rows) if late_rows else result
        if isinstance(computed, StepResult):
            raise InvariantBroken("a stage before LAST computed results, expected hidden states")
        return HandedOn(step.step_id, begun.step_checksum, computed or ())

    def _apply(self, step: Step, changes: list[SlotChange]) -> None:
        """Apply records and signals; `changes` takes what happens to the slots of states."""
        for end in step.ends:
            self._sequences.end(end)
        for start in step.starts:
            self._sequences.start(start)
        position = step.grows.position
        self._apply_signals(step.signals[:position], changes)
        self._apply_grows(step.grows)
        self._apply_signals(step.signals[position:], changes)
        states = [] if self._states is None else [self._states.digest]
        digest = combined_digest([tables.digest for tables in self._groups] + states)
        if digest != step.digest:
            raise StepFault(
                StepFaultKind.KV_DIVERGENCE,
                f"KV digest after step {step.step_id}: expected {step.digest:016x}, got {digest:016x}",
            )
        self._drop_tables(step)

    def _apply_signals(self, signals: Sequence[SequenceSignal], changes: list[SlotChange]) -> None:
        for entry in signals:
            key = entry.sequence
            try:
                if isinstance(entry.signal, StateSignal):
                    self._apply_state(key, entry.signal, changes)
                    continue
                tables = self._group(entry.group)
                tables.apply(key, entry.signal, is_counted=key.request_id != CHECK_REQUEST)
            except KvCacheError as error:
                raise _bad_signal(key, error) from error
            self._sequences.blocks_changed(key)

    def _apply_state(self, key: SequenceKey, signal: StateSignal, changes: list[SlotChange]) -> None:
        if self._states is None:
            raise InvalidSignal("a signal of recurrent states, which the model does not have")
        change = self._states.apply(key, signal)
        if change is not None:
            changes.append(change)

    def _group(self, number: int) -> BlockTables:
        if number >= len(self._groups):
            raise InvalidSignal(f"block group {number} of {len(self._groups)}")
        return self._groups[number]

    def _apply_grows(self, grows: Grows) -> None:
        for identity, grow in grows:
            key = self._sequences.grown(identity, self._rules)
            try:
                self._tables.grow(key, grow)
            except KvCacheError as error:
                raise _bad_signal(key, error) from error

    def _drop_tables(self, step: Step) -> None:
        """Drop the tables of an ended sequence; it has freed its blocks by this step at the latest."""
        for end in step.ends:
            key = end.sequence
            if key in self._sequences:
                continue
            try:
                for tables in self._groups:
                    if key in tables:
                        tables.drop(key)
                if self._states is not None:
                    self._states.check_ended(key)
            except KvCacheError as error:
                raise StepFault(
                    StepFaultKind.RECORD, f"end of {key}: {error}", request_ids=(key.request_id,)
                ) from error

    def _since(self, fault: StepFault) -> StepFault:
        return StepFault(fault.kind, f"epoch {self._epoch} is refused since {fault.message}")

    def _refusal_after_failure(self, step: Step) -> StepFault | None:
        """The refusal of a step behind one that failed in its computation."""
        failed = self._failed
        if failed is None or failed.step_id is None or step.step_id <= failed.step_id:
            return None
        return self._refuse(self._since(failed), step)

    def _fault_in(self, work: Callable[[], T], step: Step) -> T | StepFault:
        """The result or the fault of `work`; returned, so that no traceback references the failed step."""
        try:
            return work()
        except StepFault as refusal:
            return refusal
        except Exception as error:
            return self._unexpected(error, step)

    def _unexpected(self, error: Exception, step: Step) -> StepFault:
        """Convert an unexpected error to a fault; a failed device is remembered."""
        kind = self._compute.fault_kind(error)
        fault = StepFault(kind, f"{type(error).__name__}: {error}")
        if kind is StepFaultKind.DEVICE:
            self._device_failure = fault.message
        log.error(
            "step %d failed: %s",
            *(step.step_id, fault),
            exc_info=error if kind is StepFaultKind.INTERNAL else None,
            extra=log_context(epoch=step.epoch, step=step.step_id, request_ids=step.request_ids),
        )
        traceback.clear_frames(error.__traceback__)
        return fault

    def _fail(self, fault: StepFault, step: Step) -> StepFault:
        """Refuse a step in its computation, and with it all behind it; the first step that fails counts."""
        refused = self._refuse(fault, step)
        failed = self._failed
        if failed is None or failed.step_id is None or step.step_id < failed.step_id:
            self._failed = StepFault(fault.kind, fault.message, step_id=step.step_id)
        return refused

    def _refuse(self, fault: StepFault, step: Step) -> StepFault:
        if fault.kind is StepFaultKind.OUT_OF_MEMORY:
            self._compute.free_memory()
        if self._refused is None and step.epoch == self._epoch:
            # Without its traceback, which references everything that the step used.
            self._refused = StepFault(fault.kind, fault.message)
        fault.step_id = step.step_id
        fault.request_ids = tuple(dict.fromkeys((*step.request_ids, *fault.request_ids)))
        return fault


def _bad_signal(key: SequenceKey, error: KvCacheError) -> StepFault:
    return StepFault(
        StepFaultKind.KV_SIGNAL,
        f"{type(error).__name__} for a signal of {key}: {error}",
        request_ids=(key.request_id,),
    )
