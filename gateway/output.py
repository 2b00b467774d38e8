"""Output of one choice: text from tokens, and stop strings. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stageline_rpc.v1.inference_pb2 import TokenLogprobs
from text.detokenizer import IncrementalDetokenizer, StopMatcher
from text.tokenizer import TextCodec

StopReason: TypeAlias = int | str | None
"""The stop token or stop string that ended the text; None for other ends."""


@dataclass(frozen=True, slots=True)
class OutputRules:
    """How tokens of a request become text. `codec` is None for a model without a tokenizer."""

    codec: TextCodec | None
    stops: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    includes_stop: bool = False
    skips_special_tokens: bool = True
    kept_special_ids: frozenset[int] = frozenset()
    """Special tokens that are text although special tokens are skipped."""


@dataclass(slots=True)
class Delta:
    """What new tokens add to a choice.

    `text_offsets` has the offset in code points of each token's text. `finish_reason` is set by the last
    delta of the choice.
    """

    choice: int
    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    text_offsets: Sequence[int] = ()
    finish_reason: str | None = None
    stop_reason: StopReason = None


class ChoiceOutput:
    """Text of one choice. Text that may begin a stop string waits for later tokens."""

    def __init__(
        self, choice: int, rules: OutputRules, prompt: Sequence[int], *, echoes_prompt: bool = False
    ) -> None:
        """`prompt` is context, or with `echoes_prompt` the beginning of the text."""
        self._choice, self._rules = choice, rules
        self._detokenizer = (
            None
            if rules.codec is None
            else IncrementalDetokenizer(
                rules.codec,
                () if echoes_prompt else prompt,
                skip_special_tokens=rules.skips_special_tokens and not rules.kept_special_ids,
            )
        )
        self._matcher = StopMatcher(rules.stops) if rules.stops else None
        self._held = ""
        self._last_token: int | None = None
        self._text_length = 0
        self.num_generated = 0
        self.is_stop_sent = False

    @property
    def is_stopped(self) -> bool:
        """A stop string is complete: the choice has ended, after `num_generated` tokens."""
        return self._matcher is not None and self._matcher.is_stopped

    def echo(self, prompt: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Delta:
        """Return the prompt as the first part of the output; it is not searched for stop strings."""
        text, offsets = self._detokenize(prompt, wants_offsets=bool(logprobs))
        return Delta(self._choice, text, prompt, logprobs, offsets)

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Delta:
        """Add generated tokens. Those after the one that completes a stop string are dropped."""
        if self._matcher is not None:
            return self._push_until_stop(self._matcher, token_ids, logprobs)
        self._count(token_ids)
        if logprobs:
            text, offsets = self._detokenize(token_ids, wants_offsets=True)
            return Delta(self._choice, text, token_ids, logprobs, offsets)
        return Delta(self._choice, self._text(token_ids), token_ids)

    def finish(self, reason: str) -> Delta:
        """Return the rest of the text, for a choice that the coordinator ended."""
        rest = "" if self._detokenizer is None else self._detokenizer.flush()
        if self._matcher is not None:
            rest, _ = self._match(self._matcher, rest)
            rest += self._matcher.flush()
        is_stop_token = reason == "stop" and self._last_token in self._rules.stop_token_ids
        return Delta(
            self._choice,
            rest,
            finish_reason=reason,
            stop_reason=self._last_token if is_stop_token else None,
        )

    def _push_until_stop(
        self, matcher: StopMatcher, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> Delta:
        delta = Delta(self._choice)
        offsets: list[int] = []
        for index, token_id in enumerate(token_ids):
            self._count((token_id,))
            new, found = self._detokenize((token_id,), wants_offsets=bool(logprobs))
            offsets += found
            text, stop = self._match(matcher, new)
            delta.text += text
            if stop is not None:
                delta.text += stop if self._rules.includes_stop else ""
                delta.finish_reason, delta.stop_reason = "stop", stop
                token_ids = token_ids[: index + 1]
                break
        delta.token_ids, delta.logprobs = token_ids, logprobs[: len(token_ids)]
        delta.text_offsets = offsets
        return delta

    def _match(self, matcher: StopMatcher, new: str) -> tuple[str, str | None]:
        """Return the text that is certain, and the stop string that `new` completes."""
        text = matcher.push(new, may_stop=self.num_generated >= self._rules.min_tokens)
        num_held = len(self._held)
        rest = (self._held + new)[len(text) :]
        self._held = "" if matcher.is_stopped else rest
        if not matcher.is_stopped:
            return text, None
        completed = (
            stop for stop in self._rules.stops if rest.startswith(stop) and len(text) + len(stop) > num_held
        )
        return text, min(completed, key=len)

    def _detokenize(self, token_ids: Sequence[int], *, wants_offsets: bool) -> tuple[str, list[int]]:
        """Return the text that the tokens complete, and where the text of each begins."""
        if not wants_offsets:
            return self._text(token_ids), []
        pieces, offsets = [], []
        for token_id in token_ids:
            offsets.append(self._text_length)
            pieces.append(self._text((token_id,)))
        return "".join(pieces), offsets

    def _text(self, token_ids: Sequence[int]) -> str:
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.push(self._shown(token_ids) if self._rules.kept_special_ids else token_ids)
        self._text_length += len(text)
        return text

    def _shown(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The tokens without the special ones that are not kept, where the detokenizer skips none."""
        codec, kept = self._rules.codec, self._rules.kept_special_ids
        if codec is None or not self._rules.skips_special_tokens:
            return token_ids
        return [token for token in token_ids if token in kept or codec.has_text(token)]

    def _count(self, token_ids: Sequence[int]) -> None:
        self.num_generated += len(token_ids)
        if token_ids:
            self._last_token = token_ids[-1]
