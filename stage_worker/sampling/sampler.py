"""Samples one token per slice from logits, or scores a prompt."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stage_worker.policy import WORKER_POLICY
from stage_worker.sampling.grammar_masks import GrammarMasks
from stage_worker.sampling.late_rows import LateRow, LateRows
from stage_worker.sampling.logits_processors import (
    LogitEdits,
    NonFiniteLogits,
    non_finite_rows,
    score,
    token_logprobs,
)
from stage_worker.sampling.random_choice import Draw, argmax_rows, choose_random, copies_to
from stage_worker.sampling.sampler_state import SamplerState
from stage_worker.sampling.step_rows import NOT_FINITE, OPEN, Columns, StepRows, rows_per_block
from stage_worker.validation import MAX_BATCHES
from stageline_rpc.internal.v1 import step_pb2
from wire.ids import SequenceKey
from wire.staging import MAX_EDIT_BYTES
from wire.steps import (
    Decode,
    Decodes,
    SliceError,
    SliceResult,
    StartRecord,
    Step,
    StepSlice,
    TokenLogprobs,
    identity_of,
    split_identities,
    unpack_column,
)


def choose_rows(
    logits: Tensor,
    states: Sequence[SamplerState],
    draws: Sequence[Draw],
    forbid: Callable[[Tensor], None] | None = None,
) -> list[int | None]:
    """Token per row of finite `logits` float32 [n, vocab_size], or None; `forbid` applies grammars in
    place.
    """
    scores = processed(logits, states, forbid)
    maxima, likeliest = argmax_rows(scores)
    is_allowed = (~torch.isneginf(maxima)).tolist()
    drawn = {row: draw for row, draw in enumerate(draws) if draw.is_random and is_allowed[row]}
    tokens = _with_draws(likeliest, scores, maxima, drawn).tolist()
    return [token if allowed else None for token, allowed in zip(tokens, is_allowed, strict=True)]


def _with_draws(likeliest: Tensor, scores: Tensor, maxima: Tensor, draws: Mapping[int, Draw]) -> Tensor:
    """Tokens [n]: `likeliest` [n], but a random one for each row of `draws`."""
    if len(draws) == len(likeliest):
        return choose_random(scores, maxima, list(draws.values()))
    if draws:
        rows = list(draws)
        likeliest[rows] = choose_random(scores[rows], maxima[rows], list(draws.values()))
    return likeliest


def processed(
    logits: Tensor, states: Sequence[SamplerState], forbid: Callable[[Tensor], None] | None = None
) -> Tensor:
    """`logits` [n, vocab_size] after bias, penalties and masks (docs/sampling.md); itself if none apply."""
    if not any(state.edits_logits for state in states):
        return logits
    scores = logits.clone(memory_format=torch.contiguous_format)
    edits = {row: state.edits for row, state in enumerate(states) if state.edits is not None}
    LogitEdits(edits, scores.shape[-1]).apply(scores, copies_to(scores.device))
    if forbid is not None:
        forbid(scores)
    return scores


NO_GRAMMARS = "structured output is not available on this stage"

MAX_KERNEL_VOCAB = 1 << 19
"""Tokens whose sums the margin of the Triton kernels covers."""


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """The prompt tokens that follow each token of a scored chunk, of a sequence with `state`.

    They are taken when the step begins: a later one, which may begin before this one's end, decodes the
    sequence, and its state then has no prompt any more.
    """

    state: SamplerState
    tokens: Sequence[int]

    @classmethod
    def of(cls, chunk: StepSlice, state: SamplerState) -> "ScoredPrompt":
        first = chunk.first_position + 1
        return cls(state, state.prompt[first : first + len(chunk.tokens)])


@dataclass(frozen=True, slots=True)
class SampledStep:
    """The sampled rows of a step: its decodes, then its sampled chunks.

    A device samples all but `held` by `rows`, which is None if there are none; `Sampler.settle` the others.
    `are_plain` if all are. `scored` has what scored chunks need.
    """

    decodes: Decodes
    chunks: Sequence[StepSlice]
    states: Sequence[SamplerState]
    are_plain: bool
    rows: StepRows | None
    held: frozenset[int]
    scored: Mapping[SequenceKey, ScoredPrompt]

    def columns(self, num_rows: int) -> Columns | None:
        """See `StepRows.columns`; None if results need more than tokens."""
        is_whole = self.are_plain and not self.held and not self.scored and self.rows is not None
        return self.rows.columns(num_rows) if self.rows is not None and is_whole else None

    @property
    def slices(self) -> tuple[StepSlice, ...]:
        """One for each row."""
        return (*self.decodes.slices, *self.chunks)


class Sampler:
    """Samples on the stage with the head, for one epoch; state follows from start records and decode
    tokens.

    `settle`, `score` and `take_late_rows` may run beside the other methods, for steps that were prepared
    before.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        stage: int,
        grammars: GrammarMasks | None = None,
        has_kernels: bool = False,
    ) -> None:
        """Without `grammars`, only sequences with structured output fail.

        Triton kernels sample the rows of `prepare` with `has_kernels`, instead of torch's operators.
        """
        self._vocab_size = vocab_size
        self._stage = stage
        self._grammars = grammars
        self._by_kernels = has_kernels and vocab_size <= MAX_KERNEL_VOCAB
        self._live: dict[SequenceKey, SamplerState] = {}
        self._by_identity: dict[bytes, SamplerState] = {}
        self._identities: dict[SequenceKey, bytes] = {}
        self._batches: dict[bytes, _Batch] = {}
        self._late = LateRows(grammars)

    def start(self, record: StartRecord) -> None:
        """Start a sequence; invalid parameters are reported for each of its slices."""
        state = SamplerState.of(record, vocab_size=self._vocab_size)
        if state.problem is None and record.sampling.grammar is not None:
            grammars = self._grammars
            state.problem = grammars.start(record) if grammars is not None else NO_GRAMMARS
        identity = identity_of(record.sequence, record.restart_count)
        self._live[record.sequence] = self._by_identity[identity] = state
        self._identities[record.sequence] = identity
        self._batches.clear()

    def end(self, key: SequenceKey) -> None:
        del self._live[key], self._by_identity[self._identities.pop(key)]
        self._batches.clear()
        if self._grammars is not None:
            self._grammars.end(key)

    def prepare(self, step: Step, *, device: torch.device) -> SampledStep:
        """What sampling `step` needs, for logits on `device`; the input tokens of its decodes are appended
        to their sequences.

        A CPU without kernels leaves decodes to `settle` if one of them has parameters or a result of its own,
        and likewise chunks.
        """
        batch = self._batch(step.decodes.identities)
        chunks = [chunk for chunk in step.chunks if chunk.is_sampled]
        if not batch.is_plain:
            for part, state in zip(step.decodes.slices, batch.states, strict=True):
                self._append(part, state)
        of_chunks = [self._live[chunk.sequence] for chunk in chunks]
        states = [*batch.states, *of_chunks]
        are_plain = batch.is_plain and all(state.is_plain for state in of_chunks)
        held, masks = frozenset[int](), dict[int, NDArray[np.uint8]]()
        if not are_plain and device.type == "cpu" and not self._by_kernels:
            held = frozenset(range(len(batch.states) if batch.is_plain else 0, len(states)))
        elif not are_plain or self._by_kernels:
            masks = {} if are_plain else self._ready_masks(step, chunks, states)
            held = _held(states, masks, by_kernels=self._by_kernels)
        rows = None
        if len(held) < len(states):
            positions = [position + 1 for position in unpack_column(step.decodes.positions)]
            positions += [_position(chunk) for chunk in chunks]
            rows = self._step_rows(states, positions, held, masks, device)
        scored = {
            chunk.sequence: ScoredPrompt.of(chunk, self._live[chunk.sequence])
            for chunk in step.chunks
            if chunk.is_scored
        }
        return SampledStep(step.decodes, chunks, states, are_plain, rows, held, scored)

    def settle(
        self, step: SampledStep, logits: Tensor | None, tokens: Sequence[int]
    ) -> Sequence[int | SliceResult]:
        """Return one result per row of `step`, in order: a token, or what else belongs to its result.

        `logits` float32 [n, vocab_size] are those of `StepRows.choose`, which returned `tokens` (empty
        without `rows`). Waits for the device if a row needs a look.
        """
        if step.are_plain and not step.held and min(tokens, default=0) >= 0:
            return tokens
        assert logits is not None, "a sampled row has logits"
        slices = step.slices
        settled: list[int | SliceResult] = list(tokens) or [OPEN] * len(slices)
        looks: list[int] = []
        for row, state in enumerate(step.states):
            if row in step.held or (settled[row] == OPEN and state.edits_logits):
                looks.append(row)
            elif settled[row] == OPEN:
                assert step.rows is not None, "a row that is not held"
                settled[row] = step.rows.look_again(row, logits[row : row + 1].cpu())
            else:
                self._foresee(slices[row], state, tokens[row])
            if settled[row] == NOT_FINITE:
                settled[row] = self._not_finite(slices[row], _position(slices[row]))
        for row, result in zip(looks, self._results(slices, step.states, logits, looks), strict=True):
            settled[row] = result
        return self._with_logprobs(slices, step.states, logits, settled)

    def take_late_rows(self, *, may_wait: bool) -> tuple[SliceResult, ...]:
        """Results of rows whose masks were late, and are ready now. Waits a moment for one if it `may_wait`.

        A row whose mask is not ready after `mask_limit_s` has an error.
        """
        self._late.keep(self._by_identity.keys())
        results = list[SliceResult]()
        if rows := self._late.take_ready(may_wait=may_wait):
            slices, states = [row.step_slice for row in rows], [row.state for row in rows]
            results += self._choose_rows(slices, states, torch.cat([row.logits for row in rows]))
        for row in self._late.take_overdue():
            text = f"the mask of the grammar was not ready after {WORKER_POLICY.mask_limit_s:g} s"
            results.append(self._failed(row.step_slice, step_pb2.SliceError.KIND_GRAMMAR, text))
        return tuple(results)

    def _foresee(self, step_slice: StepSlice, state: SamplerState, token: int) -> None:
        """Begin to compute the mask after `token`, if it is one, and its sequence has a grammar."""
        if self._grammars is not None and state.sampling.grammar is not None and token >= 0:
            self._grammars.precompute(step_slice.sequence, token)

    def _batch(self, identities: bytes) -> "_Batch":
        """States of a batch that decodes. Steady decoding repeats its batches."""
        if (batch := self._batches.get(identities)) is None:
            states = [self._by_identity[identity] for identity in split_identities(identities)]
            batch = _Batch(states, all(state.is_plain for state in states))
            for state in states if batch.is_plain else ():
                state.prompt = ()
            if len(self._batches) >= MAX_BATCHES:
                self._batches.clear()
            self._batches[identities] = batch
        return batch

    def _step_rows(
        self,
        states: Sequence[SamplerState],
        positions: Sequence[int],
        held: frozenset[int],
        masks: Mapping[int, NDArray[np.uint8]],
        device: torch.device,
    ) -> StepRows:
        free = [(row, state) for row, state in enumerate(states) if row not in held]
        return StepRows(
            len(states),
            {
                row: Draw(state.sampling, state.choice, positions[row])
                for row, state in free
                if state.sampling.temperature > 0.0
            },
            {row: state.edits for row, state in free if state.edits is not None},
            vocab_size=self._vocab_size,
            device=device,
            by_kernels=self._by_kernels,
            masks={row: mask for row, mask in masks.items() if row not in held},
        )

    def _ready_masks(
        self, step: Step, chunks: Sequence[StepSlice], states: Sequence[SamplerState]
    ) -> dict[int, NDArray[np.uint8]]:
        """Masks of the rows with grammars that are known before the step is computed."""
        found: dict[int, NDArray[np.uint8]] = {}
        if self._grammars is None or all(state.sampling.grammar is None for state in states):
            return found
        for row, part in enumerate((*step.decodes.slices, *chunks)):
            if states[row].sampling.grammar is not None:
                mask = self._grammars.ready(part.sequence)
                found |= {} if mask is None else {row: mask}
        return found

    def _append(self, step_slice: StepSlice, state: SamplerState) -> None:
        """Append the input token of a decode slice."""
        state.add(step_slice.tokens[0])
        if self._grammars is not None:
            self._grammars.advance(step_slice.sequence, step_slice.tokens[0])

    def choose(self, slices: Sequence[StepSlice], logits: Tensor) -> tuple[SliceResult, ...]:
        """Return one result per slice, in order: a token with requested log-probabilities, or an error of
        that row.

        `slices` are sampled ones of started sequences; `logits` is float32 [n, vocab_size], one row per
        slice, and is not modified. The input token of a Decode slice is appended to its sequence's history
        first. This is the definition of `prepare` and what follows it.
        """
        states = [self._live[step_slice.sequence] for step_slice in slices]
        for step_slice, state in zip(slices, states, strict=True):
            if isinstance(step_slice.inference_step, Decode):
                self._append(step_slice, state)
        return self._results(slices, states, logits, range(len(slices)))

    def _results(
        self,
        slices: Sequence[StepSlice],
        states: Sequence[SamplerState],
        logits: Tensor,
        rows: Sequence[int],
    ) -> tuple[SliceResult, ...]:
        """Results of `rows` of the slices and of their `logits`."""
        if not rows:
            return ()
        if len(rows) < len(slices):
            slices, states = [slices[row] for row in rows], [states[row] for row in rows]
            logits = logits[list(rows)].cpu()
        results = self._errors(slices, states, logits)
        results |= self._late_results(slices, states, logits, results)
        usable = [row for row in range(len(slices)) if row not in results]
        if 0 < len(usable) < len(slices):
            logits = logits[usable]
        chosen = self._choose_rows([slices[row] for row in usable], [states[row] for row in usable], logits)
        results.update(zip(usable, chosen, strict=True))
        return tuple(results[row] for row in range(len(slices)))

    def _choose_rows(
        self, slices: Sequence[StepSlice], states: Sequence[SamplerState], logits: Tensor
    ) -> Iterator[SliceResult]:
        """Results of rows without errors, in blocks that fit into the caches of the device."""
        num_rows = rows_per_block(self._vocab_size, logits.device)
        for first in range(0, len(slices), num_rows):
            end = first + num_rows
            yield from self._choose_block(slices[first:end], states[first:end], logits[first:end])

    def _late_results(
        self,
        slices: Sequence[StepSlice],
        states: Sequence[SamplerState],
        logits: Tensor,
        known: Collection[int],
    ) -> dict[int, SliceResult]:
        """Results, without a token, of the rows whose masks are not ready; `known` rows have theirs."""
        rows = {
            row: slices[row].sequence
            for row, state in enumerate(states)
            if state.sampling.grammar is not None and row not in known
        }
        late, found = self._late.late(rows.values()), {}
        for row in (row for row, key in rows.items() if key in late):
            part = slices[row]
            found[row] = SliceResult(part.sequence, part.restart_count, None, is_late=True)
            own = logits[row : row + 1].to("cpu", copy=True)  # of a device, nothing is kept between steps
            self._late.add(LateRow(part, states[row], own))
        return found

    def score(
        self,
        step_slice: StepSlice,
        prompt: ScoredPrompt,
        hidden: Tensor,
        head: Callable[[Tensor], Tensor],
        result: SliceResult,
    ) -> SliceResult:
        """Return `result` with the log-probabilities of the prompt tokens after a scored chunk, or with an
        error.

        `hidden` [tokens of the chunk, hidden_size] is the last layer's; `head` computes logits float32 [m,
        vocab_size].
        """
        state = prompt.state
        if isinstance(result.outcome, SliceError):
            return result
        if state.problem is not None:
            return self._unusable(step_slice, state.problem)
        try:
            scored = score(
                hidden,
                prompt.tokens,
                head,
                first_position=step_slice.first_position + 1,
                num_top=state.sampling.prompt_logprobs,
                vocab_size=self._vocab_size,
            )
        except NonFiniteLogits as error:
            return self._not_finite(step_slice, error.position)
        return replace(result, prompt_logprobs=scored)

    def _errors(
        self, slices: Sequence[StepSlice], states: Sequence[SamplerState], logits: Tensor
    ) -> dict[int, SliceResult]:
        """Results of rows without usable logits or parameters."""
        errors = {
            row: self._not_finite(slices[row], _position(slices[row])) for row in non_finite_rows(logits)
        }
        for row, state in enumerate(states):
            if state.problem is not None and row not in errors:
                errors[row] = self._unusable(slices[row], state.problem)
        return errors

    def _choose_block(
        self, slices: Sequence[StepSlice], states: Sequence[SamplerState], logits: Tensor
    ) -> list[SliceResult]:
        draws = [
            Draw(state.sampling, step_slice.sequence.choice, _position(step_slice))
            for step_slice, state in zip(slices, states, strict=True)
        ]
        problems: dict[int, str] = {}
        tokens = choose_rows(logits, states, draws, self._forbid(slices, states, problems))
        logprobs = _sampled_logprobs(logits, tokens, states)
        results = []
        for row, (step_slice, token) in enumerate(zip(slices, tokens, strict=True)):
            if row in problems:
                results.append(self._failed(step_slice, step_pb2.SliceError.KIND_GRAMMAR, problems[row]))
            elif token is None:
                results.append(self._unusable(step_slice, _nothing_allowed(step_slice, states[row])))
            else:
                results.append(
                    SliceResult(step_slice.sequence, step_slice.restart_count, token, logprobs.get(row))
                )
                if self._grammars is not None:
                    self._grammars.precompute(step_slice.sequence, token)
        return results

    def _forbid(
        self, slices: Sequence[StepSlice], states: Sequence[SamplerState], problems: dict[int, str]
    ) -> Callable[[Tensor], None] | None:
        """Function that applies the block's grammars and adds their problems; None without grammars."""
        grammars = self._grammars
        rows = [
            (row, slices[row].sequence)
            for row, state in enumerate(states)
            if state.sampling.grammar is not None
        ]
        if grammars is None or not rows:
            return None
        return lambda scores: problems.update(grammars.apply(scores, rows))

    def _with_logprobs(
        self,
        slices: Sequence[StepSlice],
        states: Sequence[SamplerState],
        logits: Tensor,
        settled: list[int | SliceResult],
    ) -> list[int | SliceResult]:
        """`settled`, with the requested log-probabilities of tokens."""
        tokens = [token if isinstance(token, int) else None for token in settled]
        for row, logprobs in _sampled_logprobs(logits, tokens, states).items():
            part, token = slices[row], tokens[row]
            settled[row] = SliceResult(part.sequence, part.restart_count, token, logprobs)
        return settled

    def _not_finite(self, step_slice: StepSlice, position: int) -> SliceResult:
        return self._failed(
            step_slice,
            step_pb2.SliceError.KIND_NON_FINITE_LOGITS,
            f"logits for position {position} of {step_slice.sequence} are not finite",
        )

    def _unusable(self, step_slice: StepSlice, problem: str) -> SliceResult:
        return self._failed(step_slice, step_pb2.SliceError.KIND_SAMPLER, problem)

    def _failed(self, step_slice: StepSlice, kind: int, message: str) -> SliceResult:
        return SliceResult(
            step_slice.sequence, step_slice.restart_count, SliceError(kind, self._stage, message)
        )


@dataclass(frozen=True, slots=True)
class _Batch:
    """States of the sequences of a batch that decodes; `is_plain` if all of them are."""

    states: list[SamplerState]
    is_plain: bool


def _held(
    states: Sequence[SamplerState], masks: Mapping[int, NDArray[np.uint8]], *, by_kernels: bool
) -> frozenset[int]:
    """Rows that a device does not sample; `masks` by row come from grammars."""
    held, edit_bytes = set[int](), 0
    for row, state in enumerate(states):
        more_bytes = 0 if state.edits is None else state.edits.most_bytes
        is_unknown = not StepRows.takes(state.sampling, by_kernels=by_kernels)
        if state.sampling.grammar is not None:
            is_unknown |= row not in masks
            more_bytes += masks[row].nbytes if row in masks else 0
        if state.problem is not None or is_unknown or edit_bytes + more_bytes > MAX_EDIT_BYTES:
            held.add(row)
        else:
            edit_bytes += more_bytes
    return frozenset(held)


def _position(step_slice: StepSlice) -> int:
    """Absolute position of the token sampled after `step_slice`."""
    return step_slice.first_position + len(step_slice.tokens)


def _nothing_allowed(step_slice: StepSlice, state: SamplerState) -> str:
    masks = None if state.edits is None else state.edits.masks
    names = masks.names() if masks is not None else []
    if state.sampling.grammar is not None:
        names = [*names, "the grammar"]
    place = f"position {_position(step_slice)} of {step_slice.sequence}"
    return f"no token is allowed at {place} by {' and '.join(names)}"


def _sampled_logprobs(
    logits: Tensor, tokens: Sequence[int | None], states: Sequence[SamplerState]
) -> dict[int, TokenLogprobs]:
    """Log-probabilities by row, for rows that request them."""
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
