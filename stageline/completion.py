"""Outputs put together into whole completions."""

from dataclasses import dataclass, field

from stageline.output import FinishReason, GenerateOutput, TokenLogprobs, Usage


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """All of one choice. `logprobs` and `prompt_logprobs` are None unless asked for.

    `prompt_logprobs` are the request's, and come with choice 0.
    """

    request_id: str
    choice: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class _Parts:
    """What has come of one choice."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, output: GenerateOutput) -> None:
        self.text.append(output.text)
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs or ())
        self.prompt_logprobs.extend(output.prompt_logprobs or ())


class Completions:
    """Takes the outputs of one request, in the order in which they come."""

    def __init__(self) -> None:
        self._parts: dict[int, _Parts] = {}
        self._finished: dict[int, Completion] = {}

    def add(self, output: GenerateOutput) -> Completion | None:
        """Returns the whole choice with the output that ends it."""
        parts = self._parts.setdefault(output.choice, _Parts())
        parts.add(output)
        if output.finish_reason is None:
            return None
        assert output.usage is not None, "usage comes with the finish reason"
        completion = Completion(
            request_id=output.request_id,
            choice=output.choice,
            text="".join(parts.text),
            token_ids=parts.token_ids,
            finish_reason=output.finish_reason,
            usage=output.usage,
            logprobs=parts.logprobs or None,
            prompt_logprobs=parts.prompt_logprobs or None,
        )
        self._finished[output.choice] = completion
        return completion

    def in_order(self) -> list[Completion]:
        """The choices that have ended, from 0."""
        return [self._finished[choice] for choice in sorted(self._finished)]
