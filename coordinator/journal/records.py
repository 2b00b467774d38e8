"""What is kept of a request: how it was accepted, and what it has put out. Plain data.

Times that end in `_at` are seconds of the wall clock, the only one that outlives a process.
"""

from dataclasses import dataclass, field

from coordinator.scheduling.sequence import FinishReason
from wire.ids import RequestId
from wire.steps import GrammarSpec, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedRequest:
    """All that is needed to make the same request again.

    `message` is the client's, encoded, without its prompt, and with what was resolved when it was accepted:
    its id, seed and `max_tokens`. `traceparent` (W3C) is that of the request's span, which the next
    coordinator ends, and `caller_traceparent` that of its caller, or empty. `attach_digest` is the SHA-256 of
    the secret that attaching takes.
    """

    request_id: RequestId
    message: bytes
    prompt: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]
    grammar: GrammarSpec | None
    client: str
    attach_digest: bytes = field(default=b"", repr=False)
    arrived_at: float
    deadline_at: float | None
    traceparent: str = ""
    caller_traceparent: str = ""


@dataclass(slots=True)
class Entry:
    """What one step has added to one choice. (Not frozen: there is one for every token.)

    `num_cached_tokens` and `num_restarts` are those of its sequence now.
    """

    request_id: RequestId
    choice: int
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    num_restarts: int = 0


@dataclass(slots=True, kw_only=True)
class ChoiceProgress:
    """All that one choice has generated. `logprobs` has one entry per token, or none at all.

    `finish_reason` is what the tokens say; a stop string at the end is found again by whoever reads them.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    num_restarts: int = 0


@dataclass(slots=True, kw_only=True)
class RequestProgress:
    """All that a request has put out. `choices` has those of which anything is known, by index; `last_at` is
    the time of its last step, 0 for none.
    """

    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    choices: dict[int, ChoiceProgress] = field(default_factory=dict)
    last_at: float = 0.0

    def add(self, entry: Entry, at: float) -> None:
        """Takes what a step at this time has added."""
        choice = self.choices.setdefault(entry.choice, ChoiceProgress())
        self.prompt_logprobs += entry.prompt_logprobs
        if entry.token is not None:
            choice.tokens.append(entry.token)
        if entry.logprobs is not None:
            choice.logprobs.append(entry.logprobs)
        choice.finish_reason = entry.finish_reason
        choice.num_cached_tokens = max(choice.num_cached_tokens, entry.num_cached_tokens)
        choice.num_restarts = max(choice.num_restarts, entry.num_restarts)
        self.last_at = at


@dataclass(frozen=True, slots=True)
class End:
    """How a request ended that did not finish: the name of the error's class, and its text."""

    at: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalledRequest:
    """A request of a former process. `end` None: it is live, or all its choices have finished."""

    accepted: AcceptedRequest
    progress: RequestProgress
    end: End | None
