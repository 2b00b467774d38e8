"""What a request had put out, and how it had ended, written into the same request made again."""

from dataclasses import dataclass

from coordinator.journal.records import ChoiceProgress, End, RequestProgress
from coordinator.requests.request import Choice, Request
from coordinator.scheduling.lifecycle import SequenceState
from coordinator.scheduling.sequence import FinishReason
from wire.errors import STATUS_OF_ERROR, ServingError


@dataclass(frozen=True, slots=True)
class Ended:
    """When a request ended, and the error that ended it, if it did not finish."""

    at_s: float
    error: ServingError | None = None

    def on_clock(self, ahead_s: float) -> "Ended":
        """The same on a clock that shows `ahead_s` more."""
        return Ended(self.at_s + ahead_s, self.error)


def take_up(request: Request, progress: RequestProgress, end: End | None) -> Ended | None:
    """Writes it into a request that has no output yet. Returns how it ended, on the wall's clock, or None:
    it is live.
    """
    request.add_prompt_logprobs(progress.prompt_logprobs)
    for choice in request.choices:
        known = progress.choices.get(choice.index, ChoiceProgress())
        _take_up(choice, known, num_scored=0 if choice.index else len(progress.prompt_logprobs))
    if end is not None:
        for sequence in request.live_sequences:
            sequence.end(SequenceState.FAILED)
        return Ended(end.at, _error(end))
    return Ended(progress.last_at) if request.is_finished else None


def _take_up(choice: Choice, known: ChoiceProgress, *, num_scored: int) -> None:
    tokens, reason = tuple(known.tokens), known.finish_reason
    for index, token in enumerate(tokens):
        # A stop string is found again where it was found before: at the last token.
        if choice.transcript.append(token, known.logprobs[index] if known.logprobs else None):
            reason = FinishReason.STOP
    counts = {"num_cached_tokens": known.num_cached_tokens, "num_restarts": known.num_restarts}
    if reason is None:
        choice.sequence.take_up(tokens, num_scored=num_scored, **counts)
    else:
        choice.transcript.finish(reason)
        choice.sequence.take_up_finished(tokens, reason=reason, **counts)


def _error(end: End) -> ServingError:
    kinds = {kind.__name__: kind for kind in STATUS_OF_ERROR}
    return kinds.get(end.kind, ServingError)(end.text)
