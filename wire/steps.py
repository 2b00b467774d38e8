"""A step as the thinking parts see it: slices, records, signals. Plain data, no protobuf."""

from dataclasses import dataclass, field

from kvcache import Signal
from wire.errors import StepFaultKind
from wire.ids import RequestId, SequenceKey


@dataclass(frozen=True, slots=True)
class Prefill:
    """Tokens [start, start + num_tokens) of the `num_prefill_tokens` that are to be computed in all."""

    start: int
    num_tokens: int
    num_prefill_tokens: int

    @property
    def is_final(self) -> bool:
        """The chunk ends the prefill; a token is sampled after it."""
        return self.start + self.num_tokens == self.num_prefill_tokens


@dataclass(frozen=True, slots=True)
class Decode:
    """One token at an absolute position."""

    position: int


@dataclass(frozen=True, slots=True)
class Slice:
    """One sequence's part of a step."""

    sequence: SequenceKey
    generation: int
    tokens: tuple[int, ...]
    inference_step: Prefill | Decode

    @property
    def first_position(self) -> int:
        """Absolute position of the first token of this slice."""
        step = self.inference_step
        return step.start if isinstance(step, Prefill) else step.position

    @property
    def is_sampled(self) -> bool:
        """LAST owes a token (or an error) for this slice."""
        step = self.inference_step
        return step.is_final if isinstance(step, Prefill) else True


@dataclass(frozen=True, slots=True)
class StepSampling:
    """Sampling parameters as the coordinator resolved them."""

    temperature: float
    top_k: int
    top_p: float
    seed: int


@dataclass(frozen=True, slots=True)
class StartRecord:
    """Makes a (sequence, generation) known to every stage; `tokens` are all tokens so far."""

    sequence: SequenceKey
    generation: int
    num_prompt_tokens: int
    tokens: tuple[int, ...]
    sampling: StepSampling


@dataclass(frozen=True, slots=True)
class EndRecord:
    """Frees the state of a (sequence, generation) on every stage."""

    sequence: SequenceKey
    generation: int


@dataclass(frozen=True, slots=True)
class SequenceSignal:
    """A KV signal with the sequence whose block table it changes."""

    sequence: SequenceKey
    signal: Signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One micro-batch on its way through all stages once: ends, starts, signals, then slices apply."""

    epoch: int
    step_id: int
    slices: tuple[Slice, ...] = ()
    starts: tuple[StartRecord, ...] = ()
    ends: tuple[EndRecord, ...] = ()
    signals: tuple[SequenceSignal, ...] = ()
    digest: int = 0
    traceparent: str = ""
    tracestate: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(len(part.tokens) for part in self.slices)

    @property
    def request_ids(self) -> tuple[RequestId, ...]:
        """Requests that have a slice in this step, each once, in slice order."""
        return tuple(dict.fromkeys(part.sequence.request_id for part in self.slices))


@dataclass(frozen=True, slots=True)
class SliceError:
    """One sequence failed on LAST; `kind` is the number of the wire enum."""

    kind: int
    stage: int
    message: str


@dataclass(frozen=True, slots=True)
class SliceResult:
    """What LAST answers for a sampled slice: a token, or an error."""

    sequence: SequenceKey
    generation: int
    outcome: int | SliceError


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to one frame; `results` has one entry per sampled slice, in slice order."""

    epoch: int
    step_id: int
    results: tuple[SliceResult, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultReport:
    """A step fault as the coordinator receives it."""

    epoch: int
    step_id: int
    stage: int
    kind: StepFaultKind
    message: str
    request_ids: tuple[RequestId, ...] = field(default=())

    def __str__(self) -> str:
        return f"stage {self.stage}, step {self.step_id}: {self.kind.name}: {self.message}"
