"""A step as the thinking parts see it: slices, records, signals. Plain data, no protobuf.

Nothing here is modified once it is made. What every step is made of is not declared frozen, because making a
frozen dataclass takes twice as long.
"""

from dataclasses import dataclass, field

from kvcache import Signal
from wire.errors import StepFaultKind
from wire.ids import RequestId, SequenceKey


@dataclass(slots=True, unsafe_hash=True)
class Prefill:
    """Tokens [start, start + num_tokens) of the `num_prefill_tokens` that are to be computed in all.

    A scored chunk is answered with the log-probabilities of the prompt tokens that follow its tokens.
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

    @property
    def is_scored(self) -> bool:
        """LAST owes the log-probabilities of the prompt tokens that follow."""
        step = self.inference_step
        return isinstance(step, Prefill) and step.is_scored

    @property
    def is_answered(self) -> bool:
        """The step's result has an entry for this slice."""
        return self.is_sampled or self.is_scored


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """What the generated text must match: a grammar as llguidance serialises it, and the XXH3-64 of the
    tokenizer.json that the coordinator checked it with.
    """

    definition: str
    tokenizer_checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSampling:
    """Sampling parameters as the coordinator resolved them; a default here is a filter that does nothing.

    `min_tokens_hold_back` are the tokens that may not be sampled before `min_tokens` generated ones.
    `logprobs`: of the sampled token and of so many most likely ones; None: of none. `prompt_logprobs`: of so
    many most likely ones in scored chunks. `encoded` is the encoded message of all this, made ahead where
    encoding it takes long.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    min_tokens_hold_back: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int = 0
    grammar: GrammarSpec | None = None
    encoded: bytes | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class StartRecord:
    """Makes a (sequence, generation) known to every stage; `tokens` are all tokens so far.

    `traceparent` (W3C) is that of the request's span; empty where it is not traced.
    """

    sequence: SequenceKey
    generation: int
    num_prompt_tokens: int
    tokens: tuple[int, ...]
    sampling: StepSampling
    traceparent: str = ""

    @property
    def most_bytes(self) -> int:
        """An upper bound of its size in a frame, but for a few hundred bytes: a token takes at most 5."""
        sampling = self.sampling
        num_words = sum(len(word) + 2 for word in sampling.bad_words)
        num_tokens = len(self.tokens) + len(sampling.allowed_token_ids) + num_words
        grammar = 0 if sampling.grammar is None else len(sampling.grammar.definition.encode())
        return 5 * num_tokens + 16 * len(sampling.logit_bias) + grammar


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


@dataclass(slots=True, unsafe_hash=True, kw_only=True)
class Step:
    """One micro-batch on its way through all stages once: ends, starts, signals, then slices apply."""

    epoch: int
    step_id: int
    slices: tuple[StepSlice, ...] = ()
    starts: tuple[StartRecord, ...] = ()
    ends: tuple[EndRecord, ...] = ()
    signals: tuple[SequenceSignal, ...] = ()
    digest: int = 0

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
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities, before penalties and filters.

    `rank` is 1 for the most likely token; `top` are the most likely tokens, most likely first.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, unsafe_hash=True)
class SliceResult:
    """What LAST answers for a slice that is sampled or scored.

    `outcome` is the sampled token, an error, or None for a scored chunk that is not the last one.
    `prompt_logprobs` of a scored chunk begin with those of the token at position start + 1.
    """

    sequence: SequenceKey
    generation: int
    outcome: int | SliceError | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(slots=True, unsafe_hash=True)
class StageTime:
    """What one stage spent on a step, in microseconds.

    `hop_us`: from the sender having it ready to the first byte here, by two clocks that are compared, so it
    may be a little off, and below 0; `receive_us`: from there to the whole frame being here and checked;
    `wait_us`: from there to the start of its computation; `compute_us`: from there to its output being
    ready to send.
    """

    wait_us: int
    compute_us: int
    hop_us: int = 0
    receive_us: int = 0


@dataclass(slots=True, unsafe_hash=True)
class StepResult:
    """The answer to one frame; `results` has one entry per slice that is sampled or scored, in order.

    `stage_times` has one entry per stage, from FIRST to LAST, or none where they are not known.
    `ready_at_us`: when LAST had it ready, in microseconds of the coordinator's clock since 1970, or 0.
    """

    epoch: int
    step_id: int
    results: tuple[SliceResult, ...] = ()
    stage_times: tuple[StageTime, ...] = ()
    ready_at_us: int = 0


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
