"""Log-probabilities of a prompt's own tokens, a few rows of logits at a time."""

from collections.abc import Callable, Sequence

from torch import Tensor

from stage_worker.sampling.finite import non_finite_rows
from stage_worker.sampling.logprobs import token_logprobs
from wire.steps import TokenLogprobs

MAX_BLOCK_ELEMENTS = 1 << 22
"""Logits at a time: 16 MiB of float32, and about three times that with what is computed from them."""


class NonFiniteLogits(Exception):
    """The logits for absolute position `position` have a NaN or an infinity in them."""

    def __init__(self, position: int) -> None:
        super().__init__(f"logits for position {position} are not finite")
        self.position = position


def score(
    hidden: Tensor,
    tokens: Sequence[int],
    head: Callable[[Tensor], Tensor],
    *,
    first_position: int,
    num_top: int,
    vocab_size: int,
) -> tuple[TokenLogprobs, ...]:
    """Of each of `tokens`, which stand at `first_position` and after and which the rows of `hidden`
    [len(tokens), hidden_size] predict; `head` makes logits float32 [m, vocab_size] of some of these rows.

    Raises NonFiniteLogits.
    """
    num_rows = max(1, MAX_BLOCK_ELEMENTS // vocab_size)
    scored: list[TokenLogprobs] = []
    for first in range(0, len(tokens), num_rows):
        wanted = tokens[first : first + num_rows]
        logits = head(hidden[first : first + len(wanted)])
        for row in non_finite_rows(logits):
            raise NonFiniteLogits(first_position + first + row)
        scored += token_logprobs(logits, wanted, [num_top] * len(wanted))
    return tuple(scored)
