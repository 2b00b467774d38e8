"""Output of the Python client, checked for gaps and repetitions on arrival."""

from collections import defaultdict
from collections.abc import AsyncIterable
from dataclasses import dataclass, field

from stageline.client.output import FinishReason, GenerateOutput, TokenLogprobs, Usage


@dataclass(eq=False)
class ChoiceOutput:
    """One choice; lists are empty where not requested."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage | None = None

    @property
    def cached_tokens(self) -> int:
        assert self.usage is not None
        return self.usage.cached_tokens

    @property
    def restarts(self) -> int:
        assert self.usage is not None
        return self.usage.restarts


@dataclass(eq=False)
class Outputs:
    """All choices of a request, and its prompt's log-probabilities."""

    choices: defaultdict[int, ChoiceOutput] = field(default_factory=lambda: defaultdict(ChoiceOutput))
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def only(self) -> ChoiceOutput:
        assert list(self.choices) == [0]
        return self.choices[0]

    @property
    def tokens(self) -> list[list[int]]:
        """Tokens per choice."""
        return [choice.tokens for _, choice in sorted(self.choices.items())]

    def add(self, output: GenerateOutput) -> None:
        choice = self.choices[output.choice]
        assert choice.finish_reason is None, "an output after the last one"
        assert output.first_token_index == len(choice.tokens), "a token is repeated or missing"
        if output.prompt_logprobs:
            assert output.choice == 0
            assert not choice.tokens, "log-probabilities of the prompt come before its first generated token"
            assert output.first_prompt_token_index == len(self.prompt_logprobs), (
                "a log-probability is repeated or missing"
            )
            self.prompt_logprobs += output.prompt_logprobs
        choice.tokens += output.token_ids
        choice.logprobs += output.logprobs or []
        choice.finish_reason, choice.usage = output.finish_reason, output.usage

    async def take(self, outputs: AsyncIterable[GenerateOutput]) -> "Outputs":
        """Read to the end."""
        async for output in outputs:
            self.add(output)
        return self
