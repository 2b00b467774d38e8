"""A client that checks every message against the expected output."""

from __future__ import annotations

from coordinator.engine.output_stream import Output
from coordinator.engine.request import Request
from coordinator.scheduler.sequence import SequenceState
from tests.unit.coordinator.engine.engine_model import Call, EngineModel
from tests.unit.coordinator.engine.request_cases import RequestCase, prompt_scores, solo
from wire.errors import Superseded


class Customer:
    """Reads one request over consecutive calls.

    `num_tokens` and `num_characters` are received per choice, None if unknown; `num_scores` are
    received prompt log-probabilities.
    """

    def __init__(self, case: RequestCase, request: Request, call: Call, deadline_s: float | None) -> None:
        self.case, self.request, self.call = case, request, call
        self.deadline_s = deadline_s
        self.detached_s = 0.0
        self.end: SequenceState | None = None
        self.ended_s = 0.0
        self.is_kept = False
        self.expected = [solo(case, choice) for choice in range(case.n)]
        self.num_tokens = [0] * case.n
        self.num_characters: list[int | None] = [0] * case.n
        self.has_last = [False] * case.n
        self.num_scores = 0
        self._scores = tuple(prompt_scores(case.prompt, case.prompt_logprobs or 0))
        self._stale: list[Call] = []

    @property
    def is_here(self) -> bool:
        """It can be attached to."""
        return self.end is None or self.is_kept

    @property
    def expires_s(self) -> float:
        """When its output expires if no reader attaches."""
        assert self.case.keep_s is not None
        return max(self.ended_s, self.detached_s) + self.case.keep_s

    def attach(
        self, model: EngineModel, positions: list[int], num_scores: int | None, deadline_s: float | None
    ) -> None:
        """Continues on another call from `positions`, one per choice; it has the tokens before."""
        by_choice = dict(enumerate(positions))
        call = model.attach(
            self.request.id, by_choice=by_choice, prompt_token=num_scores, deadline_s=deadline_s
        )
        self._stale.append(self.call)
        self.call, self.deadline_s = call, deadline_s
        for choice, position in enumerate(positions):
            if position < self.num_tokens[choice] or self.has_last[choice]:
                self.num_characters[choice] = None
        self.num_tokens, self.has_last = positions, [False] * self.case.n
        if num_scores is None:
            num_scores = len(self.case.prompt) if positions[0] else 0
        self.num_scores = num_scores

    def read(self, now_s: float) -> bool:
        """Takes one message; False when there is none now."""
        was_over, output = self.call.is_over, self.call.read()
        if output is not None:
            self._take(output)
        elif self.call.is_over and not was_over:
            self.detached_s = now_s
            self._check_end()
        return output is not None

    def close(self, now_s: float) -> None:
        if not self.call.is_over:
            self.detached_s = now_s
            self.call.close()

    def read_stale(self) -> None:
        """Superseded calls get that error and nothing else."""
        for call in self._stale:
            was_over, num_outputs = call.is_over, len(call.outputs)
            call.read()
            assert len(call.outputs) == num_outputs, "a superseded call got a message"
            assert call.is_over
            assert was_over or isinstance(call.error, Superseded)
        self._stale.clear()

    def _take(self, output: Output) -> None:
        choice, piece = output.choice.index, output.piece
        assert output.choice is self.request.choices[choice]
        assert piece.first_token_index == self.num_tokens[choice], "a token that was skipped or came twice"
        if output.prompt_logprobs:
            self._take_scores(output)
            return
        assert piece.tokens or piece.is_last, "a message without news"
        expected, start = self.expected[choice], self.num_tokens[choice]
        end = start + len(piece.tokens)
        assert piece.tokens == expected.tokens[start:end]
        assert piece.logprobs == expected.logprobs[start:end]
        self.num_tokens[choice] = end
        self._take_text(choice, piece.text, piece.text_offset)
        num_echoed = len(self.case.prompt) if self.case.echo else 0
        if choice == 0 and self.case.prompt_logprobs is not None and end > num_echoed:
            assert self.num_scores == len(self.case.prompt), "a generated token before the prompt's scores"
        if piece.is_last:
            assert not self.has_last[choice]
            assert (end, self.num_characters[choice]) == (len(expected.tokens), len(expected.text))
            assert output.choice.buffer.finish_reason is expected.reason
            self.has_last[choice] = True

    def _take_text(self, choice: int, text: str, offset: int) -> None:
        assert self.num_characters[choice] in (None, offset), "text that was skipped or came twice"
        self.num_characters[choice] = offset + len(text)
        assert text == self.expected[choice].text[offset : offset + len(text)]

    def _take_scores(self, output: Output) -> None:
        assert self.case.prompt_logprobs is not None
        piece = output.piece
        assert (output.choice.index, piece.tokens, piece.text, piece.is_last) == (0, (), "", False)
        start = output.first_prompt_token_index
        assert start == self.num_scores
        self.num_scores = start + len(output.prompt_logprobs)
        assert output.prompt_logprobs == self._scores[start : self.num_scores]

    def _check_end(self) -> None:
        """A call ends when all output is read, then with the error of the request if there is one."""
        assert not self.request.is_live
        assert repr(self.call.error) == repr(self.request.error)
        if self.call.error is None:
            assert all(self.has_last)
        for choice, num_tokens in zip(self.request.choices, self.num_tokens, strict=True):
            assert num_tokens >= choice.buffer.num_readable_tokens
