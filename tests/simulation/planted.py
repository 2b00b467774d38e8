"""Planted bugs: plausible mistakes that the simulation must catch within a minute."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import wire.payloads
from coordinator.cluster.actions import Action, BeginEpoch
from coordinator.cluster.controller import Controller
from coordinator.cluster.state_machine import ClusterState
from coordinator.cluster.transitions import ClusterPhase
from coordinator.engine.observer import EndCause
from coordinator.scheduler.in_flight import ResultMismatch
from coordinator.scheduler.kv_manager import KvCacheManager
from coordinator.scheduler.scheduler import Scheduler
from coordinator.scheduler.sequence import Release, Sequence, SequenceState
from kvcache import (
    CopyState,
    SavedState,
    SlotChange,
    StateLedger,
    StateSignal,
    StateTable,
    TakeState,
)
from kvcache.pool import BlockPool
from stage_worker.executor import StepExecutor
from wire.frames import _Parts
from wire.ids import Incarnation
from wire.steps import StartRecord, StepResult, key_of, split_identities

Planting = Callable[[], AbstractContextManager[Any]]
BUGS: dict[str, Planting] = {}
STATE_BUGS: set[str] = set()
"""Those that need a model with recurrent states."""


def _bug(plant: Callable[[], Iterator[None]]) -> Planting:
    BUGS[plant.__name__] = planting = contextmanager(plant)
    return planting


def _state_bug(plant: Callable[[], Iterator[None]]) -> Planting:
    STATE_BUGS.add(plant.__name__)
    return _bug(plant)


@_bug
def a_result_of_an_old_epoch_counts() -> Iterator[None]:
    def complete(self: Controller, epoch: int, result: StepResult) -> None:
        try:
            self._engine.complete(result)
        except ResultMismatch as error:
            self.fail_epoch(self.state.epoch, str(error))

    with patch.object(Controller, "complete", complete):
        yield


@_bug
def pages_are_freed_that_later_queries_see() -> Iterator[None]:
    append = KvCacheManager.append

    def append_and_free(self: KvCacheManager, sequence: Sequence) -> None:
        append(self, sequence)
        self.free(sequence.key, sequence.kv, sequence.kv.release_before(len(sequence.kv) - self.block_size))

    with patch.object(KvCacheManager, "append", append_and_free):
        yield


@_bug
def a_shared_page_is_freed_with_its_first_owner() -> Iterator[None]:
    deref = BlockPool._deref

    def free_early(self: BlockPool, signal: Any) -> Any:
        page = self._full.get(signal.block.sequence_hash)
        if page is not None and page.num_owners > 1:
            page.num_owners = 1
        return deref(self, signal)

    with patch.object(BlockPool, "_deref", free_early):
        yield


@_bug
def a_restart_has_no_start_record() -> Iterator[None]:
    take = Sequence.take_start_record

    def skip(self: Sequence) -> StartRecord | None:
        record = take(self)
        return None if self.num_restarts else record

    with patch.object(Sequence, "take_start_record", skip):
        yield


@_bug
def the_newest_token_is_sampled_again_after_a_restart() -> Iterator[None]:
    preempt = Sequence.preempt

    def forget_one(self: Sequence) -> Release:
        if self.num_generated_tokens:
            self._tokens.pop()
        return preempt(self)

    with patch.object(Sequence, "preempt", forget_one):
        yield


@_bug
def an_epoch_begins_under_the_number_of_the_last() -> Iterator[None]:
    begin = ClusterState._begin_epoch

    def again(self: ClusterState, reason: str = "") -> list[Action]:
        before = self.epoch
        actions = begin(self, reason)
        if before:
            self.epoch = before
            actions = [
                BeginEpoch(before, action.plan_id, action.plan, action.workers, action.delay_s)
                for action in actions
                if isinstance(action, BeginEpoch)
            ]
        return actions

    with patch.object(ClusterState, "_begin_epoch", again):
        yield


@_bug
def an_epoch_that_failed_still_serves() -> Iterator[None]:
    fail = ClusterState._fail_epoch

    def go_on(self: ClusterState, epoch: int, reason: str, cause: EndCause = EndCause.BROKEN) -> list[Action]:
        actions = fail(self, epoch, reason, cause)
        if actions:
            self.phase = ClusterPhase.SERVING
        return actions

    with patch.object(ClusterState, "_fail_epoch", go_on):
        yield


@_bug
def a_cancelled_sequence_keeps_its_pages() -> Iterator[None]:
    leave = Scheduler._end_running

    def leak(self: Scheduler, sequence: Sequence, *, keep_content: bool = True) -> None:
        if sequence.state is not SequenceState.CANCELLED:
            leave(self, sequence, keep_content=keep_content)
            return
        self._stop_running(sequence)
        self._used.record_end(sequence.key, sequence.restart_count)

    with patch.object(Scheduler, "_end_running", leak):
        yield


@_bug
def a_stage_keeps_its_pool_in_a_new_epoch() -> Iterator[None]:
    begin = StepExecutor.begin_epoch

    def keep(self: StepExecutor, epoch: int, *, stage: int) -> None:
        tables = getattr(self, "_tables", None)
        begin(self, epoch, stage=stage)
        if tables is not None and tables.digest:
            self._tables = tables

    with patch.object(StepExecutor, "begin_epoch", keep):
        yield


@_bug
def checksums_of_payloads_are_not_compared() -> Iterator[None]:
    with patch.object(wire.payloads, "check_payload", lambda arrived, notice: None):
        yield


@_bug
def checksums_are_not_compared() -> Iterator[None]:
    with patch.object(_Parts, "actual_checksum", property(lambda parts: parts.checksum)):
        yield


@_bug
def who_prefills_is_forgotten_when_an_epoch_ends() -> Iterator[None]:
    end = Scheduler.end_epoch

    def forget(self: Scheduler) -> None:
        for key in self._prefilling:
            self._running.pop(key).preempt()
        end(self)

    with patch.object(Scheduler, "end_epoch", forget):
        yield


@_bug
def a_worker_that_dies_while_others_load_is_not_missed() -> Iterator[None]:
    lose = ClusterState.lose

    def ignore(self: ClusterState, name: str, incarnation: Incarnation, reason: str) -> list[Action]:
        return [] if self.phase is ClusterPhase.LOADING else lose(self, name, incarnation, reason)

    with patch.object(ClusterState, "lose", ignore):
        yield


@_bug
def answers_to_an_earlier_start_count() -> Iterator[None]:
    take = Scheduler.complete

    def complete(self: Scheduler, result: StepResult, now_s: float) -> Any:
        step = self._in_flight.find(result.step_id)
        if step is not None:
            step.decodes.identities = current(self, step.decodes.identities)
        for chunk in step.chunks if step else ():
            sequence = self._running.get(chunk.sequence)
            if sequence is not None:
                chunk.restart_count = sequence.restart_count
        result.identities = current(self, result.identities)
        return take(self, result, now_s)

    def current(self: Scheduler, identities: bytes) -> bytes:
        """The identities with the restart counts of now."""
        found = []
        for identity in split_identities(identities):
            sequence = self._running.get(key_of(identity)[0])
            found.append(identity if sequence is None else sequence.identity)
        return b"".join(found)

    with patch.object(Scheduler, "complete", complete):
        yield


@_state_bug
def the_state_of_a_cancelled_sequence_is_forgotten() -> Iterator[None]:
    leave = Scheduler._end_running

    def leak(self: Scheduler, sequence: Sequence, *, keep_content: bool = True) -> None:
        if sequence.state is SequenceState.CANCELLED:
            sequence.kv.state = None
        leave(self, sequence, keep_content=keep_content)

    with patch.object(Scheduler, "_end_running", leak):
        yield


@_state_bug
def a_state_is_restored_from_another_slot() -> Iterator[None]:
    apply = StateTable.apply

    def shift(self: StateTable, key: Hashable, signal: StateSignal) -> SlotChange | None:
        change = apply(self, key, signal)
        if change is None or change.source is None or not isinstance(signal, CopyState):
            return change
        is_restored = isinstance(signal.source, SavedState)
        return SlotChange(change.target, (change.source + is_restored) % self.pool.num_states)

    with patch.object(StateTable, "apply", shift):
        yield


@_state_bug
def a_slot_keeps_the_state_of_the_sequence_before() -> Iterator[None]:
    apply = StateTable.apply

    def keep(self: StateTable, key: Hashable, signal: StateSignal) -> SlotChange | None:
        change = apply(self, key, signal)
        is_reused = self.pool.num_free < self.pool.num_states - 1
        return None if isinstance(signal, TakeState) and is_reused else change

    with patch.object(StateTable, "apply", keep):
        yield


@_state_bug
def an_evicted_state_counts_as_a_hit() -> Iterator[None]:
    with patch.object(StateLedger, "_drop_evicted", lambda ledger: None):
        yield


@_state_bug
def a_stage_keeps_its_states_in_a_new_epoch() -> Iterator[None]:
    begin = StepExecutor.begin_epoch

    def keep(self: StepExecutor, epoch: int, *, stage: int) -> None:
        states = getattr(self, "_states", None)
        begin(self, epoch, stage=stage)
        if states is not None and states.digest:
            self._states = states

    with patch.object(StepExecutor, "begin_epoch", keep):
        yield
