"""Tokens and text exactly once and in order, over as many calls as it takes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from stageline.errors import ServerError
from stageline.output import GenerateOutput


@dataclass(slots=True)
class _Position:
    """How far one choice has come. `num_characters` is None where the next message is to tell it."""

    num_tokens: int = 0
    num_characters: int | None = 0
    is_finished: bool = False


class Continuity:
    """Holds a server to its promise that every choice continues where it was.

    `num_choices` is None where only the server knows. `starts` are the tokens that are not wanted: by choice,
    and else `first_token`.
    """

    def __init__(
        self, *, num_choices: int | None, first_token: int = 0, starts: Mapping[int, int] | None = None
    ) -> None:
        self._num_choices = num_choices
        self.first_token = first_token
        self._positions = {choice: _started_at(num_tokens) for choice, num_tokens in (starts or {}).items()}
        self._num_prompt_logprobs = 0
        self._was_interrupted = False

    @property
    def positions(self) -> dict[int, int]:
        """Number of tokens that have come, of every choice that is known."""
        return {choice: position.num_tokens for choice, position in sorted(self._positions.items())}

    @property
    def is_complete(self) -> bool:
        """Whether every choice is known to have ended."""
        num_finished = sum(position.is_finished for position in self._positions.values())
        return num_finished == self._num_choices

    def interrupt(self) -> None:
        """Another call goes on. A server cannot know which last messages and prompt logprobs have arrived."""
        self._was_interrupted = True

    def check(self, output: GenerateOutput) -> GenerateOutput | None:
        """Returns what is new of the output, None for nothing.

        Raises ServerError when something is missing before it, or comes twice without reason.
        """
        position = self._position_of(output)
        if position.is_finished:
            self._check_is_repetition(output, position)
            return None
        output = self._without_known_prompt(output)
        if position.num_characters is None:
            position.num_characters = output.text_offset
        if (output.first_token_index, output.text_offset) != (position.num_tokens, position.num_characters):
            raise ServerError(
                f"{_name(output)} continues at token {output.first_token_index} and character "
                f"{output.text_offset}, after {position.num_tokens} tokens and "
                f"{position.num_characters} characters"
            )
        position.num_tokens += len(output.token_ids)
        position.num_characters += len(output.text)
        position.is_finished = output.finish_reason is not None
        return output if _says_something(output) else None

    def check_finished(self) -> None:
        """Raises ServerError when the stream has ended before all its choices."""
        for choice in self._choices():
            position = self._positions.get(choice, _Position())
            if not position.is_finished:
                raise ServerError(
                    f"the stream ended without a finish reason of choice {choice}, "
                    f"after {position.num_tokens} tokens"
                )

    def _choices(self) -> Iterable[int]:
        if self._num_choices is not None:
            return range(self._num_choices)
        return self._positions or (0,)

    def _position_of(self, output: GenerateOutput) -> _Position:
        if self._num_choices is not None and output.choice >= self._num_choices:
            raise ServerError(f"the server sent choice {output.choice}, of {self._num_choices} from 0")
        if output.choice not in self._positions:
            self._positions[output.choice] = _started_at(self.first_token)
        return self._positions[output.choice]

    def _check_is_repetition(self, output: GenerateOutput, position: _Position) -> None:
        is_empty = (
            not output.token_ids and not output.text and output.first_token_index == position.num_tokens
        )
        if not (self._was_interrupted and is_empty):
            raise ServerError(f"the server sent more after the last message of {_name(output)}")

    def _without_known_prompt(self, output: GenerateOutput) -> GenerateOutput:
        if output.prompt_logprobs is None:
            return output
        first, known = output.first_prompt_token_index, self._num_prompt_logprobs
        is_repeated = self._was_interrupted and first <= known
        if first != known and not is_repeated:
            raise ServerError(f"{_name(output)} continues at prompt logprob {first}, after {known}")
        new = output.prompt_logprobs[known - first :]
        self._num_prompt_logprobs += len(new)
        return replace(output, prompt_logprobs=new or None, first_prompt_token_index=known)


def _started_at(num_tokens: int) -> _Position:
    return _Position(num_tokens=num_tokens, num_characters=None if num_tokens else 0)


def _says_something(output: GenerateOutput) -> bool:
    return bool(output.token_ids or output.text or output.prompt_logprobs or output.finish_reason)


def _name(output: GenerateOutput) -> str:
    return f"choice {output.choice} of request {output.request_id}"
