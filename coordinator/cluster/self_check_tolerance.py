"""How far the results of a pipeline, and the hidden states on the way, may be from a reference. Pure."""

import math
from collections.abc import Sequence

from wire.reference import NUM_PROJECTIONS, LayerReference, Reference
from wire.steps import TokenLogprobs

LEAST_TOLERANCE = 3e-5
"""Measured in float32, where another order of sums is all that differs: at most 2.4e-6."""

_ROUNDINGS = 2.0
"""Measured in bfloat16 and float16: 0.67 to 1.58 times what the reference says of rounding."""

_LEAST_SPREAD = 1e-3
"""Logits of a model that prefers nothing have no spread, and what rounding makes of it is no measure."""

_CLEAR_GAPS = 4.0
"""A most likely token that leads by so many tolerances must be sampled."""

Pair = tuple[TokenLogprobs, TokenLogprobs]
"""What a pipeline says after a token, and what the reference says."""


def tolerance(reference: Reference) -> float:
    """The largest `deviation` that a good pipeline may have."""
    return max(LEAST_TOLERANCE, _ROUNDINGS * reference.rounding / _spread(reference))


def deviation(pairs: Sequence[Pair], reference: Reference) -> float:
    """The root mean square of the differences, as a fraction of the spread of the logits; not a number where
    one of them is not.

    A token that only one side lists is at most as likely as the last that the other lists: it counts with
    what it is above that.
    """
    squares = [
        difference * difference for row, expected in pairs for difference in _differences(row, expected)
    ]
    if not all(map(math.isfinite, squares)):
        return math.nan
    return math.sqrt(math.fsum(squares) / len(squares)) / _spread(reference) if squares else 0.0


def clearly_expected(expected: TokenLogprobs, reference: Reference) -> int | None:
    """The token that a greedy sampler must choose; None where rounding may decide."""
    if len(expected.top) < 2:
        return expected.top[0][0] if expected.top else None
    (token, first), (_, second) = expected.top[:2]
    return token if first - second > _CLEAR_GAPS * tolerance(reference) * _spread(reference) else None


def state_tolerance(layer: LayerReference) -> float:
    """The largest `state_deviation` that a good stage may have."""
    return max(LEAST_TOLERANCE, _ROUNDINGS * layer.rounding)


def state_deviation(
    states: Sequence[float], layer: LayerReference, places: Sequence[tuple[int, int]]
) -> float:
    """The root mean square of how far hidden states are from those of the reference, as a fraction of their
    norms; not a number where one of them is not. `places`: where each begins in `states`, and in the layer's.
    """
    squares = []
    for here, there in places:
        ends = here + NUM_PROJECTIONS, there + NUM_PROJECTIONS
        distance = math.dist(states[here : ends[0]], layer.states[there : ends[1]])
        norm = max(layer.states[ends[1]], _LEAST_SPREAD)
        squares.append(distance * distance / NUM_PROJECTIONS / (norm * norm))
    if not all(map(math.isfinite, squares)):
        return math.nan
    return math.sqrt(math.fsum(squares) / len(squares)) if squares else 0.0


def _spread(reference: Reference) -> float:
    return max(reference.logit_spread, _LEAST_SPREAD)


def _differences(row: TokenLogprobs, expected: TokenLogprobs) -> list[float]:
    """Of every token that one of them lists."""
    here, there = dict(row.top), dict(expected.top)
    last_here, last_there = min(here.values()), min(there.values())
    here[row.token], there[expected.token] = row.logprob, expected.logprob
    both = [here[token] - there[token] for token in here.keys() & there.keys()]
    only_here = [max(0.0, here[token] - last_there) for token in here.keys() - there.keys()]
    only_there = [max(0.0, there[token] - last_here) for token in there.keys() - here.keys()]
    return both + only_here + only_there
