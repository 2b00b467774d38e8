"""What a generation can be told besides its prompt, each parameter written once."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, TypedDict


class Priority(StrEnum):
    """First come, first served within a class; waiting ages, so that none starves. Equal to its text."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"


@dataclass(frozen=True, kw_only=True, slots=True)
class Detach:
    """The request goes on without its call. Once it has ended, its output is kept for `keep_s` seconds."""

    keep_s: float = 60.0


class GenerateOptions(TypedDict, total=False):
    """The keywords of `Client.generate`. What is left out or None has the server's default.

    Their ranges and meaning are those of `GenerateRequest` and `SamplingParameters` in
    proto/stageline_rpc/v1/inference.proto; the server checks them.
    """

    max_tokens: int | None
    """0 computes the prompt only, for scoring it."""
    min_tokens: int | None
    n: int | None
    """So many choices; their outputs come interleaved, told apart by `GenerateOutput.choice`."""
    echo: bool | None
    skip_special_tokens: bool | None

    temperature: float | None
    """0 is greedy, and the default."""
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    seed: int | None
    logit_bias: Mapping[int, float] | None
    """Token id -> what is added to its logit."""
    allowed_token_ids: Collection[int] | None
    bad_words: Collection[str] | None
    bad_word_ids: Collection[Collection[int]] | None

    stop: str | Collection[str] | None
    stop_token_ids: Collection[int] | None
    ignore_eos: bool | None

    logprobs: int | None
    """Log-probabilities of each generated token, and of so many of the most likely ones."""
    prompt_logprobs: int | None

    json_schema: str | Mapping[str, Any] | None
    """At most one of json_schema, regex, choice and grammar."""
    regex: str | None
    choice: Collection[str] | None
    grammar: str | None

    cache_salt: str | None
    """Cached prefixes are shared with requests of the same salt only, which keeps tenants apart."""
    prefix_cache: bool | None
    """False: read no cached blocks and leave none to other requests."""
    priority: Priority | Literal["low", "normal", "high"] | None
    on_disconnect: Detach | Literal["cancel", "detach"] | None
    request_id: str | None
    """UUIDv7 as text; the client makes one unless it is given."""
    attach_secret: str | None
    """What `attach` and `cancel` of another client need, as `stageline.new_attach_secret()` makes it. Unless
    given, the client makes one and keeps it to itself."""
    timeout_s: float | None
    """Bounds the whole generation, re-attaching included."""
