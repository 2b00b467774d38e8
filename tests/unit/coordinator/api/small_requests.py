"""A small model whose tokens are letters, a plan for it, and accepted or rejected requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from checkpoint import Checkpoint, DType
from coordinator.api.request_parser import (
    Resolved,
    compile_grammar,
    make_request,
    request_id_of,
    resolve_texts,
)
from coordinator.engine.request import Request
from coordinator.model import ServedModel, model_of
from coordinator.planner.plan import Plan, StepLimits
from coordinator.planner.planner import make_plan
from coordinator.scheduler.sequence import Priority, QueueOrder, Sequence, queue_order
from stageline_rpc.v1 import inference_pb2
from tests.unit.coordinator.planner.small_models import llama, workers
from tests.unit.text.letters_codec import VOCAB_SIZE, LettersCodec
from text.tokenizer import TextCodec
from wire.errors import InvalidRequest

MODEL_LIMIT = 600
KV_LIMIT = 512
EOS = (2, 5)
AGE_S = 10.0


def served_model(*, has_tokenizer: bool = True) -> ServedModel:
    config = llama(vocab_size=VOCAB_SIZE, max_position_embeddings=MODEL_LIMIT)
    checkpoint = Checkpoint(
        path=Path("tiny-letters"),
        directory=Path("tiny-letters"),
        config=config,
        tensors={},
        fingerprint="f" * 32,
        eos_token_ids=EOS,
        bos_token_id=None,
    )
    text = cast(TextCodec, LettersCodec(special=frozenset({5}))) if has_tokenizer else None
    model = model_of(checkpoint, dtype=DType.F32)
    model.text = text
    return model


def served_plan() -> Plan:
    limits = StepLimits(max_step_tokens=64, max_step_sequences=4, max_sequence_tokens=10_000)
    config = served_model().config
    return make_plan(
        config, DType.F32, workers(1 << 30), limits=limits, block_size=16, max_kv_tokens=KV_LIMIT
    )


MODEL, PLAN = served_model(), served_plan()


def place(priority: Priority, choice: int) -> QueueOrder:
    return queue_order(priority, arrived_s=100.0, arrival=3, choice=choice, age_s=AGE_S)


def request_of(
    *ids: int, sampling: dict[str, Any] | None = None, **fields: Any
) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=ids),
        sampling=inference_pb2.SamplingParameters(**sampling or {}),
        **fields,
    )


def resolved_of(message: inference_pb2.GenerateRequest, model: ServedModel = MODEL) -> Resolved:
    """Texts and grammar of a request, as the handler resolves them on threads."""
    resolved = resolve_texts(message, model)
    if message.sampling.WhichOneof("structured_output") is None:
        return resolved
    return replace(resolved, grammar=compile_grammar(message.sampling, model, resolved.bad_words))


def accept_request(message: inference_pb2.GenerateRequest, model: ServedModel = MODEL) -> Request:
    return make_request(
        message,
        resolved_of(message, model),
        request_id_of(message),
        model=model,
        plan=PLAN,
        client="here",
        place=place,
    )


def accept(message: inference_pb2.GenerateRequest) -> Sequence:
    """The first choice of the accepted request."""
    return accept_request(message).choices[0].sequence


def refusal(request: inference_pb2.GenerateRequest, model: ServedModel = MODEL) -> str:
    with pytest.raises(InvalidRequest) as caught:
        accept_request(request, model)
    return str(caught.value)
