"""Hypothesis strategies for wire types: steps, results, fault reports, hidden states."""

from __future__ import annotations

import struct
from dataclasses import replace

from hypothesis import strategies as st

from checkpoint import DType
from kvcache import (
    CopyState,
    Deref,
    Destroy,
    FreeState,
    FullBlock,
    Grow,
    LiveState,
    PartialBlock,
    Promote,
    SavedState,
    TakeState,
    Use,
)
from stageline_rpc.internal.v1 import step_pb2
from wire.errors import StepFaultKind
from wire.ids import RequestId, SequenceKey
from wire.sampling import GrammarSpec, StepSampling
from wire.steps import (
    NO_GROWS,
    Decode,
    EndRecord,
    FaultReport,
    Grows,
    Prefill,
    SequenceSignal,
    SliceError,
    SliceResult,
    StartRecord,
    Step,
    StepResult,
    StepSlice,
    TokenLogprobs,
    identity_of,
    pack_grow,
)
from wire.tensors import HiddenStates, TensorView

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
F32 = st.floats(0, 100, width=32)
TEXT = st.text(max_size=20)

request_ids = st.binary(min_size=16, max_size=16).map(RequestId)
sequence_keys = st.builds(SequenceKey, request_ids, U32)
tokens = st.lists(U32, min_size=1, max_size=6).map(tuple)

full_blocks = st.builds(FullBlock, U64)
partial_blocks = st.builds(PartialBlock, U64)
blocks = full_blocks | partial_blocks
parents = st.none() | U64
live_states = st.builds(LiveState, U64)
states = live_states | st.builds(SavedState, U64)
signals = st.one_of(
    st.builds(Use, st.lists(blocks, max_size=4).map(tuple), st.lists(U64, max_size=4).map(tuple), parents),
    st.builds(Promote, partial_blocks, U64, parents, U64),
    st.builds(Deref, blocks),
    st.builds(Destroy, blocks),
    st.builds(TakeState, live_states),
    st.builds(CopyState, states, states, U32),
    st.builds(FreeState, states),
)
sequence_signals = st.builds(SequenceSignal, sequence_keys, signals)
grow_rows = st.builds(
    pack_grow, st.builds(identity_of, sequence_keys, U32), st.builds(Grow, U64, U64, U64, U64, U64)
)


@st.composite
def grows(draw: st.DrawFn, num_signals: int) -> Grows:
    """No rows, or some after any of the signals."""
    rows = b"".join(draw(st.lists(grow_rows, max_size=3)))
    return Grows(rows, draw(st.integers(0, num_signals))) if rows else NO_GROWS


@st.composite
def slices(draw: st.DrawFn) -> StepSlice:
    """Prefill chunks at any offset, including final ones, and decodes."""
    key, restart_count = draw(sequence_keys), draw(U32)
    if draw(st.booleans()):
        return StepSlice(key, restart_count, (draw(U32),), Decode(draw(U32)))
    part = draw(tokens)
    start = draw(st.integers(0, 2**32 - 1 - len(part)))
    end = start + len(part)
    num_prefill_tokens = draw(st.integers(end, 2**32 - 1))
    return StepSlice(
        key, restart_count, part, Prefill(start, len(part), num_prefill_tokens, draw(st.booleans()))
    )


samplings = st.builds(
    StepSampling,
    temperature=F32,
    top_k=U32,
    top_p=F32,
    seed=U64,
    min_p=F32,
    typical_p=F32,
    repetition_penalty=F32,
    frequency_penalty=F32,
    presence_penalty=F32,
    logit_bias=st.dictionaries(U32, F32, max_size=3).map(lambda biases: tuple(sorted(biases.items()))),
    allowed_token_ids=tokens,
    bad_words=st.lists(tokens, max_size=3).map(tuple),
    min_tokens=U32,
    min_tokens_hold_back=tokens,
    logprobs=st.none() | U32,
    prompt_logprobs=U32,
    grammar=st.none() | st.builds(GrammarSpec, definition=TEXT, tokenizer_checksum=U64),
)
start_records = st.builds(StartRecord, sequence_keys, U32, U32, tokens, samplings, TEXT, TEXT)
end_records = st.builds(EndRecord, sequence_keys, U32)


def _decodes_first(parts: list[StepSlice]) -> tuple[StepSlice, ...]:
    return tuple(sorted(parts, key=lambda part: isinstance(part.inference_step, Prefill)))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Any step."""
    in_order = draw(st.lists(sequence_signals, max_size=5).map(tuple))
    return Step.of(
        draw(st.lists(slices(), max_size=4).map(_decodes_first)),
        epoch=draw(U64),
        step_id=draw(U64),
        starts=draw(st.lists(start_records, max_size=3).map(tuple)),
        ends=draw(st.lists(end_records, max_size=3).map(tuple)),
        signals=in_order,
        grows=draw(grows(len(in_order))),
        digest=draw(U64),
    )


slice_error_kinds = st.sampled_from(sorted(step_pb2.SliceError.Kind.values()))
slice_errors = st.builds(SliceError, slice_error_kinds, U32, TEXT)
token_logprobs = st.builds(TokenLogprobs, U32, F32, U32, st.lists(st.tuples(U32, F32), max_size=3).map(tuple))
slice_results = st.builds(
    SliceResult,
    sequence_keys,
    U32,
    U32 | slice_errors,
    st.none() | token_logprobs,
    st.lists(token_logprobs, max_size=3).map(tuple),
) | st.builds(
    SliceResult,
    sequence_keys,
    U32,
    st.none(),
    prompt_logprobs=st.lists(token_logprobs, min_size=1, max_size=3).map(tuple),
    is_late=st.booleans(),
)
late_rows = st.builds(SliceResult, sequence_keys, U32, U32 | slice_errors, st.none() | token_logprobs)
step_results = st.builds(
    lambda result, late: replace(result, late_rows=late),
    st.builds(StepResult.of, U64, U64, st.lists(slice_results, max_size=5).map(tuple)),
    st.lists(late_rows, max_size=2).map(tuple),
)
fault_reports = st.builds(
    FaultReport,
    epoch=U64,
    step_id=U64,
    stage=U32,
    kind=st.sampled_from(StepFaultKind),
    message=TEXT,
    request_ids=st.lists(request_ids, max_size=3).map(tuple),
)


def example_step(*, step_id: int = 7, num_tokens: int = 2) -> Step:
    """One prefill chunk of `num_tokens` tokens, one decode, and one of everything else."""
    one, two = (SequenceKey(RequestId(bytes([n]) * 16), n) for n in (1, 2))
    sampling = StepSampling(temperature=0.5, top_k=3, top_p=0.25, seed=2**64 - 1)
    chunk = tuple(range(100, 100 + num_tokens))
    return Step.of(
        (
            StepSlice(two, 0, (2**32 - 1,), Decode(40)),
            StepSlice(one, 1, chunk, Prefill(16, num_tokens, 16 + num_tokens)),
        ),
        epoch=3,
        step_id=step_id,
        starts=(StartRecord(one, 1, 10, (1, 2, 3), sampling),),
        ends=(EndRecord(two, 4),),
        signals=(
            SequenceSignal(one, Use((FullBlock(11), PartialBlock(12)), (13,), None)),
            SequenceSignal(one, Use((FullBlock(11),), (13,), 12, first_block=3), group=1),
            SequenceSignal(two, Promote(PartialBlock(14), 15, 0, 16)),
            SequenceSignal(two, Deref(FullBlock(17))),
            SequenceSignal(two, Destroy(PartialBlock(0))),
        ),
        grows=Grows(pack_grow(identity_of(two, 0), Grow(19, 20, 21, 22, 23)), position=3),
        digest=18,
    )


def hidden_states(num_tokens: int, width: int, *, dtype: DType = DType.F32) -> HiddenStates:
    """Bytes that differ by position."""
    size = num_tokens * width * dtype.size_bytes
    pattern = struct.pack("<64I", *(1_000_003 * n % 2**32 for n in range(64)))
    return (TensorView(dtype, (num_tokens, width), (pattern * (size // len(pattern) + 1))[:size]),)
