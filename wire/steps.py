"""A step without protobuf: slices, records, signals and results, as plain data.

Objects are never modified after construction. The classes used in every step are not declared frozen, because
constructing a frozen dataclass takes twice as long.
"""

from dataclasses import dataclass, field

from kvcache import Signal
from wire.errors import StepFaultKind
from wire.ids import RequestId, SequenceKey
from wire.sampling import StepSampling


@dataclass(slots=True, unsafe_hash=True)
class Prefill:
    """Tokens [start, start + num_tokens) of `num_prefill_tokens` prefill tokens.

    For a scored chunk, LAST returns the log-probability of each next prompt token.
    """

    start: int
    num_tokens: int
    num_prefill_tokens: int
    is_scored: bool = False

    @property
    def is_final(self) -> bool:
        """The chunk ends the prefill; a token is sampled after it."""
        return self.start + self.num_tokens == self.num_prefill_tokens


@dataclass(slots=True, unsafe_hash=True)
class Decode:
    """One token at an absolute position."""

    position: int


@dataclass(slots=True, unsafe_hash=True)
class StepSlice:
    """One sequence's part of a step."""

    sequence: SequenceKey
    restart_count: int
    tokens: tuple[int, ...]
    inference_step: Prefill | Decode

    @property
    def first_position(self) -> int:
        step = self.inference_step
        return step.start if isinstance(step, Prefill) else step.position

    @property
    def is_sampled(self) -> bool:
        """LAST returns a token or an error for this slice."""
        step = self.inference_step
        return step.is_final if isinstance(step, Prefill) else True

    @property
    def is_scored(self) -> bool:
        """LAST returns log-probabilities of prompt tokens for this slice."""
        step = self.inference_step
        return isinstance(step, Prefill) and step.is_scored

    @property
    def is_answered(self) -> bool:
        """The step's result has an entry for this slice."""
        return self.is_sampled or self.is_scored


@dataclass(frozen=True, slots=True)
class StartRecord:
    """Announces a (sequence, restart_count) to every stage; `tokens` are all tokens so far.

    `traceparent` (W3C) is the request's span; empty if the request is not traced.
    """

    sequence: SequenceKey
    restart_count: int
    num_prompt_tokens: int
    tokens: tuple[int, ...]
    sampling: StepSampling
    traceparent: str = ""

    @property
    def most_bytes(self) -> int:
        """Upper bound of its size in a frame, without a few hundred bytes of fixed fields.

        A token takes at most 5 bytes.
        """
        sampling = self.sampling
        num_words = sum(len(word) + 2 for word in sampling.bad_words)
        num_tokens = len(self.tokens) + len(sampling.allowed_token_ids) + num_words
        grammar = 0 if sampling.grammar is None else len(sampling.grammar.definition.encode())
        return 5 * num_tokens + 16 * len(sampling.logit_bias) + grammar


@dataclass(frozen=True, slots=True)
class EndRecord:
    """Frees the state of a (sequence, restart_count) on every stage."""

    sequence: SequenceKey
    restart_count: int


@dataclass(slots=True, unsafe_hash=True)
class SequenceSignal:
    """A KV signal and the sequence whose block table it changes."""

    sequence: SequenceKey
    signal: Signal


@dataclass(slots=True, unsafe_hash=True, kw_only=True)
class Step:
    """One micro-batch; each stage applies ends, starts, signals, then slices."""

    epoch: int
    step_id: int
    slices: tuple[StepSlice, ...] = ()
    starts: tuple[StartRecord, ...] = ()
    ends: tuple[EndRecord, ...] = ()
    signals: tuple[SequenceSignal, ...] = ()
    digest: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(step_slice.tokens) for step_slice in self.slices)

    @property
    def request_ids(self) -> tuple[RequestId, ...]:
        """Requests with a slice in this step, without duplicates, in slice order."""
        return tuple(dict.fromkeys(step_slice.sequence.request_id for step_slice in self.slices))


@dataclass(frozen=True, slots=True)
class SliceError:
    """Failure of one sequence on LAST; `kind` is the number in the wire enum."""

    kind: int
    stage: int
    message: str


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's probabilities, before penalties and filters.

    `rank` is 1 for the most likely token; `top` lists the most likely tokens in descending order.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, unsafe_hash=True)
class SliceResult:
    """Result of LAST for a sampled or scored slice.

    `outcome` is the sampled token, an error, or None for a scored chunk before the final one.
    `prompt_logprobs` of a scored chunk begin with the token at position start + 1.
    """

    sequence: SequenceKey
    restart_count: int
    outcome: int | SliceError | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(slots=True, unsafe_hash=True)
class StageTime:
    """Time that one stage spent on a step, in microseconds, as four consecutive intervals.

    `hop_us` ends with the first byte received; it compares two clocks, so it may be slightly off, even
    negative. `receive_us` ends when the frame is complete and checked, `wait_us` when its computation starts,
    and `compute_us` when its output is ready to send.
    """

    wait_us: int
    compute_us: int
    hop_us: int = 0
    receive_us: int = 0


@dataclass(slots=True, unsafe_hash=True)
class StepResult:
    """Result of one step; `results` has one entry per sampled or scored slice, in order.

    `stage_times` has one entry per stage, from FIRST to LAST, or is empty if unknown. `ready_at_us` is when
    LAST had the result ready, in microseconds of the coordinator's clock since 1970, or 0.
    """

    epoch: int
    step_id: int
    results: tuple[SliceResult, ...] = ()
    stage_times: tuple[StageTime, ...] = ()
    ready_at_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultReport:
    """A step fault as received by the coordinator."""

    epoch: int
    step_id: int
    stage: int
    kind: StepFaultKind
    message: str
    request_ids: tuple[RequestId, ...] = field(default=())

    def __str__(self) -> str:
        return f"stage {self.stage}, step {self.step_id}: {self.kind.name}: {self.message}"
