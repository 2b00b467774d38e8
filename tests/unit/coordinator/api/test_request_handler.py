"""A journalled request parses to the same request."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.api.request_handler import accepted_of, restored
from coordinator.api.request_parser import make_request, request_id_of, resolve_texts
from coordinator.engine.request import Request
from coordinator.journal.records import JournalledRequest, RequestProgress
from stageline_rpc.v1 import inference_pb2
from tests.unit.coordinator.api.small_requests import MODEL, PLAN, place, request_of
from wire.ids import new_request_id


def both(message: inference_pb2.GenerateRequest) -> tuple[Request, Request]:
    """The request as accepted, and as restored by a later coordinator."""
    resolved = resolve_texts(message, MODEL)
    request = make_request(
        message, resolved, request_id_of(message), model=MODEL, plan=PLAN, client="here", place=place
    )
    accepted = accepted_of(message, resolved, request, arrived_at=1.0, deadline_at=None)
    journalled = JournalledRequest(accepted=accepted, progress=RequestProgress(), end=None)
    return request, restored(journalled, MODEL, place)


@pytest.mark.parametrize(
    "message",
    [
        request_of(1, 2, 3),
        request_of(1, max_tokens=0, sampling={"prompt_logprobs": 2}),
        request_of(1, sampling={"temperature": 1.0}),
        request_of(1, sampling={"temperature": 0.5, "seed": 0, "n": 3, "logprobs": 1, "echo": True}),
        request_of(1, sampling={"bad_words": ["ab"], "logit_bias": {1: 2.0}, "stop_token_ids": [4]}),
        request_of(1, cache_salt="mine", priority=inference_pb2.PRIORITY_HIGH),
        request_of(1, prefix_cache=False),
        request_of(
            1, on_disconnect=inference_pb2.OnDisconnect(action=inference_pb2.OnDisconnect.ACTION_DETACH)
        ),
        inference_pb2.GenerateRequest(text="abc"),
    ],
)
def test_the_request_is_the_same_again(message: inference_pb2.GenerateRequest) -> None:
    request, again = both(message)
    for one, other in zip(request.choices, again.choices, strict=True):
        assert facts(one.sequence) == facts(other.sequence)
        assert one.buffer.num_tokens == other.buffer.num_tokens
    assert (again.id, again.client, again.keep_s) == (request.id, request.client, request.keep_s)
    assert again.num_top_prompt_logprobs == request.num_top_prompt_logprobs


def facts(sequence: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(sequence).items() if key not in ("_kv",)}


def test_a_long_text_is_journalled_as_tokens_only() -> None:
    message = inference_pb2.GenerateRequest(text="abc" * 100)
    resolved = resolve_texts(message, MODEL)
    request = make_request(
        message, resolved, request_id_of(message), model=MODEL, plan=PLAN, client="here", place=place
    )
    accepted = accepted_of(message, resolved, request, arrived_at=1.0, deadline_at=2.0)
    assert len(accepted.message) < 100
    assert len(accepted.prompt) == 300
    assert message.text, "the client's message is left as it was"


def test_a_restored_request_keeps_its_tenant_and_its_name() -> None:
    message, name = request_of(1, 2, 3), new_request_id()
    resolved = resolve_texts(message, MODEL)
    request = make_request(
        message, resolved, request_id_of(message), model=MODEL, plan=PLAN, client="ann", place=place
    )
    request.name, request.tenant = name, "ann"
    accepted = accepted_of(message, resolved, request, arrived_at=1.0, deadline_at=None)
    journalled = JournalledRequest(accepted=accepted, progress=RequestProgress(), end=None)
    again = restored(journalled, MODEL, place)
    assert (again.id, again.name, again.tenant) == (request.id, name, "ann")
