"""Journal records and their JSON form. Pure.

Times that end in `_at` are seconds of the journal's own clock (`JournalClock`).

A step's entry is `[request, choice, token]` with the request's number in the journal, and an optional
fourth element with rare fields. Log-probabilities are packed, which is four times as fast: token, rank and
log-probability, then the top tokens with theirs.
"""

import json
import math
import struct
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from coordinator.scheduler.sequence import FinishReason
from wire.ids import RequestId
from wire.sampling import GrammarSpec
from wire.steps import TokenLogprobs


class JournalUnusable(Exception):
    """The file cannot be this coordinator's journal and is unchanged; the text names it."""


class JournalFailed(Exception):
    """A write is not durable; the text names file and reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedRequest:
    """All data to recreate a request.

    `message` is the client's message with its tenant, encoded without its prompt, with the resolved id, seed
    and `max_tokens`. `traceparent` (W3C) is the request's span, which the next coordinator ends;
    `caller_traceparent` is the caller's. Both may be empty. `attach_digest` is the SHA-256 of the attach
    secret.
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
    """Progress of one choice in one step. Not frozen, for speed: there is one per token."""

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
    """Output of one choice. `logprobs` has one entry per token, or none.

    `finish_reason` does not cover stop strings, which readers find again in the text.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    num_restarts: int = 0


@dataclass(slots=True, kw_only=True)
class RequestProgress:
    """Output of a request; `choices` by index, `last_at` is the last step's time, 0 for none."""

    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    choices: dict[int, ChoiceProgress] = field(default_factory=dict)
    last_at: float = 0.0

    def add(self, entry: Entry, at: float) -> None:
        """Add an entry of the step at time `at`."""
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

    def check(self) -> None:
        """Raise ValueError for output that no request has."""
        for index, choice in self.choices.items():
            if len(choice.logprobs) not in (0, len(choice.tokens)):
                numbers = f"{len(choice.logprobs)} log-probabilities of {len(choice.tokens)} tokens"
                raise ValueError(f"choice {index} has {numbers}")


@dataclass(frozen=True, slots=True)
class End:
    """Error that ended a request: class name and text."""

    at: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalledRequest:
    """A request of a former process; without `end`, it is live or all its choices have finished."""

    accepted: AcceptedRequest
    progress: RequestProgress
    end: End | None


_encode = json.JSONEncoder(separators=(",", ":")).encode


def encode_step(entries: Iterable[tuple[int, Entry]]) -> str:
    """Encode entries with their requests' numbers."""
    return _encode([_entry(number, entry) for number, entry in entries])


def decode_step(text: str) -> list[tuple[int, Entry]]:
    """Reverse of `encode_step`, with empty request ids. Raises one of `INVALID`."""
    return [_decoded_entry(item) for item in json.loads(text)]


def encode_progress(progress: RequestProgress) -> str:
    return _encode(
        {
            "at": progress.last_at,
            "prompt": [_logprobs(logprobs) for logprobs in progress.prompt_logprobs],
            "choices": {str(index): _choice(choice) for index, choice in progress.choices.items()},
        }
    )


def decode_progress(text: str) -> RequestProgress:
    """Reverse of `encode_progress`. Raises one of `INVALID`."""
    given = json.loads(text)
    return RequestProgress(
        prompt_logprobs=[_decoded_logprobs(packed) for packed in given["prompt"]],
        choices={int(index): _decoded_choice(choice) for index, choice in given["choices"].items()},
        last_at=time_in(given["at"]),
    )


INVALID = (ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error)
"""Errors of decoding what no journal of ours has."""
_MAX_U32 = 2**32 - 1


def count_in(value: Any) -> int:
    """`value`, an integer of at most 32 bits. Raises ValueError."""
    if type(value) is not int or not 0 <= value <= _MAX_U32:
        raise ValueError(f"{value!r} where an integer from 0 to {_MAX_U32} is expected")
    return value


def time_in(value: Any) -> float:
    """`value`, a finite number. Raises ValueError."""
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{value!r} where a time is expected")
    return float(value)


def encode_tokens(tokens: Sequence[int]) -> bytes:
    """Encode as u32, little-endian."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def decode_tokens(data: bytes) -> tuple[int, ...]:
    """Reverse of `encode_tokens`. Raises ValueError."""
    if len(data) % 4:
        raise ValueError(f"{len(data)} bytes are not a multiple of 4, the size of a token")
    return struct.unpack(f"<{len(data) // 4}I", data)


def _entry(number: int, entry: Entry) -> list[Any]:
    basic = [number, entry.choice, entry.token]
    more = _more(entry)
    return [*basic, more] if more else basic


def _more(entry: Entry) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if entry.logprobs is not None:
        more["l"] = _logprobs(entry.logprobs)
    if entry.prompt_logprobs:
        more["p"] = [_logprobs(logprobs) for logprobs in entry.prompt_logprobs]
    if entry.finish_reason is not None:
        more["f"] = entry.finish_reason.name
    if entry.num_cached_tokens:
        more["c"] = entry.num_cached_tokens
    if entry.num_restarts:
        more["r"] = entry.num_restarts
    return more


def _decoded_entry(given: Any) -> tuple[int, Entry]:
    number, choice, token, *rest = given
    more = rest[0] if rest else {}
    entry = Entry(
        _EMPTY_ID,
        count_in(choice),
        None if token is None else count_in(token),
        _decoded_logprobs(more["l"]) if "l" in more else None,
        tuple(_decoded_logprobs(packed) for packed in more.get("p", ())),
        _decoded_reason(more.get("f")),
        count_in(more.get("c", 0)),
        count_in(more.get("r", 0)),
    )
    return count_in(number), entry


def _choice(choice: ChoiceProgress) -> dict[str, Any]:
    return {
        "t": choice.tokens,
        "l": [_logprobs(logprobs) for logprobs in choice.logprobs],
        "f": choice.finish_reason.name if choice.finish_reason else None,
        "c": choice.num_cached_tokens,
        "r": choice.num_restarts,
    }


def _decoded_choice(given: Any) -> ChoiceProgress:
    return ChoiceProgress(
        tokens=[count_in(token) for token in given["t"]],
        logprobs=[_decoded_logprobs(packed) for packed in given["l"]],
        finish_reason=_decoded_reason(given["f"]),
        num_cached_tokens=count_in(given["c"]),
        num_restarts=count_in(given["r"]),
    )


def _logprobs(logprobs: TokenLogprobs) -> str:
    flat = chain.from_iterable(logprobs.top)
    packed = struct.pack(
        f"<IId{'Id' * len(logprobs.top)}", logprobs.token, logprobs.rank, logprobs.logprob, *flat
    )
    return b2a_base64(packed, newline=False).decode()


def _decoded_logprobs(text: str) -> TokenLogprobs:
    packed = a2b_base64(text)
    token, rank, logprob = _OWN.unpack_from(packed)
    return TokenLogprobs(token, logprob, rank, tuple(_TOP.iter_unpack(packed[_OWN.size :])))


def _decoded_reason(name: str | None) -> FinishReason | None:
    return None if name is None else FinishReason[name]


_EMPTY_ID = RequestId(b"")
_OWN, _TOP = struct.Struct("<IId"), struct.Struct("<Id")
