"""The tokens of a block of rows: bias, penalties and masks, then the most likely token or a drawn one."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stage_worker.sampling.draws import Draw, first_maxima
from stage_worker.sampling.masks import mask
from stage_worker.sampling.penalties import add_bias, penalise
from stage_worker.sampling.random_choice import choose_random
from stage_worker.sampling.sequence_state import SequenceState


def choose_rows(
    logits: Tensor,
    states: Sequence[SequenceState],
    draws: Sequence[Draw],
    forbid: Callable[[Tensor], None] | None = None,
) -> list[int | None]:
    """The token of each row of `logits` (float32 [n, vocab_size], all finite); None where no token is
    allowed.

    `forbid` sets to -inf, in place, what the grammars of rows do not allow.
    """
    scores = processed(logits, states, forbid)
    maxima, likeliest = first_maxima(scores)
    is_allowed = (~torch.isneginf(maxima)).tolist()
    rows = [row for row, draw in enumerate(draws) if draw.is_random and is_allowed[row]]
    if len(rows) == len(draws):
        likeliest = choose_random(scores, maxima, draws)
    elif rows:
        likeliest[rows] = choose_random(scores[rows], maxima[rows], [draws[row] for row in rows])
    return [token if allowed else None for token, allowed in zip(likeliest.tolist(), is_allowed, strict=True)]


def processed(
    logits: Tensor, states: Sequence[SequenceState], forbid: Callable[[Tensor], None] | None = None
) -> Tensor:
    """`logits` [n, vocab_size] after bias, penalties and masks, in the order of docs/sampling.md; each acts
    on those rows alone that use it. `logits` themselves where no row uses any.
    """
    if not any(state.edits_logits for state in states):
        return logits
    scores = logits.clone(memory_format=torch.contiguous_format)
    biased = [(row, state.bias) for row, state in enumerate(states) if state.bias is not None]
    add_bias(scores, [row for row, _ in biased], [bias for _, bias in biased])
    counted = [(row, state.counts) for row, state in enumerate(states) if state.counts is not None]
    penalise(
        scores,
        [row for row, _ in counted],
        [counts for _, counts in counted],
        [states[row].sampling for row, _ in counted],
    )
    masked = [(row, state.masks) for row, state in enumerate(states) if state.masks is not None]
    mask(scores, [row for row, _ in masked], [masks for _, masks in masked])
    if forbid is not None:
        forbid(scores)
    return scores
