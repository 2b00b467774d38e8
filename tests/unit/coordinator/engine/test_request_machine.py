"""Any order of events on requests: tokens exactly once, one end, and no leftovers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.engine.admission import AdmissionLimits
from coordinator.engine.engine import DEADLINE_SLACK_S
from coordinator.engine.request import Request
from coordinator.recovery.policy import DEFAULT_POLICY
from coordinator.scheduler.policy import SchedulerLimits
from coordinator.scheduler.sequence import SequenceState
from tests.properties import examples
from tests.unit.coordinator.engine.customers import Customer
from tests.unit.coordinator.engine.engine_model import BLOCK_SIZE, Call, EngineModel, ended_as
from tests.unit.coordinator.engine.request_cases import RequestCase, request_cases
from wire.errors import (
    ClusterUnavailable,
    DeadlinePassed,
    Overloaded,
    RequestCancelled,
    RequestExists,
    RequestNotFound,
    RequestPoisoned,
    SliceFailed,
    StepFailed,
    StepFaultKind,
)
from wire.ids import RequestId
from wire.steps import SliceError, StepSlice

LARGEST_POOL = 9
"""Blocks. Half of the pools cannot hold the longest requests."""

PLACES = st.integers(0, 63)
POOLS = st.none() | st.integers(3, LARGEST_POOL) | st.just(LARGEST_POOL)
SELDOM = st.sampled_from([True, False, False])
DEADLINES = st.none() | st.sampled_from([2.0, 15.0])
Ends = dict[RequestId, type[Exception] | None]


class Requests(RuleBasedStateMachine):
    """Customers, an engine and a pipeline driven in random order."""

    @initialize(
        num_stages=st.integers(1, 3),
        num_blocks=st.integers(4, LARGEST_POOL),
        queue_size=st.sampled_from([2, 50]),
        max_unread=st.sampled_from([3, 50]),
        max_step_tokens=st.sampled_from([4, 7, 16]),
        max_step_sequences=st.integers(1, 5),
        max_steps_in_flight=st.integers(1, 4),
    )
    def begin(
        self, num_stages: int, num_blocks: int, queue_size: int, max_unread: int, **limits: int
    ) -> None:
        self.queue_size, self.num_blocks, self.max_unread = queue_size, num_blocks, max_unread
        self.model = EngineModel(
            num_blocks=num_blocks,
            num_stages=num_stages,
            limits=SchedulerLimits(**limits),
            admission=AdmissionLimits(queue_size=queue_size, max_unread_tokens=max_unread),
        )
        self.engine = self.model.engine
        self.customers: list[Customer] = []
        self.observers: list[tuple[Customer, Call]] = []
        self.num_arrivals = 0
        self.is_delivery_due = False
        self.failing: set[RequestId] = set()
        self.num_faults = Counter[RequestId]()
        self.num_deaths_alone = Counter[RequestId]()

    # Clients

    @rule(
        cases=st.lists(request_cases(), min_size=1, max_size=4), deadline_s=DEADLINES, again=st.integers(0, 9)
    )
    def arrive(self, cases: list[RequestCase], deadline_s: float | None, again: int) -> None:
        """Sometimes with an id that was used before."""
        self.turn()
        for case in cases:
            self.num_arrivals += 1
            old, new = self.customers[again : again + 1], RequestId(self.num_arrivals.to_bytes(16, "big"))
            request = case.request(
                arrival=self.num_arrivals,
                arrived_s=self.model.now_s,
                request_id=old[0].request.id if old else new,
            )
            self.submit(case, request, deadline_s)
            self.check_ends({})

    def submit(self, case: RequestCase, request: Request, in_s: float | None) -> None:
        deadline_s = None if in_s is None else self.model.now_s + in_s
        refusal: type[Exception] | None = None
        if any(customer.is_here and customer.request.id == request.id for customer in self.customers):
            refusal = RequestExists
        elif (
            sum(customer.request.num_queued for customer in self.live) + len(request.choices)
            > self.queue_size
        ):
            refusal = Overloaded
        elif self.model.is_serving and request.max_sequence_tokens > self.num_blocks * BLOCK_SIZE:
            refusal = ClusterUnavailable
        if refusal is None:
            call = self.model.submit(request, deadline_s=deadline_s)
            self.customers.append(Customer(case, request, call, deadline_s))
            self.num_faults[request.id] = self.num_deaths_alone[request.id] = 0
        else:
            with pytest.raises(refusal):
                self.model.submit(request, deadline_s=deadline_s)

    @property
    def live(self) -> list[Customer]:
        return [customer for customer in self.customers if customer.end is None]

    def pick(self, place: int, among: Callable[[Customer], bool] = lambda customer: True) -> Customer | None:
        candidates = [customer for customer in self.customers if among(customer)]
        return candidates[place % len(candidates)] if candidates else None

    @precondition(lambda self: self.customers)
    @rule(place=PLACES, count=st.sampled_from([1, 1, 100]))
    def read(self, place: int, count: int) -> None:
        self.turn()  # a slow reader that a delivery ends is looked at before it reads
        if (customer := self.pick(place, lambda customer: not customer.call.is_over)) is not None:
            for _ in range(count):
                if not customer.read(self.model.now_s):
                    break
        self.check_ends({})

    @precondition(lambda self: self.customers)
    @rule()
    def read_stale(self) -> None:
        for customer in self.customers:
            customer.read_stale()
        self.check_ends({})

    @precondition(lambda self: self.customers)
    @rule(place=PLACES, happens=SELDOM)
    def disconnect(self, place: int, happens: bool) -> None:
        if not happens:
            return
        self.turn()
        ends: Ends = {}
        if (customer := self.pick(place, lambda customer: not customer.call.is_over)) is not None:
            if customer.end is None and self.is_late(customer):
                ends = {customer.request.id: DeadlinePassed}
            elif customer.end is None and customer.case.keep_s is None:
                ends = {customer.request.id: RequestCancelled}
            customer.close(self.model.now_s)
        self.check_ends(ends)

    @precondition(lambda self: self.customers)
    @rule(place=PLACES, data=st.data(), deadline_s=DEADLINES)
    def attach(self, place: int, data: st.DataObject, deadline_s: float | None) -> None:
        self.turn()
        if (customer := self.pick(place)) is None:
            return
        if not customer.is_here:
            if not any(other.is_here and other.request.id == customer.request.id for other in self.customers):
                with pytest.raises(RequestNotFound):
                    self.model.attach(customer.request.id)
            return
        had, scores = customer.num_tokens, customer.num_scores
        positions = [num if data.draw(st.booleans()) else data.draw(st.integers(0, num)) for num in had]
        # Without a number it has all scores if it has a token, as with an echo it need not.
        may_leave_out = not positions[0] or scores == len(customer.case.prompt)
        num_scores = data.draw(st.integers(0, scores) | (st.none() if may_leave_out else st.just(scores)))
        deadline_s = None if deadline_s is None else self.model.now_s + deadline_s
        customer.attach(self.model, positions, num_scores, deadline_s)
        self.check_ends({})

    @precondition(lambda self: self.customers and len(self.observers) < 6)
    @rule(place=PLACES)
    def observe(self, place: int) -> None:
        """Another client reads a request from its first token, beside its reader."""
        self.turn()
        if (customer := self.pick(place, lambda customer: customer.is_here)) is not None:
            self.observers.append((customer, self.model.attach(customer.request.id, observes=True)))
        self.check_ends({})

    @precondition(lambda self: self.observers)
    @rule(place=PLACES, happens=SELDOM)
    def read_or_leave(self, place: int, happens: bool) -> None:
        _, call = self.observers[place % len(self.observers)]
        call.read_all()
        if happens:
            call.close()
            self.observers.pop(place % len(self.observers))
        self.check_ends({})

    @precondition(lambda self: self.customers)
    @rule(place=PLACES, happens=SELDOM)
    def cancel(self, place: int, happens: bool) -> None:
        self.turn()
        ends: Ends = {}
        customer = self.pick(place, lambda customer: customer.is_here) or self.pick(place)
        if not happens or customer is None:
            return
        if not customer.is_here:
            with pytest.raises(RequestNotFound):
                self.engine.cancel(customer.request.id)
        else:
            if customer.end is None:
                ends = {customer.request.id: RequestCancelled}
            customer.is_kept = False
            self.engine.cancel(customer.request.id)
        self.check_ends(ends)

    # Stages

    @precondition(lambda self: self.model.is_serving)
    @rule(stage=st.integers(0, 2))
    def advance(self, stage: int) -> None:
        self.model.advance(stage % len(self.model.stages))
        self.check_ends({})

    @precondition(lambda self: self.model.results)
    @rule(turns=st.booleans())
    def deliver(self, turns: bool = True) -> None:
        """The oldest result reaches the engine, which delivers it with the next turn or the next event."""
        self.deliver_due()
        running = {sequence.key: sequence.restart_count for sequence in self.engine.scheduler.running}
        valid = [
            entry
            for entry in self.model.results[0].results
            if running.get(entry.sequence) == entry.restart_count
        ]
        self.failing = {entry.sequence.request_id for entry in valid if isinstance(entry.outcome, SliceError)}
        for entry in valid:
            if isinstance(entry.outcome, int):
                self.num_deaths_alone[entry.sequence.request_id] = 0
        self.model.complete()
        self.is_delivery_due = True
        if turns:
            self.turn()

    @rule()
    def turn(self) -> None:
        """The event loop turns."""
        self.model.turn()
        self.check_ends({})

    def deliver_due(self) -> None:
        self.engine.deliver()
        self.check_ends({})

    def delivered_ends(self) -> Ends:
        """The ends of the last result's delivery: finished and failed requests, and slow readers."""
        ends: Ends = {}
        for customer in self.live:
            request = customer.request
            if isinstance(request.error, RequestCancelled) and "reads too slowly" in str(request.error):
                assert not customer.call.is_over
                assert customer.call.stream.num_unread_tokens == self.max_unread + 1
                ends[request.id] = RequestCancelled
            elif request.id in self.failing:
                ends[request.id] = SliceFailed
            elif all(choice.buffer.is_finished for choice in request.choices):
                ends[request.id] = None
        return ends

    @precondition(lambda self: self.model.is_serving)
    @rule(count=st.integers(1, 8), is_read=st.booleans())
    def run_steps(self, count: int, is_read: bool) -> None:
        for _ in range(count):
            self.run_step()
            if is_read:
                self.read_everything()

    def run_step(self) -> bool:
        """Runs the oldest step to its result; False if none is in flight."""
        while not self.model.results:
            if not any(self.model.advance(stage) for stage in reversed(range(len(self.model.stages)))):
                return False
        self.deliver()
        return True

    @precondition(lambda self: self.model.is_serving and self.model.queues[-1])
    @rule(place=PLACES, happens=SELDOM)
    def run_into_a_slice_error(self, place: int, happens: bool) -> None:
        if not happens:
            return
        answered = [part for part in self.model.queues[-1][0].slices if part.is_answered]
        if answered:
            chosen: StepSlice = answered[place % len(answered)]
            self.model.error_at = lambda part: part == chosen
        self.model.advance(len(self.model.stages) - 1)
        self.model.error_at = lambda part: False
        self.check_ends({})

    @precondition(lambda self: self.model.is_serving)
    @rule(num_blocks=POOLS, happens=SELDOM)
    def lose_a_worker(self, num_blocks: int | None, happens: bool) -> None:
        if not happens:
            return
        alone = self.engine.scheduler.isolated_sequence
        ends: Ends = {}
        if alone is not None:
            self.num_deaths_alone[alone.key.request_id] += 1
            if self.num_deaths_alone[alone.key.request_id] == DEFAULT_POLICY.max_deaths_alone:
                ends[alone.key.request_id] = RequestPoisoned
        self.model.die()
        self.check_ends(ends)
        self.replan(num_blocks)

    @precondition(lambda self: self.model.is_serving and self.engine.scheduler.num_steps_in_flight)
    @rule(place=PLACES, num_blocks=POOLS, happens=SELDOM, kind=st.sampled_from(StepFaultKind))
    def fault(self, place: int, num_blocks: int | None, happens: bool, kind: StepFaultKind) -> None:
        if not happens:
            return
        in_flight = self.model.sent[-self.engine.scheduler.num_steps_in_flight :]
        step_id = in_flight[place % len(in_flight)].step_id
        hit = {sequence.key.request_id for sequence in self.engine.scheduler.sequences_in_step(step_id)}
        self.model.fault(step_id, kind=kind)
        for request_id in hit:
            self.num_faults[request_id] += 1
        failing = [
            request_id for request_id in hit if self.num_faults[request_id] > DEFAULT_POLICY.max_step_retries
        ]
        self.check_ends(dict.fromkeys(failing, StepFailed))
        self.replan(num_blocks)

    @precondition(lambda self: not self.model.is_serving)
    @rule(num_blocks=POOLS)
    def replan(self, num_blocks: int | None) -> None:
        if num_blocks is None:
            return
        self.num_blocks = num_blocks
        misfits = [
            customer.request.id
            for customer in self.live
            if customer.request.max_sequence_tokens > num_blocks * BLOCK_SIZE
        ]
        self.model.start(num_blocks)
        self.check_ends(dict.fromkeys(misfits, ClusterUnavailable))

    @precondition(lambda self: not self.model.is_serving)
    @rule(happens=SELDOM)
    def give_up(self, happens: bool) -> None:
        if happens:
            ends: Ends = {customer.request.id: ClusterUnavailable for customer in self.live}
            self.engine.fail_all("no stage workers in time")
            self.check_ends(ends)

    # Time

    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0, 60.0]))
    def pass_time(self, seconds: float) -> None:
        self.model.now_s += seconds

    @rule()
    def sweep(self) -> None:
        ends: Ends = {customer.request.id: DeadlinePassed for customer in self.live if self.is_late(customer)}
        for customer in self.customers:
            is_read = not customer.call.is_over
            if customer.is_kept and not is_read and customer.expires_s <= self.model.now_s:
                customer.is_kept = False
        self.engine.sweep()
        self.check_ends(ends)

    def is_late(self, customer: Customer) -> bool:
        deadline_s = customer.deadline_s
        return deadline_s is not None and self.model.now_s >= deadline_s - DEADLINE_SLACK_S

    # Invariants

    def check_ends(self, expected: Ends) -> None:
        """Exactly these requests have ended since the last event, each with its reason.

        Those of a delivery that was due have ended first.
        """
        if self.is_delivery_due and not self.model.is_delivery_due:
            self.is_delivery_due = False
            expected = {**expected, **self.delivered_ends()}
        ended = {customer.request.id: customer for customer in self.live if not customer.request.is_live}
        assert {request_id: type(customer.request.error) for request_id, customer in ended.items()} == {
            request_id: type(None) if error is None else error for request_id, error in expected.items()
        }
        for customer in ended.values():
            customer.end = ended_as(customer.request)
            customer.ended_s = self.model.now_s
            customer.is_kept = customer.case.keep_s is not None
        for customer in self.customers:
            assert customer.end is (None if customer.request.is_live else ended_as(customer.request))

    @invariant()
    def totals_add_up(self) -> None:
        totals, ends = self.engine.totals, [customer.end for customer in self.customers]
        assert totals.finished == ends.count(SequenceState.FINISHED)
        assert totals.cancelled == ends.count(SequenceState.CANCELLED)
        assert totals.failed == ends.count(SequenceState.FAILED)
        assert totals.orphaned == 0
        assert [request.id for request in self.engine.registry.live] == [
            customer.request.id for customer in self.live
        ]
        assert self.engine.registry.num_kept == sum(customer.is_kept for customer in self.customers)

    @invariant()
    def a_suspect_that_runs_is_alone(self) -> None:
        scheduler = self.engine.scheduler
        if (alone := scheduler.isolated_sequence) is not None:
            assert scheduler.running == (alone,)
            assert set(scheduler.unfinished) <= {alone}

    @invariant()
    def the_scheduler_holds_what_is_live(self) -> None:
        scheduler = self.engine.scheduler
        held = [*scheduler.running, *scheduler.queue]
        live = [sequence for customer in self.live for sequence in customer.request.live_sequences]
        assert {id(sequence) for sequence in held} == {id(sequence) for sequence in live}
        assert len(held) == len(live)
        assert list(scheduler.queue) == sorted(scheduler.queue, key=lambda sequence: sequence.order)
        assert all(sequence.state.is_queued for sequence in scheduler.queue)
        assert not any(sequence.state.is_queued for sequence in scheduler.running)
        if self.model.is_serving:
            self.model.kv.check_integrity([sequence.kv for sequence in scheduler.running])

    @invariant()
    def tokens_are_those_of_a_solo_run(self) -> None:
        for customer in self.customers:
            num_prompt_tokens = len(customer.case.prompt)
            num_echoed = num_prompt_tokens if customer.case.echo else 0
            for choice, outcome in zip(customer.request.choices, customer.expected, strict=True):
                sequence = choice.sequence
                generated = sequence.generated_tokens
                assert generated == outcome.tokens[num_echoed:][: len(generated)]
                assert sequence.all_tokens[:num_prompt_tokens] == customer.case.prompt
                assert num_prompt_tokens == sequence.num_prompt_tokens <= sequence.num_tokens
                assert 0 <= sequence.num_computed_tokens <= sequence.num_tokens
                has_all = choice.buffer.num_tokens == len(outcome.tokens)
                assert choice.buffer.is_finished <= has_all
                assert choice.buffer.is_finished or not has_all or customer.case.max_tokens == 0

    @invariant()
    def only_the_newest_call_reads(self) -> None:
        for customer in self.customers:
            reader = None if customer.call.is_over else customer.call.stream
            assert customer.request.stream is reader
            assert reader is None or reader.num_unread_tokens <= self.max_unread or customer.end is not None

    # The end

    def teardown(self) -> None:
        if hasattr(self, "model"):
            try:
                self.drain()
            finally:
                self.model.close()

    def check_observers(self) -> None:
        """Each has the whole output, or the error and the output before it."""
        for customer, call in self.observers:
            call.read_all()
            assert call.is_over
            assert type(call.error) is type(customer.request.error)
            for choice, outcome in enumerate(customer.expected):
                tokens = call.tokens(choice)
                assert tokens == outcome.tokens[: len(tokens)]
                assert call.error is not None or tokens == outcome.tokens

    def drain(self) -> None:
        """After all readers have read everything, no resource is held."""
        if not self.model.is_serving:
            self.replan(LARGEST_POOL)
        for _ in range(5000):
            self.read_everything()
            if not self.run_step():
                break
        assert not self.live
        for customer in self.customers:
            if customer.is_kept:
                customer.attach(self.model, list(customer.num_tokens), customer.num_scores, None)
        self.read_everything()
        assert all(customer.call.is_over for customer in self.customers)
        self.check_observers()
        self.model.now_s += 1000
        self.sweep()
        self.totals_add_up()
        assert self.engine.registry.num_kept == 0
        self.model.check_idle()
        event(f"preemptions: {min(self.engine.scheduler.counts.num_preemptions, 5)}")

    def read_everything(self) -> None:
        for customer in self.customers:
            while customer.read(self.model.now_s):
                pass
        for _, call in self.observers:
            call.read_all()
        self.read_stale()


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=examples(0.6), stateful_step_count=50)
