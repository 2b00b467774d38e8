"""Output of one choice: tokens, log-probabilities and text. Pure."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from io import SEEK_END, StringIO

from coordinator.scheduler.sequence import FinishReason
from text.detokenizer import IncrementalDetokenizer, StopMatcher
from wire.errors import InvariantBroken, require
from wire.steps import TokenLogprobs


class TokenNotGenerated(ValueError):
    """A read position beyond the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens [first_token_index, first_token_index + len(tokens)) of an output, and the text they complete.

    Text offsets count Unicode code points. `logprobs` has one entry per token (None for the first token of a
    prompt), or is empty if log-probabilities were not requested. The last piece may have text without tokens.
    """

    first_token_index: int
    tokens: tuple[int, ...]
    text: str
    text_offset: int
    logprobs: tuple[TokenLogprobs | None, ...]
    is_last: bool


class OutputBuffer:
    """Owns the output of one choice: tokens, log-probabilities and text.

    Invariant: the stable text after the first k tokens depends on those k tokens alone. So a piece depends
    only on its start and end, and reads that continue at token k yield the same text however the output is
    cut into pieces. Text that becomes stable only at the end (a possible start of a stop string, an
    incomplete character) belongs to the last piece. Text ends before a stop string, tokens with the one that
    completes it.

    With echo, the output starts with the prompt, which is not searched for stop strings. An echo with
    log-probabilities has no readable token until `set_prompt_logprobs`, because a piece carries tokens with
    their log-probabilities.

    Text is produced on read, or on `append` if there are stop strings; a token takes microseconds
    (bench/STUDIES.md). `detokenize` splits the work where many tokens are due at once, such as output that
    was not read for long.
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
        """Create an empty buffer.

        Args:
            detokenizer: None without a tokenizer; without context if `prompt` is given.
            stops: stop strings.
            min_tokens: generated tokens before a stop string may end the output.
            prompt: tokens of an echoed prompt.
            has_logprobs: every token comes with log-probabilities.
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
        """Tokens of the output, including an echoed prompt."""
        return len(self._tokens)

    @property
    def is_finished(self) -> bool:
        return self._finish_reason is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._finish_reason

    @property
    def is_waiting_for_prompt_logprobs(self) -> bool:
        """Echo with log-probabilities, before `set_prompt_logprobs`."""
        return self._is_waiting

    @property
    def num_readable_tokens(self) -> int:
        """Tokens that can be read now."""
        return 0 if self._is_waiting else len(self._tokens)

    def has_output(self, from_token: int) -> bool:
        """Whether `read` from there returns a token or the last piece."""
        return self._finish_reason is not None or from_token < self.num_readable_tokens

    @property
    def generated_logprobs(self) -> list[TokenLogprobs]:
        """Log-probabilities of the generated tokens; empty if not requested."""
        logprobs = self._logprobs or []
        return [row for row in logprobs[0 if self._is_waiting else self._num_prompt_tokens :] if row]

    def set_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs | None]) -> None:
        """Set the log-probabilities of the echoed prompt, once: one per token, None for the first."""
        if not self._is_waiting or self._logprobs is None:
            raise InvariantBroken("prompt log-probabilities for an output without echo")
        expected = self._num_prompt_tokens
        require(len(logprobs) == expected, f"{len(logprobs)} log-probabilities for {expected} prompt tokens")
        self._logprobs[:0] = logprobs
        self._is_waiting = False

    def append(self, token: int, logprobs: TokenLogprobs | None = None) -> bool:
        """Append a generated token. Returns True if it completes a stop string: call `finish` with STOP."""
        require(not self.is_finished and not self._is_stopped, "token appended after the end of its choice")
        require(
            (logprobs is None) == (self._logprobs is None), "either all tokens have log-probabilities or none"
        )
        self._tokens.append(token)
        if self._logprobs is not None:
            self._logprobs.append(logprobs)
        if self._stops is not None:
            self._detokenize(len(self._tokens))
        return self._is_stopped

    def token_ids(self, start: int, end: int) -> Sequence[int]:
        """Tokens [start, end), which must be readable, without their text."""
        return self._tokens[start:end]

    def logprobs(self, start: int, end: int) -> Sequence[TokenLogprobs | None]:
        """Log-probabilities of tokens [start, end), which must be readable; empty if not requested."""
        return () if self._logprobs is None else self._logprobs[start:end]

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of the output after an echoed prompt."""
        return len(self._tokens) - self._num_prompt_tokens

    @property
    def has_text(self) -> bool:
        """Text is made of the tokens."""
        return self._detokenizer is not None

    def truncate(self, num_generated: int) -> None:
        """Drop the tokens after the first `num_generated` of an unfinished output without text."""
        require(not self.is_finished and not self.has_text, "truncated a finished output, or one with text")
        end = self._num_prompt_tokens + num_generated
        del self._tokens[end:]
        if self._logprobs is not None:
            del self._logprobs[num_generated if self._is_waiting else end :]

    def finish(self, reason: FinishReason) -> None:
        """End the output, once."""
        require(not self.is_finished, f"choice already finished with {self._finish_reason}")
        require(not self._is_waiting, "choice finished before its prompt log-probabilities were set")
        self._finish_reason = reason

    def detokenize(self, num_tokens: int, *, max_new: int) -> bool:
        """Produce text of `max_new` more of the first `num_tokens` tokens. Returns True if all have it."""
        end = min(num_tokens, len(self._tokens))
        self._detokenize(min(end, self._text.num_tokens + max_new))
        return self._text.num_tokens >= end

    def read(self, from_token: int, *, max_tokens: int) -> Piece:
        """Read up to `max_tokens` tokens from `from_token`; may be repeated. Raises TokenNotGenerated.

        A piece without tokens that is not the last one means no new output.
        """
        if not 0 <= from_token <= len(self._tokens):
            raise TokenNotGenerated(f"from_token is {from_token}, the output has {len(self._tokens)} tokens")
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
        """Produce the text of the first `num_tokens` tokens."""
        for index in range(self._text.num_tokens, num_tokens):
            new = "" if self._detokenizer is None else self._detokenizer.push((self._tokens[index],))
            self._text.append(self._stable_text(new, index + 1 - self._num_prompt_tokens))

    def _stable_text(self, new: str, num_generated: int) -> str:
        """The part of the text that no stop string can remove after generated token `num_generated`."""
        if self._stops is None or num_generated < 1:
            return new
        return self._stops.push(new, may_stop=num_generated >= self._min_tokens)

    def _end_text(self) -> None:
        """Append the text that becomes stable at the end, once."""
        if self._detokenizer is None or self._text.is_ended:
            return
        rest = ""
        if not self._is_stopped:
            rest = self._stable_text(self._detokenizer.flush(), len(self._tokens) - self._num_prompt_tokens)
        self._text.end(rest if self._stops is None else rest + self._stops.flush())


class _Text:
    """Text with the offset of the stable part after each token: 4 bytes per character, 8 per token."""

    def __init__(self) -> None:
        self._buffer = StringIO()
        self._offsets = array("Q", [0])
        self.is_ended = False

    @property
    def num_tokens(self) -> int:
        return len(self._offsets) - 1

    def append(self, text: str) -> None:
        """Append the text that one more token makes stable."""
        self._offsets.append(self._offsets[-1] + self._write(text))

    def end(self, text: str) -> None:
        """Append the text after the last token."""
        require(not self.is_ended, "text of the choice already ended")
        self.is_ended = True
        self._write(text)

    def read(self, from_token: int, to_token: int | None) -> tuple[int, str]:
        """Offset and stable text of tokens [from_token, to_token); None reads to the end."""
        begin = self._offsets[from_token]
        self._buffer.seek(begin)
        return begin, self._buffer.read(-1 if to_token is None else self._offsets[to_token] - begin)

    def _write(self, text: str) -> int:
        self._buffer.seek(0, SEEK_END)
        return self._buffer.write(text)
