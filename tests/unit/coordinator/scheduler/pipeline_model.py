"""Small pipeline model: a scheduler over manually driven stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from coordinator.recovery.policy import DEFAULT_POLICY
from coordinator.scheduler.cost_model import decodes_cost
from coordinator.scheduler.kv_manager import KvCacheManager
from coordinator.scheduler.policy import DecodeLoad, SchedulerLimits
from coordinator.scheduler.scheduler import Scheduler
from coordinator.scheduler.sequence import FinishReason, Priority, QueueOrder, SequenceState
from coordinator.scheduler.sequence import Sequence as RequestSequence
from kvcache import KvGroup, KvWindow
from tests.unit.coordinator.scheduler.stage_replica import StageReplica, kv_entries, kv_entry, sample
from wire.ids import RequestId, SequenceKey
from wire.sampling import StepSampling
from wire.steps import Decode, SliceError, SliceResult, StageTime, Step, StepResult, StepSlice

GREEDY = StepSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)


def key_of(number: int) -> SequenceKey:
    """The sequence of request `number`."""
    return SequenceKey(RequestId(number.to_bytes(16, "big")), 0)


def solo_run(
    prompt: Sequence[int], max_tokens: int, stop_token_ids: frozenset[int]
) -> tuple[list[int], FinishReason]:
    """Tokens of a request without other requests."""
    entry, generated = kv_entries(prompt)[-1], list[int]()
    while True:
        generated.append(sample(entry))
        if generated[-1] in stop_token_ids:
            return generated, FinishReason.STOP
        if len(generated) == max_tokens:
            return generated, FinishReason.LENGTH
        entry = kv_entry(entry, generated[-1])


@dataclass(slots=True)
class _Client:
    """Received and expected tokens of one request."""

    sequence: RequestSequence
    expected: list[int]
    expected_reason: FinishReason
    delivered: list[int] = field(default_factory=list)
    end: SequenceState | None = None


class PipelineModel:
    """A scheduler over manually driven stages. Checks invariants after every event."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        limits: SchedulerLimits,
        num_stages: int = 1,
        prefix_caching: bool = True,
        window: int | None = None,
        other_groups: Sequence[KvGroup] = (),
        num_states: int = 0,
        grid_tokens: int = 8,
    ) -> None:
        self._num_states, self._grid_tokens = num_states, grid_tokens
        self._window, self._other_groups = window, other_groups
        self.scheduler = Scheduler(DEFAULT_POLICY)
        self.limits = limits
        self.num_blocks, self.block_size = num_blocks, block_size
        self.clients: dict[SequenceKey, _Client] = {}
        self.num_steps = 0
        self.sent: list[Step] = []
        self.error_at: Callable[[StepSlice], bool] = lambda part: False
        self.late_at: Callable[[StepSlice], bool] = lambda part: False
        """Rows whose outcome the next result has."""
        self.stage_times: Callable[[Step], tuple[StageTime, ...]] = lambda step: ()
        self._num_stages = num_stages
        self._prefix_caching = prefix_caching
        self.epoch = 0
        self._clear()

    @property
    def is_done(self) -> bool:
        """Every request has ended and every step is answered."""
        all_ended = all(client.end is not None for client in self.clients.values())
        return all_ended and self.is_serving and not self.scheduler.num_steps_in_flight

    @property
    def is_serving(self) -> bool:
        return self.scheduler.kv is not None

    @property
    def kv(self) -> KvCacheManager:
        assert self.scheduler.kv is not None
        return self.scheduler.kv

    def begin_epoch(self) -> None:
        self.epoch += 1
        self._clear()
        kv = KvCacheManager(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            prefix_caching=self._prefix_caching,
            window=KvWindow.of(self._window, self.limits.max_step_tokens),
            other_groups=self._other_groups,
            num_states=self._num_states,
            grid_tokens=self._grid_tokens,
        )
        self.scheduler.begin_epoch(self.epoch, kv, self.limits)
        self.stages = [
            StageReplica(
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                limits=self.limits,
                window=self._window,
                other_groups=self._other_groups,
                num_states=self._num_states,
            )
            for _ in range(self._num_stages)
        ]
        self.pump()

    def end_epoch(self) -> None:
        self.scheduler.end_epoch()
        self._clear()
        self._check_order()
        assert not self.scheduler.running
        assert all(sequence.state.is_queued for sequence in self.scheduler.queue)

    def fault(self, step_id: int) -> None:
        """A stage refuses a step: its requests fail, the epoch ends."""
        for sequence in self.scheduler.sequences_in_step(step_id):
            self.cancel(sequence.key, SequenceState.FAILED, pump=False)
        self.end_epoch()

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        stop_token_ids: frozenset[int] = frozenset(),
        client: str = "",
        priority: Priority = Priority.NORMAL,
    ) -> RequestSequence:
        number = len(self.clients)
        sequence = RequestSequence(
            key_of(number),
            tuple(prompt),
            max_tokens=max_tokens,
            sampling=GREEDY,
            stop_token_ids=stop_token_ids,
            order=QueueOrder(0.0, number, priority=priority),
        )
        sequence.client = client
        self.clients[sequence.key] = _Client(sequence, *solo_run(prompt, max_tokens, stop_token_ids))
        self.scheduler.add(sequence)
        self.pump()
        return sequence

    def cancel(
        self, key: SequenceKey, state: SequenceState = SequenceState.CANCELLED, *, pump: bool = True
    ) -> None:
        client = self.clients[key]
        assert client.end is None
        self.scheduler.drop(client.sequence, state)
        client.end = state
        if pump:
            self.pump()

    def pump(self) -> None:
        """Sends steps until there are none, like the engine after each event."""
        while True:
            costs = [
                decodes_cost(1, sequence.num_tokens)
                for sequence in self.scheduler.running
                if sequence.state is SequenceState.DECODE
            ]
            is_even = self._spreads_decodes_evenly()
            step = self.scheduler.next_step(0.0)
            self._check_order()
            if step is None:
                return
            self._check_step(step, costs if is_even else [])
            self.sent.append(step)
            self.num_steps += 1
            self.queues[0].append(step)

    def advance(self, stage: int) -> bool:
        """Stage `stage` runs the oldest step that waits there; False if there is none."""
        if not self.queues or not self.queues[stage]:
            return False
        step = self.queues[stage].popleft()
        tokens = self.stages[stage].apply(step)
        if stage + 1 < len(self.stages):
            self.queues[stage + 1].append(step)
            return True
        late_rows, self._late_rows = self._late_rows, []
        rows = [self._row(part, tokens) for part in step.slices if part.is_sampled]
        result = StepResult.of(step.epoch, step.step_id, rows, self.stage_times(step))
        self.results.append(replace(result, late_rows=tuple(late_rows)))
        return True

    def _row(self, part: StepSlice, tokens: dict[SequenceKey, int]) -> SliceResult:
        row = SliceResult(part.sequence, part.restart_count, self._outcome(part, tokens))
        if not self.late_at(part):
            return row
        self._late_rows.append(row)
        return replace(row, outcome=None, is_late=True)

    def deliver(self) -> bool:
        """The oldest result reaches the coordinator; False if there is none."""
        if not self.results:
            return False
        for progress in self.scheduler.complete(self.results.popleft(), 0.0):
            client = self.clients[progress.sequence.key]
            assert client.end is None, "news of a request that has ended"
            if progress.token is not None:
                client.delivered.append(progress.token)
            if progress.finish_reason is not None:
                assert progress.finish_reason is client.expected_reason
                client.end = SequenceState.FINISHED
            if progress.error is not None:
                client.end = SequenceState.FAILED
            assert client.delivered == client.expected[: len(client.delivered)]
        self.pump()
        return True

    def run_step(self) -> bool:
        """Runs the oldest step on all stages and delivers its result."""
        while not self.results:
            if not any(self.advance(stage) for stage in reversed(range(len(self.stages)))):
                return False
        return self.deliver()

    def drain(self, *, max_steps: int) -> None:
        """Runs until all requests have ended; fails after `max_steps` steps or on a deadlock."""
        limit = self.num_steps + max_steps
        self.pump()
        while not self.is_done:
            assert self.run_step(), f"nothing moves: {[c.sequence.state for c in self.clients.values()]}"
            assert self.num_steps <= limit, f"more than {max_steps} steps"

    def check_all_ended(self) -> None:
        """Each request has ended once with its own tokens, and no resource is held."""
        for client in self.clients.values():
            assert client.sequence.state is client.end
            assert list(client.sequence.generated_tokens) == client.delivered
            if client.end is SequenceState.FINISHED:
                assert client.delivered == client.expected
        assert not self.scheduler.running
        assert not self.scheduler.queue
        assert self.kv.num_active == 0
        assert not self.kv.has_pending
        self.kv.check_integrity([])
        for stage in self.stages:
            stage.check_idle()

    def _outcome(self, part: StepSlice, tokens: dict[SequenceKey, int]) -> int | SliceError:
        if self.error_at(part):
            return SliceError(1, len(self.stages) - 1, "made up")
        return tokens[part.sequence]

    def _clear(self) -> None:
        """Frames in flight are void."""
        self.stages = []
        self.queues: list[deque[Step]] = [deque() for _ in range(self._num_stages)]
        self.results: deque[StepResult] = deque()
        self._late_rows: list[SliceResult] = []

    def _check_order(self) -> None:
        """First come, first served: no queued request arrived before a running one of its client."""
        both = (*self.scheduler.running, *self.scheduler.queue)
        for client in {sequence.client for sequence in both}:
            orders = [sequence.order for sequence in both if sequence.client == client]
            assert orders == sorted(orders)
        decoding = [one for one in self.scheduler.running if one.state is SequenceState.DECODE]
        cost = decodes_cost(len(decoding), sum(sequence.num_tokens for sequence in decoding))
        assert self.scheduler._decoding.load == DecodeLoad(len(decoding), cost)
        if self.scheduler.kv is not None:
            self.scheduler.kv.check_integrity([sequence.kv for sequence in self.scheduler.running])

    def _spreads_decodes_evenly(self) -> bool:
        """Not if the times of decodes are known and prompts wait, whose chunks fill the steps."""
        scheduler = self.scheduler
        is_waiting = scheduler.queue or any(sequence.can_prefill for sequence in scheduler.running)
        return not is_waiting or not scheduler.cost_model.slowest.knows_decodes

    def _check_step(self, step: Step, costs: list[int]) -> None:
        assert self.scheduler.num_steps_in_flight <= self.limits.max_steps_in_flight
        decodes = [part for part in step.slices if isinstance(part.inference_step, Decode)]
        if decodes and costs:
            share = sum(costs) / self.limits.min_in_flight
            step_cost = sum(decodes_cost(1, part.first_position + 1) for part in decodes)
            assert step_cost <= share + max(costs)
        num_before = self.scheduler.num_steps_in_flight - 1
        before = self.sent[len(self.sent) - num_before :]
        sampled = [part for step in before for part in step.slices if part.is_sampled]
        owed = {(part.sequence, part.restart_count) for part in sampled}
        for part in step.slices:
            assert (part.sequence, part.restart_count) not in owed, "two tokens of one sequence in flight"
