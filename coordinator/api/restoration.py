"""Requests as they are journalled, and as a later coordinator takes them up again."""

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.api.intake import Resolved, make_request
from coordinator.journal.records import AcceptedRequest, ChoiceProgress, End, JournalledRequest
from coordinator.model import ServedModel
from coordinator.requests.request import Choice, Request
from coordinator.scheduling.lifecycle import SequenceState
from coordinator.scheduling.order import Priority, QueueOrder
from coordinator.scheduling.sequence import FinishReason
from stageline_rpc.v1 import inference_pb2
from wire.errors import STATUS_OF_ERROR, ServingError
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
    sequence = request.choices[0].sequence
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
        arrived_at=arrived_at,
        deadline_at=deadline_at,
    )


@dataclass(frozen=True, slots=True)
class Restored:
    """A request with all its output. `ended_at` None: it is live."""

    request: Request
    ended_at: float | None
    error: ServingError | None


def restored(
    journalled: JournalledRequest, model: ServedModel, place: Callable[[Priority, int], QueueOrder]
) -> Restored:
    """Makes the same request again, and writes into it what it had put out. Raises InvalidRequest where it
    cannot be served any more.
    """
    accepted, progress = journalled.accepted, journalled.progress
    request = make_request(
        inference_pb2.GenerateRequest.FromString(accepted.message),
        Resolved(prompt=accepted.prompt, bad_words=accepted.bad_words, grammar=accepted.grammar),
        accepted.request_id,
        model=model,
        plan=None,
        client=accepted.client,
        place=place,
    )
    request.add_prompt_logprobs(progress.prompt_logprobs)
    for choice in request.choices:
        known = progress.choices.get(choice.index, ChoiceProgress())
        _take_up(choice, known, num_scored=0 if choice.index else len(progress.prompt_logprobs))
    if journalled.end is not None:
        for sequence in request.live_sequences:
            sequence.end(SequenceState.FAILED)
        return Restored(request, journalled.end.at, _error(journalled.end))
    return Restored(request, progress.last_at if request.is_finished else None, None)


def _take_up(choice: Choice, known: ChoiceProgress, *, num_scored: int) -> None:
    reason = known.finish_reason
    for index, token in enumerate(known.tokens):
        # A stop string ends the text; the journal has its tokens, and no more of them.
        if choice.transcript.append(token, known.logprobs[index] if known.logprobs else None):
            reason = FinishReason.STOP
    tokens = tuple(known.tokens)
    if reason is None:
        choice.sequence.take_up(
            tokens,
            num_scored=num_scored,
            num_cached_tokens=known.num_cached_tokens,
            num_restarts=known.num_restarts,
        )
        return
    choice.transcript.finish(reason)
    choice.sequence.take_up_finished(
        tokens, num_cached_tokens=known.num_cached_tokens, num_restarts=known.num_restarts, reason=reason
    )


def _error(end: End) -> ServingError:
    """As whoever attached before would have got it."""
    kinds = {kind.__name__: kind for kind in STATUS_OF_ERROR}
    return kinds.get(end.kind, ServingError)(end.text)
