"""A whole pipeline without a network: the real scheduler and real stages, frames through the real codec.

For the full matrices of models, cuts and prompts, where starting servers would cost more than computing.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from checkpoint import BoundaryTensor, Checkpoint, DType, ScaledDType, WeightFormat
from coordinator.recovery.policy import DEFAULT_POLICY
from coordinator.recovery.self_check_script import Script
from coordinator.scheduler.kv_manager import KvCacheManager
from coordinator.scheduler.policy import SchedulerLimits
from coordinator.scheduler.scheduler import Scheduler
from coordinator.scheduler.sequence import QueueOrder, Sequence, SequenceState
from kvcache import SNAPSHOT_GRID_TOKENS, KvGroup, KvWindow, group_windows
from stage_worker.assignment import Assignment
from stage_worker.backends.model_compute import ModelCompute
from stage_worker.backends.torch_backend import handed_on_states
from stage_worker.backends.transfers import DeviceQueue, StagingRing
from stage_worker.executor import StepExecutor
from stage_worker.loading.stage_loader import new_queue
from stage_worker.loading.stage_pages import new_pages
from stage_worker.model.decoder import DecoderStage
from stage_worker.model.pipeline_stage import PipelineStage
from wire.frames import Frame, FrameAssembler, StepFrame, encode_hidden_states, encode_step_frame
from wire.ids import SequenceKey, StageRole, new_request_id
from wire.reference import decode_states
from wire.sampling import StepSampling
from wire.step_codec import encode_step
from wire.steps import Prefill, Step, StepResult
from wire.tensors import HiddenStates, TensorView

GREEDY = StepSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to generate, and when: arrival and cancellation are counted in answered steps.

    Time passes in leaps where nothing is live: then the next one arrives at once.
    """

    prompt: Tokens[int]
    max_tokens: int
    sampling: StepSampling = GREEDY
    stop_token_ids: frozenset[int] = frozenset()
    cache_salt: str = ""
    choice: int = 0
    arrives_at: int = 0
    cancelled_at: int | None = None


@dataclass(slots=True)
class Run:
    """One epoch: its scheduler and sequences, and what was seen on the way."""

    scheduler: Scheduler
    kv: KvCacheManager
    sequences: list[Sequence] = field(default_factory=list)
    num_answered: int = 0
    num_prefill_tokens: int = 0
    first_token_after_s: dict[SequenceKey, float] = field(default_factory=dict)

    @property
    def tokens(self) -> list[list[int]]:
        """The new tokens of each request, in the order in which the requests were given."""
        return [list(sequence.generated_tokens) for sequence in self.sequences]


class LocalPipeline:
    """Stages that hold `layers[i]` layers each, one after another in this thread."""

    def __init__(
        self,
        directory: Path,
        layers: Tokens[int],
        *,
        dtype: DType = DType.F32,
        block_size: int = 16,
        num_blocks: int = 256,
        other_num_blocks: Tokens[int] = (),
        max_step_tokens: int = 64,
        max_step_sequences: int = 16,
        prefix_caching: bool = True,
        releases_window: bool = True,
        device: str = "cpu",
        weights: WeightFormat | None = None,
        kv_dtype: ScaledDType | None = None,
        stage_type: Callable[..., PipelineStage] = DecoderStage,
        handed_on: tuple[BoundaryTensor, ...] = (),
        queue: DeviceQueue | None = None,
        num_states: int = 8,
        grid_tokens: int = SNAPSHOT_GRID_TOKENS,
    ) -> None:
        """`num_states` are for models with recurrent layers, whose snapshots are `grid_tokens` apart.

        `queue` copies to and from the device of the stages, which is a CPU without one.

        `releases_window` False keeps the blocks that a sliding window hides, to compare with.

        `other_num_blocks` are those of the block groups after the first; by default `num_blocks` each.
        Stages are of `stage_type`, and hand on `handed_on` beside the hidden states.
        """
        checkpoint = Checkpoint.open(directory).with_weights(weights)
        self._checkpoint = replace(checkpoint, config=replace(checkpoint.config, handed_on=handed_on))
        self._stage_type = stage_type
        self._device, self._queue = torch.device(device), queue
        self._limits = SchedulerLimits(
            max_step_tokens=max_step_tokens,
            max_step_sequences=max_step_sequences,
            max_steps_in_flight=len(layers),
        )
        self._block_size, self._num_blocks, self._dtype = block_size, num_blocks, dtype
        self._kv_dtype = kv_dtype
        self._num_states = num_states if checkpoint.config.is_recurrent else 0
        self._grid_tokens = grid_tokens
        windows = group_windows(self._checkpoint.config.cache_windows)
        self._windows = [KvWindow.of(w if releases_window else None, max_step_tokens) for w in windows]
        self._other_num_blocks = tuple(other_num_blocks or (num_blocks,) * (len(windows) - 1))
        ends = list(itertools.accumulate(layers))
        self.stages = [
            self._stage(stage, len(layers), end - size, end)
            for stage, (size, end) in enumerate(zip(layers, ends, strict=True))
        ]
        self._prefix_caching = prefix_caching
        self._epoch = 0
        self.on_step: Callable[[Step, Run], None] = lambda step, run: None
        self.before_stage: Callable[[int, Step], None] = lambda stage, step: None
        self.last_run: Run | None = None

    def generate(
        self,
        prompts: Tokens[Tokens[int]],
        *,
        max_tokens: int,
        sampling: StepSampling = GREEDY,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> list[list[int]]:
        """The new tokens of each prompt; all prompts are there from the beginning, in a fresh epoch."""
        requests = [
            Request(prompt=prompt, max_tokens=max_tokens, sampling=sampling, stop_token_ids=stop_token_ids)
            for prompt in prompts
        ]
        return self.serve(requests).tokens

    def serve(self, requests: Tokens[Request]) -> Run:
        """Serves all requests to their ends, in a fresh epoch; afterwards no block may be held.

        `on_step` is called when a step is handed out, `before_stage` before each stage computes it.
        """
        self._epoch += 1
        for stage, executor in enumerate(self.stages):
            executor.begin_epoch(self._epoch, stage=stage)
        run = self.last_run = Run(Scheduler(DEFAULT_POLICY), self.new_log())
        run.scheduler.begin_epoch(self._epoch, run.kv, self._limits)
        order = sorted(range(len(requests)), key=lambda index: requests[index].arrives_at)
        run.sequences = [_sequence(request, order.index(i)) for i, request in enumerate(requests)]
        self._run(run, requests)
        run.kv.check_integrity([])
        for executor in self.stages:
            executor.check_integrity()
            assert executor.stats.blocks_active == 0
            assert executor.stats.states_live == 0
        return run

    def play(self, script: Script) -> tuple[list[StepResult], dict[int, array[float]]]:
        """The steps of a self-check: what LAST answers, and what every other stage hands on."""
        self._epoch = script.steps[0].step.epoch
        for stage, executor in enumerate(self.stages):
            executor.begin_epoch(self._epoch, stage=stage)
        handed_on: dict[int, list[TensorView]] = {stage: [] for stage in range(len(self.stages) - 1)}
        results = [self._compute(step.step, handed_on) for step in script.steps]
        states = {
            stage: decode_states(handed_on_states(views), sum(view.shape[0] for view in views))
            for stage, views in handed_on.items()
        }
        return results, states

    def new_log(self) -> KvCacheManager:
        """An empty ledger for these stages."""
        return KvCacheManager(
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            prefix_caching=self._prefix_caching,
            window=self._windows[0],
            other_groups=list(map(KvGroup, self._other_num_blocks, self._windows[1:])),
            num_states=self._num_states,
            grid_tokens=self._grid_tokens,
        )

    def _run(self, run: Run, requests: Tokens[Request]) -> None:
        """As many steps in flight as there are stages, each computed as late as possible."""
        started_s = time.perf_counter()
        pairs = list(zip(requests, run.sequences, strict=True))
        coming = deque(sorted(pairs, key=lambda pair: pair[0].arrives_at))
        in_flight: deque[Step] = deque()
        while True:
            while coming and coming[0][0].arrives_at <= run.num_answered:
                run.scheduler.add(coming.popleft()[1])
            _cancel_due(run, [pair for pair in pairs if pair not in coming])
            in_flight.extend(self._hand_out(run))
            if not in_flight and not coming:
                return
            if in_flight:
                for progress in run.scheduler.complete(self._compute(in_flight.popleft()), 0.0):
                    assert progress.error is None, progress.error
                    now_s = time.perf_counter() - started_s
                    run.first_token_after_s.setdefault(progress.sequence.key, now_s)
                run.num_answered += 1
            else:
                run.num_answered = coming[0][0].arrives_at

    def _hand_out(self, run: Run) -> list[Step]:
        steps = []
        while (step := run.scheduler.next_step(0.0)) is not None:
            run.num_prefill_tokens += sum(
                len(part.tokens) for part in step.slices if isinstance(part.inference_step, Prefill)
            )
            self.on_step(step, run)
            steps.append(step)
        return steps

    def _compute(self, step: Step, handed_on: dict[int, list[TensorView]] | None = None) -> StepResult:
        """Adds to `handed_on` the hidden states that each stage hands on."""
        hidden: HiddenStates = ()
        message = encode_step_frame(encode_step(step))
        for stage, executor in enumerate(self.stages):
            self.before_stage(stage, step)
            output = executor.run(_over_the_wire(message, hidden, to_first=stage == 0))
            if isinstance(output, StepResult):
                return output
            hidden = output.hidden
            if handed_on is not None and hidden:
                handed_on[stage].append(hidden[0])
        raise AssertionError("no stage had the head")

    def _stage(self, stage: int, num_stages: int, begin: int, end: int) -> StepExecutor:
        config = self._checkpoint.config
        role = StageRole.of_stage(stage, num_stages)
        assignment = Assignment(
            plan_id=1,
            stage=stage,
            num_stages=num_stages,
            role=role,
            layer_begin=begin,
            layer_end=end,
            model_directory=str(self._checkpoint.directory),
            fingerprint=self._checkpoint.fingerprint,
            dtype=self._dtype,
            kv_dtype=self._kv_dtype,
            block_size=self._block_size,
            num_blocks=self._num_blocks,
            other_num_blocks=self._other_num_blocks,
            num_states=self._num_states,
            max_step_tokens=self._limits.max_step_tokens,
            max_step_sequences=self._limits.max_step_sequences,
            max_sequence_tokens=config.max_position_embeddings,
        )
        device = self._device
        model = self._stage_type(
            config,
            layer_begin=begin,
            layer_end=end,
            has_embeddings=role.has_embeddings,
            has_head=role.has_head,
            dtype=self._dtype,
            device=device,
        )
        model.load(self._checkpoint, copies=new_queue(self._device))
        pages = new_pages(assignment, config, device)
        transfers = None
        if self._queue is not None:
            transfers = StagingRing(self._queue, assignment.staging_sizes(config.boundary), timeout_s=60.0)
        return StepExecutor(assignment, ModelCompute(model, pages, transfers=transfers))


def _sequence(request: Request, arrival: int) -> Sequence:
    return Sequence(
        SequenceKey(new_request_id(), request.choice),
        tuple(request.prompt),
        max_tokens=request.max_tokens,
        sampling=request.sampling,
        stop_token_ids=request.stop_token_ids,
        order=QueueOrder(0.0, arrival),
        cache_salt=request.cache_salt,
    )


def _cancel_due(run: Run, arrived: Tokens[tuple[Request, Sequence]]) -> None:
    for request, sequence in arrived:
        is_due = request.cancelled_at is not None and request.cancelled_at <= run.num_answered
        if is_due and sequence.state.is_live:
            run.scheduler.drop(sequence, SequenceState.CANCELLED)


def _over_the_wire(message: bytes, hidden: HiddenStates, *, to_first: bool) -> Frame:
    assembler = FrameAssembler(max_payload_bytes=1 << 30, takes_hidden=not to_first)
    (step,) = assembler.add(message)
    assert isinstance(step, StepFrame)
    if to_first:
        return step.without_hidden
    for chunk in encode_hidden_states(step.step.step_id, step.checksum, hidden):
        received = assembler.add(chunk)
    (frame,) = received
    assert isinstance(frame, Frame)
    return frame
