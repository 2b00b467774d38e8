"""A step without protobuf: slices, records, signals and results, as plain data.

Decodes and results are columns with one entry per sequence, because building and checking an object per
sequence takes longer than all other work of a decode step. `Step.slices` and `StepResult.results` show them
as objects, for code that does not run in every step.

Objects are never modified after construction. The classes used in every step are not declared frozen, because
constructing a frozen dataclass takes twice as long.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from kvcache import Grow, Signal, StateSignal
from wire.errors import StepFaultKind
from wire.ids import RequestId, SequenceKey
from wire.sampling import StepSampling

IDENTITY_BYTES = 24
"""Size of an identity: request id, then choice and restart count as little-endian u32."""

_IDENTITY = struct.Struct("<16sII")


def identity_of(sequence: SequenceKey, restart_count: int) -> bytes:
    return _IDENTITY.pack(sequence.request_id, sequence.choice, restart_count)


def key_of(identity: bytes) -> tuple[SequenceKey, int]:
    """Return the sequence and restart count of an identity."""
    request_id, choice, restart_count = _IDENTITY.unpack(identity)
    return SequenceKey(RequestId(request_id), choice), restart_count


def split_identities(column: bytes) -> list[bytes]:
    return [column[begin : begin + IDENTITY_BYTES] for begin in range(0, len(column), IDENTITY_BYTES)]


def pack_column(numbers: Sequence[int]) -> bytes:
    """Pack little-endian u32."""
    return struct.pack(f"<{len(numbers)}I", *numbers)


def unpack_column(column: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(column) // 4}I", column)


def keys_of(identities: bytes) -> list[tuple[SequenceKey, int]]:
    return [
        (SequenceKey(RequestId(request_id), choice), restart_count)
        for request_id, choice, restart_count in _IDENTITY.iter_unpack(identities)
    ]


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


@dataclass(slots=True, unsafe_hash=True)
class Decodes:
    """Decode slices as columns: identities, and little-endian u32 for token and absolute position."""

    identities: bytes = b""
    tokens: bytes = b""
    positions: bytes = b""

    def __len__(self) -> int:
        return len(self.positions) // 4

    @classmethod
    def of(cls, slices: Sequence[StepSlice]) -> "Decodes":
        return cls(
            b"".join([identity_of(part.sequence, part.restart_count) for part in slices]),
            pack_column([part.tokens[0] for part in slices]),
            pack_column([part.first_position for part in slices]),
        )

    @property
    def slices(self) -> tuple[StepSlice, ...]:
        columns = zip(
            keys_of(self.identities), unpack_column(self.tokens), unpack_column(self.positions), strict=True
        )
        return tuple(
            [
                StepSlice(sequence, restart_count, (token,), Decode(position))
                for (sequence, restart_count), token, position in columns
            ]
        )


NO_DECODES = Decodes()


@dataclass(frozen=True, slots=True)
class StartRecord:
    """Announces a (sequence, restart_count) to every stage; `tokens` are all tokens so far.

    `traceparent` (W3C) is the request's span; empty if the request is not traced. `client` is whose turns the
    sequence takes on the stage.
    """

    sequence: SequenceKey
    restart_count: int
    num_prompt_tokens: int
    tokens: tuple[int, ...]
    sampling: StepSampling
    traceparent: str = ""
    client: str = ""

    @property
    def most_bytes(self) -> int:
        """Upper bound of its size in a frame, without a few hundred bytes of fixed fields.

        A token takes at most 5 bytes.
        """
        sampling = self.sampling
        num_words = sum(len(word) + 2 for word in sampling.bad_words)
        num_tokens = len(self.tokens) + len(sampling.allowed_token_ids) + num_words
        texts = self.client.encode()
        if sampling.grammar is not None:
            texts += sampling.grammar.definition.encode()
        return 5 * num_tokens + 16 * len(sampling.logit_bias) + len(texts)


@dataclass(frozen=True, slots=True)
class EndRecord:
    """Frees the state of a (sequence, restart_count) on every stage."""

    sequence: SequenceKey
    restart_count: int


@dataclass(slots=True, unsafe_hash=True)
class SequenceSignal:
    """A signal, and the sequence and block group whose block table it changes.

    Signals of recurrent states belong to no block group; theirs is 0.
    """

    sequence: SequenceKey
    signal: Signal | StateSignal
    group: int = 0


GROW_BYTES = 64
"""Size of a row of `Grows`: identity, then the five numbers of a `Grow` as little-endian u64."""

_GROW = struct.Struct("<24s5Q")


def pack_grow(identity: bytes, grow: Grow) -> bytes:
    return _GROW.pack(identity, *grow)


@dataclass(slots=True, unsafe_hash=True)
class Grows:
    """Sequences that complete a block and open the next one, as rows of `GROW_BYTES`.

    They follow the first `position` signals of the step.
    """

    rows: bytes = b""
    position: int = 0

    def __len__(self) -> int:
        return len(self.rows) // GROW_BYTES

    def __iter__(self) -> Iterator[tuple[bytes, Grow]]:
        """Yield identity and signal of each row, in order."""
        for identity, *numbers in _GROW.iter_unpack(self.rows):
            yield identity, Grow._make(numbers)


NO_GROWS = Grows()


@dataclass(slots=True, unsafe_hash=True, kw_only=True)
class Step:
    """One micro-batch; each stage applies ends, starts, signals, then slices: all decodes before `chunks`.

    `chunks` are prefill slices. Signals are `signals`, and `grows` among them.
    """

    epoch: int
    step_id: int
    decodes: Decodes = NO_DECODES
    chunks: tuple[StepSlice, ...] = ()
    starts: tuple[StartRecord, ...] = ()
    ends: tuple[EndRecord, ...] = ()
    signals: tuple[SequenceSignal, ...] = ()
    grows: Grows = NO_GROWS
    digest: int = 0

    @classmethod
    def of(
        cls,
        slices: Sequence[StepSlice],
        *,
        epoch: int,
        step_id: int,
        starts: tuple[StartRecord, ...] = (),
        ends: tuple[EndRecord, ...] = (),
        signals: tuple[SequenceSignal, ...] = (),
        grows: Grows = NO_GROWS,
        digest: int = 0,
    ) -> "Step":
        """Step of `slices`. Raises ValueError if a decode follows a chunk."""
        decodes = list(takewhile(lambda part: isinstance(part.inference_step, Decode), slices))
        chunks = tuple(slices[len(decodes) :])
        if any(isinstance(chunk.inference_step, Decode) for chunk in chunks):
            raise ValueError("a decode follows a chunk")
        return cls(
            epoch=epoch,
            step_id=step_id,
            decodes=Decodes.of(decodes),
            chunks=chunks,
            starts=starts,
            ends=ends,
            signals=signals,
            grows=grows,
            digest=digest,
        )

    @property
    def num_slices(self) -> int:
        return len(self.decodes) + len(self.chunks)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def tokens(self) -> tuple[int, ...]:
        chunks = [token for chunk in self.chunks for token in chunk.tokens]
        return (*unpack_column(self.decodes.tokens), *chunks)

    @property
    def slices(self) -> tuple[StepSlice, ...]:
        """All slices as objects, in the order of their rows."""
        return (*self.decodes.slices, *self.chunks)

    @property
    def answered_identities(self) -> bytes:
        """Identities of the slices that the step's result answers, in order."""
        chunks = [
            identity_of(chunk.sequence, chunk.restart_count) for chunk in self.chunks if chunk.is_answered
        ]
        return self.decodes.identities + b"".join(chunks) if chunks else self.decodes.identities

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
class RowDetail:
    """What the result of one row has beside or instead of a plain token.

    `outcome` is the sampled token, an error, or None for a scored chunk before the final one and for a row
    that `is_late`: a later result has its outcome. `prompt_logprobs` of a scored chunk begin with the token
    at position start + 1.
    """

    row: int
    outcome: int | SliceError | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    is_late: bool = False


@dataclass(slots=True, unsafe_hash=True)
class SliceResult:
    """One row of a result as an object; see `RowDetail`."""

    sequence: SequenceKey
    restart_count: int
    outcome: int | SliceError | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    is_late: bool = False

    @classmethod
    def of(cls, sequence: SequenceKey, restart_count: int, detail: RowDetail) -> "SliceResult":
        return cls(
            sequence, restart_count, detail.outcome, detail.logprobs, detail.prompt_logprobs, detail.is_late
        )

    @property
    def identity(self) -> bytes:
        return identity_of(self.sequence, self.restart_count)

    def detail(self, row: int = 0) -> RowDetail:
        return RowDetail(row, self.outcome, self.logprobs, self.prompt_logprobs, self.is_late)


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
    """Result of one step, with one row per sampled or scored slice, in order.

    `identities` and `tokens` are columns. `details` are ordered by row, and take the place of a row's token,
    which is 0 then.

    `stage_times` has one entry per stage, from FIRST to LAST, or is empty if unknown. `ready_at_us` is when
    LAST had the result ready, in microseconds of the coordinator's clock since 1970, or 0. `late_rows` are
    tokens and errors of rows that were late in earlier results.
    """

    epoch: int
    step_id: int
    identities: bytes = b""
    tokens: bytes = b""
    details: tuple[RowDetail, ...] = ()
    stage_times: tuple[StageTime, ...] = ()
    ready_at_us: int = 0
    late_rows: tuple[SliceResult, ...] = ()

    @classmethod
    def of(
        cls,
        epoch: int,
        step_id: int,
        results: Iterable[SliceResult] = (),
        stage_times: tuple[StageTime, ...] = (),
        ready_at_us: int = 0,
    ) -> "StepResult":
        rows = tuple(results)
        is_plain = [_is_plain(result) for result in rows]
        return cls(
            epoch,
            step_id,
            b"".join([result.identity for result in rows]),
            pack_column(
                [
                    result.outcome if plain and isinstance(result.outcome, int) else 0
                    for result, plain in zip(rows, is_plain, strict=True)
                ]
            ),
            tuple(result.detail(row) for row, result in enumerate(rows) if not is_plain[row]),
            stage_times,
            ready_at_us,
        )

    def after(self, identities: bytes, tokens: Sequence[int]) -> "StepResult":
        """This result with rows of plain `tokens` before its own."""
        details = [replace(detail, row=detail.row + len(tokens)) for detail in self.details]
        return replace(
            self,
            identities=identities + self.identities,
            tokens=pack_column(tokens) + self.tokens,
            details=tuple(details),
        )

    @property
    def num_rows(self) -> int:
        return len(self.tokens) // 4

    @property
    def results(self) -> tuple[SliceResult, ...]:
        details = {detail.row: detail for detail in self.details}
        results = []
        for row, ((sequence, restart_count), token) in enumerate(
            zip(keys_of(self.identities), unpack_column(self.tokens), strict=True)
        ):
            detail = details.get(row) or RowDetail(row, token)
            results.append(SliceResult.of(sequence, restart_count, detail))
        return tuple(results)


def _is_plain(result: SliceResult) -> bool:
    return isinstance(result.outcome, int) and result.logprobs is None and not result.prompt_logprobs


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
