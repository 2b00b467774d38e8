"""Output of one choice; every reader gets the same pieces. Pure."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from io import SEEK_END, StringIO

from coordinator.scheduler.sequence import FinishReason
from text.detokenizer import IncrementalDetokenizer, StopMatcher
from wire.errors import InvariantBroken, require
from wire.steps import TokenLogprobs


class TokenNotGenerated(ValueError):
    """Tokens are asked for that the output does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens [first_token_index, first_token_index + len(tokens)) of an output and the text that is certain
    with them and was not before; offsets count Unicode code points.

    `logprobs` has one entry per token, None for the first token of a prompt, or none at all where none were
    asked for. The last piece may have text without tokens.
    """

    first_token_index: int
    tokens: tuple[int, ...]
    text: str
    text_offset: int
    logprobs: tuple[TokenLogprobs | None, ...]
    is_last: bool


class OutputBuffer:
    """Everything one choice has put out, and the only owner of it: tokens, log-probabilities, text.

    Which text is certain after the first k tokens is a function of those k tokens. So a piece depends on
    nothing but where it begins and ends, and whoever reads from token k on gets the text that whoever read
    the first k tokens has not got, however either was cut into pieces. What only the end makes certain (a
    held back beginning of a stop string, a character that was never completed) belongs to the last piece.
    Text ends before a stop string; tokens go on to the one that completed it.

    With echo the output begins with the prompt, in which no stop string is looked for. An echo with
    log-probabilities waits for those of the prompt: until `set_prompt_logprobs` no piece has a token, because
    tokens and their log-probabilities travel together.

    Text is made when it is read, or, with stop strings, when a token is appended; a token takes microseconds
    (bench/STUDIES.md). Where many are due at once, an echoed prompt or what nobody has read for a long time,
    `make_text` does it in portions.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer | None,
        *,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        prompt: Sequence[int] = (),
        has_logprobs: bool = False,
    ) -> None:
        """`prompt`: for echo, with a detokenizer that has no context. `min_tokens`: no stop string ends the
        output before so many generated tokens.
        """
        assert detokenizer is not None or not stops, "stop strings without a tokenizer"
        self._tokens = array("I", prompt)
        self._num_prompt_tokens = len(prompt)
        self._logprobs: list[TokenLogprobs | None] | None = [] if has_logprobs else None
        self._is_waiting = has_logprobs and len(prompt) > 0
        self._finish_reason: FinishReason | None = None
        self._stops = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self._detokenizer = detokenizer
        self._text = _Text()

    @property
    def num_tokens(self) -> int:
        """Tokens of the output, with echo those of the prompt too."""
        return len(self._tokens)

    @property
    def is_finished(self) -> bool:
        return self._finish_reason is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._finish_reason

    @property
    def is_waiting_for_prompt_logprobs(self) -> bool:
        """An echo whose log-probabilities are not here: `set_prompt_logprobs` is owed."""
        return self._is_waiting

    @property
    def num_readable_tokens(self) -> int:
        """Tokens that pieces can have now."""
        return 0 if self._is_waiting else len(self._tokens)

    @property
    def generated_logprobs(self) -> list[TokenLogprobs]:
        """Those of the tokens after the prompt; none where none were asked for."""
        logprobs = self._logprobs or []
        return [row for row in logprobs[0 if self._is_waiting else self._num_prompt_tokens :] if row]

    def set_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs | None]) -> None:
        """One per token of the echoed prompt, once; the first one is None."""
        if not self._is_waiting or self._logprobs is None:
            raise InvariantBroken("log-probabilities of no echoed prompt")
        expected = self._num_prompt_tokens
        require(len(logprobs) == expected, f"{len(logprobs)} log-probabilities for {expected} prompt tokens")
        self._logprobs[:0] = logprobs
        self._is_waiting = False

    def append(self, token: int, logprobs: TokenLogprobs | None = None) -> bool:
        """Takes a generated token. True: a stop string is complete, and the caller finishes with STOP."""
        require(not self.is_finished and not self._is_stopped, "a token after the end of its choice")
        require((logprobs is None) == (self._logprobs is None), "log-probabilities for some tokens only")
        self._tokens.append(token)
        if self._logprobs is not None:
            self._logprobs.append(logprobs)
        if self._stops is not None:
            self._detokenize(len(self._tokens))
        return self._is_stopped

    def finish(self, reason: FinishReason) -> None:
        """Ends the output, once."""
        require(not self.is_finished, f"a choice ends twice, first with {self._finish_reason}")
        require(not self._is_waiting, "an echo without its log-probabilities")
        self._finish_reason = reason

    def make_text(self, *, max_tokens: int) -> bool:
        """Makes the text of at most so many more tokens; True: all have theirs. Changes no piece."""
        self._detokenize(min(len(self._tokens), self._text.num_tokens + max_tokens))
        return self._text.num_tokens == len(self._tokens)

    def read(self, from_token: int, *, max_tokens: int) -> Piece:
        """What there is from a token on, at most so many tokens; changes nothing. Raises TokenNotGenerated.

        A piece without tokens that is not the last one: there is nothing new.
        """
        if not 0 <= from_token <= len(self._tokens):
            raise TokenNotGenerated(f"from_token {from_token} of an output of {len(self._tokens)} tokens")
        assert max_tokens > 0
        end = min(from_token + max_tokens, max(from_token, self.num_readable_tokens))
        is_last = self.is_finished and end == len(self._tokens)
        self._detokenize(end)
        if is_last:
            self._end_text()
        text_offset, text = self._text.read(from_token, None if is_last else end)
        return Piece(
            first_token_index=from_token,
            tokens=tuple(self._tokens[from_token:end]),
            text=text,
            text_offset=text_offset,
            logprobs=() if self._logprobs is None else tuple(self._logprobs[from_token:end]),
            is_last=is_last,
        )

    @property
    def _is_stopped(self) -> bool:
        return self._stops is not None and self._stops.is_stopped

    def _detokenize(self, num_tokens: int) -> None:
        """Makes the text of the first `num_tokens` tokens."""
        for index in range(self._text.num_tokens, num_tokens):
            new = "" if self._detokenizer is None else self._detokenizer.push((self._tokens[index],))
            self._text.append(self._certain(new, index + 1 - self._num_prompt_tokens))

    def _certain(self, new: str, num_generated: int) -> str:
        """What no stop string can take back of the text that came with a token, the so manieth generated."""
        if self._stops is None or num_generated < 1:
            return new
        return self._stops.push(new, may_stop=num_generated >= self._min_tokens)

    def _end_text(self) -> None:
        """Adds what only the end makes certain; once."""
        if self._detokenizer is None or self._text.is_ended:
            return
        rest = ""
        if not self._is_stopped:
            rest = self._certain(self._detokenizer.flush(), len(self._tokens) - self._num_prompt_tokens)
        self._text.end(rest if self._stops is None else rest + self._stops.flush())


class _Text:
    """Text with the offset of what is certain after each token: 4 bytes per character, 8 per token."""

    def __init__(self) -> None:
        self._buffer = StringIO()
        self._offsets = array("Q", [0])
        self.is_ended = False

    @property
    def num_tokens(self) -> int:
        return len(self._offsets) - 1

    def append(self, text: str) -> None:
        """The text that one more token makes certain."""
        self._offsets.append(self._offsets[-1] + self._write(text))

    def end(self, text: str) -> None:
        """The text after the last token."""
        require(not self.is_ended, "the text of a choice ends twice")
        self.is_ended = True
        self._write(text)

    def read(self, from_token: int, to_token: int | None) -> tuple[int, str]:
        """Offset and text between what is certain after so many and after so many tokens; None: all."""
        begin = self._offsets[from_token]
        self._buffer.seek(begin)
        return begin, self._buffer.read(-1 if to_token is None else self._offsets[to_token] - begin)

    def _write(self, text: str) -> int:
        self._buffer.seek(0, SEEK_END)
        return self._buffer.write(text)
