"""Requests as they are journalled, and as a later coordinator takes them up again."""

from collections.abc import Callable

from coordinator.api.intake import Resolved, make_request
from coordinator.journal.records import AcceptedRequest, JournalledRequest
from coordinator.model import ServedModel
from coordinator.requests.request import Request
from coordinator.scheduling.order import Priority, QueueOrder
from stageline_rpc.v1 import inference_pb2
from wire.ids import id_text


def accepted_of(
    message: inference_pb2.GenerateRequest,
    resolved: Resolved,
    request: Request,
    *,
    arrived_at: float,
    deadline_at: float | None,
) -> AcceptedRequest:
    """What is journalled of a request that was made of `message`; times are those of the wall clock."""
    kept = inference_pb2.GenerateRequest()
    kept.CopyFrom(message)
    if (prompt := kept.WhichOneof("prompt")) is not None:
        kept.ClearField(prompt)
    sequence, trace = request.choices[0].sequence, request.trace
    kept.request_id = id_text(request.id)
    kept.max_tokens = sequence.max_tokens
    kept.sampling.seed = sequence.sampling.seed
    return AcceptedRequest(
        request_id=request.id,
        message=kept.SerializeToString(),
        prompt=resolved.prompt,
        bad_words=resolved.bad_words,
        grammar=resolved.grammar,
        client=request.client,
        attach_digest=request.attach_digest,
        arrived_at=arrived_at,
        deadline_at=deadline_at,
        traceparent="" if trace is None else trace.traceparent,
        caller_traceparent="" if trace is None else trace.caller_traceparent,
    )


def restored(
    journalled: JournalledRequest, model: ServedModel, place: Callable[[Priority, int], QueueOrder]
) -> Request:
    """The same request again, without what it had put out. Raises InvalidRequest where it cannot be served
    any more.
    """
    accepted = journalled.accepted
    request = make_request(
        inference_pb2.GenerateRequest.FromString(accepted.message),
        Resolved(prompt=accepted.prompt, bad_words=accepted.bad_words, grammar=accepted.grammar),
        accepted.request_id,
        model=model,
        plan=None,
        client=accepted.client,
        place=place,
    )
    request.attach_digest = accepted.attach_digest
    return request
