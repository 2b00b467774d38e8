"""What the answer to a step means for its sequences. Pure."""

from dataclasses import dataclass

from coordinator.scheduling.in_flight import ResultMismatch
from coordinator.scheduling.sequence import FinishReason, Sequence
from wire.errors import ServingError
from wire.steps import Slice, SliceError, SliceResult, TokenLogprobs


@dataclass(slots=True)
class Progress:
    """What a result changed for one sequence: a new token, prompt scores, the end of it, or its failure.

    `prompt_logprobs` follow those that came before, from the prompt's second token on.
    """

    sequence: Sequence
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: ServingError | None = None


@dataclass(slots=True)
class SchedulerCounts:
    """Since the coordinator started: preemptions, and what prompts had to compute.

    `num_prompt_tokens` are those of all sequences that were started, each once; `num_cached_tokens` of them
    came from the cache.
    """

    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


def check_logprobs(sequence: Sequence, part: Slice, entry: SliceResult) -> None:
    """Raises ResultMismatch before anything has changed."""
    outcome = entry.outcome
    if isinstance(outcome, int) and (entry.logprobs is None) != (sequence.sampling.logprobs is None):
        asked = "none were" if sequence.sampling.logprobs is None else "they were"
        raise ResultMismatch(f"log-probabilities of a token of {part.sequence}: {asked} asked for")
    if not part.is_scored or isinstance(outcome, SliceError):
        return
    wanted = sequence.num_prompt_logprobs(part.first_position, len(part.tokens))
    if len(entry.prompt_logprobs) != wanted:
        raise ResultMismatch(
            f"{part.sequence} got {len(entry.prompt_logprobs)} prompt log-probabilities for "
            f"{len(part.tokens)} tokens from {part.first_position} on, expected {wanted}"
        )
