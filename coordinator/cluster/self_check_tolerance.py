"""How far the log-probabilities of a pipeline may be from those of a reference. Pure."""

import math
from collections.abc import Sequence

from wire.reference import Reference
from wire.steps import TokenLogprobs

LEAST_TOLERANCE = 3e-5
"""Measured in float32, where another order of sums is all that differs: at most 2.4e-6."""

_ROUNDINGS = 2.0
"""Measured in bfloat16 and float16: 0.67 to 1.58 times what the reference says of rounding."""

_LEAST_SPREAD = 1e-3
"""Logits of a model that prefers nothing have no spread, and what rounding makes of it is no measure."""


def tolerance(reference: Reference) -> float:
    """The largest `deviation` that a good pipeline may have."""
    return max(LEAST_TOLERANCE, _ROUNDINGS * reference.rounding / max(reference.logit_spread, _LEAST_SPREAD))


def deviation(rows: Sequence[TokenLogprobs], reference: Reference) -> float:
    """The root mean square of what `rows` differ by from the first rows of the reference, as a fraction of
    the spread of the logits; not a number where one of them is not.

    A token that only one side lists is at most as likely as the last that the other lists: it counts with
    what it is above that.
    """
    squares = [
        difference * difference
        for row, expected in zip(rows, reference.rows, strict=False)
        for difference in _differences(row, expected)
    ]
    if not all(map(math.isfinite, squares)):
        return math.nan
    return math.sqrt(math.fsum(squares) / len(squares)) / max(reference.logit_spread, _LEAST_SPREAD)


def _differences(row: TokenLogprobs, expected: TokenLogprobs) -> list[float]:
    """Of every token that one of them lists."""
    here, there = dict(row.top), dict(expected.top)
    last_here, last_there = min(here.values()), min(there.values())
    here[row.token], there[expected.token] = row.logprob, expected.logprob
    both = [here[token] - there[token] for token in here.keys() & there.keys()]
    only_here = [max(0.0, here[token] - last_there) for token in here.keys() - there.keys()]
    only_there = [max(0.0, there[token] - last_here) for token in there.keys() - here.keys()]
    return both + only_here + only_there
