"""Outputs of a mock stage: deterministic tokens and hidden states, and simulated device faults."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain

from checkpoint import BoundaryTensor
from checkpoint.boundary import HIDDEN_STATES
from stage_worker.assignment import Assignment
from stage_worker.backends.contract import Computed, DeviceError, StageCompute
from stage_worker.backends.mock_spec import MockSpec
from stage_worker.validation import SliceLayout
from stageline_rpc.internal.v1 import step_pb2
from wire.frames import Frame
from wire.ids import SequenceKey
from wire.sampling import StepSampling
from wire.steps import (
    Decode,
    SliceError,
    SliceResult,
    StartRecord,
    Step,
    StepResult,
    StepSlice,
    pack_column,
    unpack_column,
)
from wire.tensors import TensorView, payload_bytes


class MockDevice:
    """Simulated device, one per process: its state outlives stages and epochs."""

    def __init__(self, spec: MockSpec) -> None:
        self._spec = spec
        self._num_steps = 0

    @property
    def is_hung(self) -> bool:
        """No further step ends."""
        return self._spec.hang_after is not None and self._num_steps > self._spec.hang_after

    def compute(self, num_tokens: int) -> None:
        """Count a step of `num_tokens`. Raises DeviceError or MemoryError as specified."""
        spec = self._spec
        if spec.oom_at is not None and num_tokens >= spec.oom_at:
            raise MemoryError(f"mock: {num_tokens} tokens, out of memory at {spec.oom_at} (oom_at)")
        self._num_steps += 1
        if spec.poison_after is not None and self._num_steps > spec.poison_after:
            raise DeviceError(f"mock: poisoned after {spec.poison_after} steps (poison_after)")


class MockConstraints:
    """Token constraints of one sequence, and the history that they need.

    All logits of a mock are equal, so the highest bias wins. Among equals, the order begins at the mock's
    default token, and end-of-sequence tokens come last.
    """

    def __init__(self, record: StartRecord, *, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        sampling = record.sampling
        self._eos_token_ids = frozenset(eos_token_ids)
        self._tiers = _tiers(sampling, vocab_size)
        self._hold_back = frozenset(sampling.min_tokens_hold_back)
        self._min_tokens = sampling.min_tokens
        self._num_generated = len(record.tokens) - record.num_prompt_tokens
        self._bad_words = sampling.bad_words
        longest = max((len(word) for word in sampling.bad_words), default=1)
        self._tail = deque(record.tokens[max(0, len(record.tokens) - longest + 1) :], maxlen=longest - 1)

    @staticmethod
    def are_in(sampling: StepSampling) -> bool:
        """Whether `sampling` restricts the tokens."""
        holds_back = sampling.min_tokens > 0 and sampling.min_tokens_hold_back
        return bool(sampling.allowed_token_ids or sampling.bad_words or sampling.logit_bias or holds_back)

    def add(self, token: int) -> None:
        """Append a generated token to the history."""
        self._num_generated += 1
        self._tail.append(token)

    def choose(self, first: int) -> int | None:
        """The token to sample, where `first` begins the order of equals; None if no token is allowed."""
        banned = self._banned()
        for tier in self._tiers:
            best: int | None = None
            for token in tier(first):
                if token in banned:
                    continue
                if token not in self._eos_token_ids:
                    return token
                best = token if best is None else best
            if best is not None:
                return best
        return None

    def _banned(self) -> set[int]:
        tail = tuple(self._tail)
        banned = {
            word[-1]
            for word in self._bad_words
            if len(word) == 1 or (len(word) <= len(tail) + 1 and tail[1 - len(word) :] == word[:-1])
        }
        if self._num_generated < self._min_tokens:
            banned |= self._hold_back
        return banned


_Tier = Callable[[int], Iterator[int]]
"""Tokens with one bias, each once, in cyclic order from the given token on."""


def _tiers(sampling: StepSampling, vocab_size: int) -> list[_Tier]:
    """Highest bias first; tokens without a bias have 0."""
    allowed = sampling.allowed_token_ids
    biases = dict(sampling.logit_bias)
    by_bias: dict[float, list[int]] = {}
    for token in sorted(allowed) if allowed else sorted(biases):
        by_bias.setdefault(biases.get(token, 0.0), []).append(token)
    tiers = {bias: _listed(tokens) for bias, tokens in by_bias.items()}
    if not allowed:
        biased = frozenset(token for token, bias in biases.items() if bias != 0.0)
        tiers[0.0] = _all_but(biased, vocab_size)
    return [tiers[bias] for bias in sorted(tiers, reverse=True)]


def _listed(tokens: Sequence[int]) -> _Tier:
    def tier(first: int) -> Iterator[int]:
        place = bisect_left(tokens, first)
        return chain(tokens[place:], tokens[:place])

    return tier


def _all_but(excluded: Collection[int], vocab_size: int) -> _Tier:
    def tier(first: int) -> Iterator[int]:
        order = chain(range(first, vocab_size), range(first))
        return (token for token in order if token not in excluded)

    return tier


def mock_token(token: int, position: int, *, vocab_size: int, eos_token_ids: Collection[int] = ()) -> int:
    """Deterministic next token, never one of `eos_token_ids`. Raises ValueError if there is no other."""
    first = _first_choice(token, position, vocab_size=vocab_size)
    for offset in range(vocab_size):
        candidate = (first + offset) % vocab_size
        if candidate not in eos_token_ids:
            return candidate
    raise ValueError(f"all {vocab_size} tokens of the vocabulary end a sequence")


def _first_choice(token: int, position: int, *, vocab_size: int) -> int:
    return (31 * token + 17 * position + 7) % vocab_size


class MockCompute(StageCompute):
    """Mock of one stage's layers: FIRST outputs zeros, others their input, or zeros if dtypes differ."""

    def __init__(self, assignment: Assignment, device: MockDevice | None = None) -> None:
        """`device` defaults to one that never fails. Raises ValueError without model sizes."""
        shape = assignment.model_shape
        if not shape.hidden_size or not shape.vocab_size:
            raise ValueError(
                "a mock stage needs the sizes of hidden states and vocabulary, "
                f"got {shape.hidden_size} and {shape.vocab_size}"
            )
        self._device = device or MockDevice(MockSpec())
        self.boundary = (BoundaryTensor(name=HIDDEN_STATES, width=shape.hidden_size),)
        self.vocab_size = shape.vocab_size
        self._eos_token_ids = frozenset(shape.eos_token_ids)
        self._has_head = assignment.role.has_head
        self._dtype = assignment.sent_dtype
        self._stage = assignment.stage
        # Never written, so the system maps it to a single page of zeros.
        self._zeros = memoryview(
            bytes(payload_bytes(self._dtype, (assignment.max_step_tokens, shape.hidden_size)))
        )
        self._unanswerable: dict[SequenceKey, str] = {}
        self._constraints: dict[SequenceKey, MockConstraints] = {}

    def begin_epoch(self, *, stage: int) -> None:
        self._stage = stage
        self._unanswerable.clear()
        self._constraints.clear()

    def start(self, record: StartRecord) -> None:
        if not self._has_head:
            return
        if (problem := _unanswerable(record.sampling)) is not None:
            self._unanswerable[record.sequence] = problem
        elif MockConstraints.are_in(record.sampling):
            self._constraints[record.sequence] = MockConstraints(
                record, vocab_size=self.vocab_size, eos_token_ids=self._eos_token_ids
            )

    def end(self, sequence: SequenceKey) -> None:
        self._unanswerable.pop(sequence, None)
        self._constraints.pop(sequence, None)

    def prepare(self, step: Step, layouts: Sequence[SliceLayout]) -> None:
        """A mock has no pages."""

    def compute(self, frame: Frame, prepared: object) -> Computed:
        self._device.compute(frame.step.num_tokens)
        if self._has_head:
            return self._answer(frame.step)
        if frame.hidden and frame.hidden[0].dtype is self._dtype:
            return frame.hidden
        shape = (frame.step.num_tokens, self.boundary[0].width)
        return (TensorView(self._dtype, shape, self._zeros[: payload_bytes(self._dtype, shape)]),)

    def _answer(self, step: Step) -> StepResult:
        if step.chunks or self._unanswerable or self._constraints:
            results = [self._result(step_slice) for step_slice in step.slices if step_slice.is_answered]
            return StepResult.of(step.epoch, step.step_id, results)
        vocab_size, eos_token_ids = self.vocab_size, self._eos_token_ids
        columns = zip(unpack_column(step.decodes.tokens), unpack_column(step.decodes.positions), strict=True)
        tokens = [
            mock_token(token, position, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
            for token, position in columns
        ]
        return StepResult(step.epoch, step.step_id, step.decodes.identities, pack_column(tokens))

    def _result(self, step_slice: StepSlice) -> SliceResult:
        problem = (
            self._unanswerable.get(step_slice.sequence)
            if not step_slice.is_scored
            else "prompt log-probabilities"
        )
        if problem is not None:
            return self._failed(step_slice, f"mock stages have no {problem}")
        constraints = self._constraints.get(step_slice.sequence)
        last = step_slice.first_position + len(step_slice.tokens) - 1
        if constraints is None:
            token: int | None = mock_token(
                step_slice.tokens[-1], last, vocab_size=self.vocab_size, eos_token_ids=self._eos_token_ids
            )
        else:
            if isinstance(step_slice.inference_step, Decode):
                constraints.add(step_slice.tokens[-1])
            token = constraints.choose(_first_choice(step_slice.tokens[-1], last, vocab_size=self.vocab_size))
        if token is None:
            return self._failed(
                step_slice, f"no token is allowed at position {last + 1} of {step_slice.sequence}"
            )
        return SliceResult(step_slice.sequence, step_slice.restart_count, token)

    def _failed(self, step_slice: StepSlice, problem: str) -> SliceResult:
        error = SliceError(step_pb2.SliceError.KIND_SAMPLER, self._stage, problem)
        return SliceResult(step_slice.sequence, step_slice.restart_count, error)


def _unanswerable(sampling: StepSampling) -> str | None:
    """Whether `sampling` needs logits; the coordinator rejects these parameters already."""
    if sampling.logprobs is not None:
        return "log-probabilities"
    if sampling.grammar is not None:
        return "structured output"
    penalties = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty - 1.0)
    return "penalties" if any(penalties) else None
