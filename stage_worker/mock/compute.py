"""What a mock stage puts in the place of computation: hidden states of the right shape, known tokens."""

from collections.abc import Collection, Sequence

from stage_worker.assignment import Assignment
from stage_worker.slice_layout import SliceLayout
from stage_worker.stage_compute import Computed, StageCompute
from stageline_rpc.v1 import stage_pb2
from wire.frames import Frame
from wire.ids import SequenceKey
from wire.steps import Slice, SliceError, SliceResult, StartRecord, Step
from wire.tensors import TensorView
from wire.wire_dtypes import payload_bytes


def mock_token(token: int, position: int, *, vocab_size: int, eos_token_ids: Collection[int] = ()) -> int:
    """The token that mock stages sample after `token` at this absolute position; never one that ends.

    Raises ValueError for a vocabulary of nothing else.
    """
    first = (31 * token + 17 * position + 7) % vocab_size
    for offset in range(vocab_size):
        candidate = (first + offset) % vocab_size
        if candidate not in eos_token_ids:
            return candidate
    raise ValueError(f"a vocabulary of {vocab_size} tokens, all of which end a sequence")


class MockCompute(StageCompute):
    """Stands for the layers of one stage: FIRST makes zeros, all others pass on what came, or zeros where it
    came in another dtype than they send.
    """

    def __init__(self, assignment: Assignment) -> None:
        """Raises ValueError when the assignment does not say what the model is like."""
        shape = assignment.model_shape
        if not shape.hidden_size or not shape.vocab_size:
            raise ValueError(
                "a mock stage needs the sizes of hidden states and vocabulary, "
                f"got {shape.hidden_size} and {shape.vocab_size}"
            )
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

    def begin_epoch(self, *, stage: int) -> None:
        self._stage = stage
        self._unanswerable.clear()

    def start(self, record: StartRecord) -> None:
        if record.sampling.logprobs is not None:
            self._unanswerable[record.sequence] = "log-probabilities"
        elif record.sampling.grammar is not None:
            self._unanswerable[record.sequence] = "structured output"

    def end(self, sequence: SequenceKey) -> None:
        self._unanswerable.pop(sequence, None)

    def compute(self, frame: Frame, layouts: Sequence[SliceLayout]) -> Computed:
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
            error = SliceError(
                stage_pb2.SliceError.KIND_SAMPLER, self._stage, f"mock stages have no {problem}"
            )
            return SliceResult(part.sequence, part.generation, error)
        last = part.first_position + len(part.tokens) - 1
        token = mock_token(
            part.tokens[-1], last, vocab_size=self.vocab_size, eos_token_ids=self._eos_token_ids
        )
        return SliceResult(part.sequence, part.generation, token)
