"""What a mock stage puts in the place of computation: hidden states of the right shape, known tokens."""

from collections.abc import Collection, Sequence

from stage_worker.assignment import Assignment
from stage_worker.mock.constraints import MockConstraints
from stage_worker.mock.device import MockDevice
from stage_worker.mock.spec import MockSpec
from stage_worker.slice_layout import SliceLayout
from stage_worker.stage_compute import Computed, StageCompute
from stageline_rpc.v1 import stage_pb2
from wire.frames import Frame
from wire.ids import SequenceKey
from wire.steps import Decode, Slice, SliceError, SliceResult, StartRecord, Step, StepSampling
from wire.tensors import TensorView
from wire.wire_dtypes import payload_bytes


def mock_token(token: int, position: int, *, vocab_size: int, eos_token_ids: Collection[int] = ()) -> int:
    """The token that mock stages sample after `token` at this absolute position; never one that ends.

    Raises ValueError for a vocabulary of nothing else.
    """
    first = _first_choice(token, position, vocab_size=vocab_size)
    for offset in range(vocab_size):
        candidate = (first + offset) % vocab_size
        if candidate not in eos_token_ids:
            return candidate
    raise ValueError(f"a vocabulary of {vocab_size} tokens, all of which end a sequence")


def _first_choice(token: int, position: int, *, vocab_size: int) -> int:
    return (31 * token + 17 * position + 7) % vocab_size


class MockCompute(StageCompute):
    """Stands for the layers of one stage: FIRST makes zeros, all others pass on what came, or zeros where it
    came in another dtype than they send.
    """

    def __init__(self, assignment: Assignment, device: MockDevice | None = None) -> None:
        """`device` is one that never fails unless given. Raises ValueError when the assignment does not say
        what the model is like.
        """
        shape = assignment.model_shape
        if not shape.hidden_size or not shape.vocab_size:
            raise ValueError(
                "a mock stage needs the sizes of hidden states and vocabulary, "
                f"got {shape.hidden_size} and {shape.vocab_size}"
            )
        self._device = device or MockDevice(MockSpec())
        self.hidden_size = shape.hidden_size
        self.vocab_size = shape.vocab_size
        self._eos_token_ids = frozenset(shape.eos_token_ids)
        self._has_head = assignment.role.has_head
        self._dtype = assignment.sent_dtype
        self._stage = assignment.stage
        # Never written to, so the system backs it with one page of zeros.
        self._zeros = memoryview(
            bytes(payload_bytes(self._dtype, (assignment.max_step_tokens, self.hidden_size)))
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

    def compute(self, frame: Frame, layouts: Sequence[SliceLayout]) -> Computed:
        self._device.compute(frame.step.num_tokens)
        if self._has_head:
            return self._answer(frame.step)
        if frame.hidden is not None and frame.hidden.dtype is self._dtype:
            return frame.hidden
        shape = (frame.step.num_tokens, self.hidden_size)
        return TensorView(self._dtype, shape, self._zeros[: payload_bytes(self._dtype, shape)])

    def _answer(self, step: Step) -> tuple[SliceResult, ...]:
        return tuple([self._result(part) for part in step.slices if part.is_answered])

    def _result(self, part: Slice) -> SliceResult:
        problem = self._unanswerable.get(part.sequence) if not part.is_scored else "prompt log-probabilities"
        if problem is not None:
            return self._failed(part, f"mock stages have no {problem}")
        constraints = self._constraints.get(part.sequence)
        last = part.first_position + len(part.tokens) - 1
        if constraints is None:
            token: int | None = mock_token(
                part.tokens[-1], last, vocab_size=self.vocab_size, eos_token_ids=self._eos_token_ids
            )
        else:
            if isinstance(part.inference_step, Decode):
                constraints.add(part.tokens[-1])
            token = constraints.choose(_first_choice(part.tokens[-1], last, vocab_size=self.vocab_size))
        if token is None:
            return self._failed(part, f"no token is allowed at position {last + 1} of {part.sequence}")
        return SliceResult(part.sequence, part.generation, token)

    def _failed(self, part: Slice, problem: str) -> SliceResult:
        error = SliceError(stage_pb2.SliceError.KIND_SAMPLER, self._stage, problem)
        return SliceResult(part.sequence, part.generation, error)


def _unanswerable(sampling: StepSampling) -> str | None:
    """What of `sampling` needs logits. The coordinator rejects these already."""
    if sampling.logprobs is not None:
        return "log-probabilities"
    if sampling.grammar is not None:
        return "structured output"
    penalties = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty - 1.0)
    return "penalties" if any(penalties) else None
