"""What a gateway asks of a coordinator: one stream of tokens per request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import grpc

from stageline_rpc.v1.inference_pb2 import FinishReason, GenerateRequest, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The served model; `generation_config` has the sampling parameters that the checkpoint sets."""

    name: str
    fingerprint: str
    vocab_size: int
    max_sequence_tokens: int
    generation_config: Mapping[str, float] = field(default_factory=dict)


class Tokens(NamedTuple):
    """New tokens of a choice; `logprobs` has one entry per token, or is empty if not requested."""

    choice: int
    first_token_index: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt's tokens from `first_index` on."""

    first_index: int
    logprobs: Sequence[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """The end of a choice, after all of its tokens."""

    choice: int
    finish_reason: FinishReason.ValueType
    usage: Usage


@dataclass(frozen=True, slots=True)
class Found:
    """What there was of a request when it was first attached: tokens of all choices, and its end."""

    num_tokens: int = 0
    has_ended: bool = False


Item: TypeAlias = Tokens | PromptLogprobs | ChoiceEnd


class UpstreamFailure(Exception):
    """A request failed, or the coordinator cannot be reached.

    `reason` is the code of docs/reference/errors.md. `may_continue` if only the way to the request failed.
    `field` is the field of GenerateRequest or SamplingParameters that it is about, if any.
    """

    def __init__(
        self,
        message: str,
        *,
        status: grpc.StatusCode,
        reason: str,
        retry_after_s: float | None = None,
        may_continue: bool = False,
        field: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.may_continue = may_continue
        self.field = field

    def again(self) -> UpstreamFailure:
        """Return a new exception of this failure, for each time that it is raised.

        A raised exception holds the frames that it passed, and with them requests and bodies.
        """
        return UpstreamFailure(
            self.message,
            status=self.status,
            reason=self.reason,
            retry_after_s=self.retry_after_s,
            may_continue=self.may_continue,
            field=self.field,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOwner:
    """Whose request it is; without keys it has no tenant, and is of a `client`.

    Above `max_sequences` waiting and running sequences of the tenant, 0 for no limit, the coordinator refuses
    it. `spend` is called with the number of new tokens as they arrive.
    """

    tenant: str = ""
    client: str = ""
    max_sequences: int = 0
    spend: Callable[[int], None] = lambda num_tokens: None


NO_OWNER = RequestOwner()


class TokenStream(Protocol):
    """One request. Iteration ends after the end of every choice; it raises UpstreamFailure.

    `client_state` is from the request's message, also for streams that attach; `found` is for them alone.
    """

    request_id: str
    secret: str

    @property
    def client_state(self) -> bytes: ...

    @property
    def found(self) -> Found: ...

    def __aiter__(self) -> AsyncIterator[Item]: ...

    def take(self) -> Sequence[Item] | None:
        """Take all that arrived, instead of iterating; None after the end of every choice.

        Raises UpstreamFailure after everything before it.
        """

    def notify(self, changed: Callable[[], None] | None) -> None:
        """Call `changed` when there is something to `take`, and at once if there is; None ends that."""

    def stop(self, choice: int, num_tokens: int) -> None:
        """End a choice after its first `num_tokens` generated tokens; its ChoiceEnd still comes."""

    async def cancel(self) -> None:
        """Cancel the request; no effect after its end. Iteration is then over."""

    def detach(self) -> None:
        """Stop reading; the request continues. Iteration is then over."""


class Upstream(Protocol):
    """The link to a coordinator."""

    @property
    def model(self) -> ModelInfo:
        """The model, with the limits that the coordinator last reported."""

    @property
    def is_ready(self) -> bool:
        """Whether the coordinator is connected and serves, or recovers while requests wait for it."""

    @property
    def problem(self) -> str:
        """Why the coordinator does not serve."""

    async def submit(
        self, request: GenerateRequest, *, deadline_s: float | None, traceparent: str, owner: RequestOwner
    ) -> TokenStream:
        """Return once the request is accepted. Raises UpstreamFailure."""

    async def observe(self, request_id: str, secret: str, *, owner: RequestOwner) -> TokenStream:
        """Read a request from its first token, beside other readers. Raises UpstreamFailure.

        It has one choice, and no log-probabilities of its prompt. Its tokens count only when submitted.
        """

    async def cancel(self, request_id: str, secret: str, *, tenant: str) -> None:
        """Cancel a request, or drop the kept output of an ended one. Raises UpstreamFailure."""
