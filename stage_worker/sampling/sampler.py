"""Turns the logits of a step into one result per sampled slice: a token, or that sequence's error."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stage_worker.sampling.draws import Draw
from stage_worker.sampling.finite import non_finite_rows
from stage_worker.sampling.grammar_masks import GrammarMasks
from stage_worker.sampling.logprobs import token_logprobs
from stage_worker.sampling.row_choice import choose_rows
from stage_worker.sampling.scoring import NonFiniteLogits, score
from stage_worker.sampling.sequence_state import SequenceState
from stageline_rpc.v1 import stage_pb2
from wire.ids import SequenceKey
from wire.steps import Decode, Slice, SliceError, SliceResult, StartRecord, TokenLogprobs

NO_GRAMMARS = "structured output is not available on this stage"
MAX_BLOCK_ELEMENTS = 1 << 20
"""Logits at a time: small enough for the processor's caches, and 8 MiB where float64 is computed of all."""


class Sampler:
    """Chooses tokens on the stage with the head; owned by its executor, for one epoch.

    The state of a sequence is a function of its start record and of the tokens of its decode slices.
    """

    def __init__(self, *, vocab_size: int, stage: int, grammars: GrammarMasks | None = None) -> None:
        """Without `grammars` a sequence with structured output fails alone."""
        self._vocab_size = vocab_size
        self._stage = stage
        self._grammars = grammars
        self._live: dict[SequenceKey, SequenceState] = {}

    def start(self, record: StartRecord) -> None:
        """Makes a sequence known; what is wrong with its parameters is answered to each of its slices."""
        state = SequenceState.of(record, vocab_size=self._vocab_size)
        if state.problem is None and record.sampling.grammar is not None:
            grammars = self._grammars
            state.problem = grammars.start(record) if grammars is not None else NO_GRAMMARS
        self._live[record.sequence] = state

    def end(self, key: SequenceKey) -> None:
        """Forgets a sequence."""
        del self._live[key]
        if self._grammars is not None:
            self._grammars.end(key)

    def choose(self, slices: Sequence[Slice], logits: Tensor) -> tuple[SliceResult, ...]:
        """One result per slice, in order: a token with its log-probabilities where they were asked for, or
        the error of that row alone. `slices` are sampled ones of started sequences, with tokens of the
        vocabulary; `logits` is float32 [n, vocab_size], one row per slice, and is not changed.

        The input token of a Decode slice is appended to its sequence's history first.
        """
        states = [self._live[part.sequence] for part in slices]
        for part, state in zip(slices, states, strict=True):
            if isinstance(part.inference_step, Decode):
                state.add(part.tokens[0])
                if self._grammars is not None:
                    self._grammars.advance(part.sequence, part.tokens[0])
        results = self._errors(slices, states, logits)
        rows = [row for row in range(len(slices)) if row not in results]
        if len(rows) < len(slices):
            logits = logits[rows]
        num_rows = max(MAX_BLOCK_ELEMENTS // self._vocab_size, torch.get_num_threads())
        for first in range(0, len(rows), num_rows):
            block = rows[first : first + num_rows]
            chosen = self._choose_block(
                [slices[row] for row in block],
                [states[row] for row in block],
                logits[first : first + num_rows],
            )
            results.update(zip(block, chosen, strict=True))
        return tuple(results[row] for row in range(len(slices)))

    def score(
        self, part: Slice, hidden: Tensor, head: Callable[[Tensor], Tensor], result: SliceResult
    ) -> SliceResult:
        """`result` with the log-probabilities of the prompt tokens that follow the tokens of a scored chunk,
        or with the chunk's error instead; `hidden` [tokens of the chunk, hidden_size] is the last layer's,
        `head` makes logits float32 [m, vocab_size] of some of its rows.
        """
        state, first = self._live[part.sequence], part.first_position + 1
        if isinstance(result.outcome, SliceError):
            return result
        if state.problem is not None:
            return self._unusable(part, state.problem)
        tokens = state.prompt[first : first + len(part.tokens)]
        try:
            scored = score(
                hidden,
                tokens,
                head,
                first_position=first,
                num_top=state.sampling.prompt_logprobs,
                vocab_size=self._vocab_size,
            )
        except NonFiniteLogits as error:
            return self._not_finite(part, error.position)
        return replace(result, prompt_logprobs=scored)

    def _errors(
        self, slices: Sequence[Slice], states: Sequence[SequenceState], logits: Tensor
    ) -> dict[int, SliceResult]:
        """The results of rows of which nothing can be chosen."""
        errors = {
            row: self._not_finite(slices[row], _position(slices[row])) for row in non_finite_rows(logits)
        }
        for row, state in enumerate(states):
            if state.problem is not None and row not in errors:
                errors[row] = self._unusable(slices[row], state.problem)
        return errors

    def _choose_block(
        self, slices: Sequence[Slice], states: Sequence[SequenceState], logits: Tensor
    ) -> list[SliceResult]:
        draws = [
            Draw(state.sampling, part.sequence.choice, _position(part))
            for part, state in zip(slices, states, strict=True)
        ]
        problems: dict[int, str] = {}
        tokens = choose_rows(logits, states, draws, self._forbid(slices, states, problems))
        logprobs = _sampled_logprobs(logits, tokens, states)
        results = []
        for row, (part, token) in enumerate(zip(slices, tokens, strict=True)):
            if row in problems:
                results.append(self._unusable(part, problems[row]))
            elif token is None:
                results.append(self._unusable(part, _nothing_allowed(part, states[row])))
            else:
                results.append(SliceResult(part.sequence, part.generation, token, logprobs.get(row)))
                if self._grammars is not None:
                    self._grammars.precompute(part.sequence, token)
        return results

    def _forbid(
        self, slices: Sequence[Slice], states: Sequence[SequenceState], problems: dict[int, str]
    ) -> Callable[[Tensor], None] | None:
        """Applies the grammars of a block, if any row has one, and collects what is wrong with them."""
        grammars = self._grammars
        rows = [
            (row, slices[row].sequence)
            for row, state in enumerate(states)
            if state.sampling.grammar is not None
        ]
        if grammars is None or not rows:
            return None
        return lambda scores: problems.update(grammars.apply(scores, rows))

    def _not_finite(self, part: Slice, position: int) -> SliceResult:
        return self._failed(
            part,
            stage_pb2.SliceError.KIND_NON_FINITE_LOGITS,
            f"logits for position {position} of {part.sequence} are not finite",
        )

    def _unusable(self, part: Slice, problem: str) -> SliceResult:
        return self._failed(part, stage_pb2.SliceError.KIND_SAMPLER, problem)

    def _failed(self, part: Slice, kind: int, message: str) -> SliceResult:
        return SliceResult(part.sequence, part.generation, SliceError(kind, self._stage, message))


def _position(part: Slice) -> int:
    """Absolute position of the token that is drawn after `part`."""
    return part.first_position + len(part.tokens)


def _nothing_allowed(part: Slice, state: SequenceState) -> str:
    names = state.masks.names() if state.masks is not None else []
    if state.sampling.grammar is not None:
        names = [*names, "the grammar"]
    return f"no token is allowed at position {_position(part)} of {part.sequence} by {' and '.join(names)}"


def _sampled_logprobs(
    logits: Tensor, tokens: Sequence[int | None], states: Sequence[SequenceState]
) -> dict[int, TokenLogprobs]:
    """By row, of those rows that ask for them."""
    wanted = [
        (row, token, state.sampling.logprobs)
        for row, (token, state) in enumerate(zip(tokens, states, strict=True))
        if token is not None and state.sampling.logprobs is not None
    ]
    if not wanted:
        return {}
    rows, chosen, num_top = zip(*wanted, strict=True)
    some = logits if len(rows) == len(tokens) else logits[list(rows)]
    return dict(zip(rows, token_logprobs(some, chosen, num_top), strict=True))
