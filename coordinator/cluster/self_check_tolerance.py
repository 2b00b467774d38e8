"""How far the log-probabilities of a pipeline may be from those of a reference. Pure."""

import math
from collections.abc import Sequence

from checkpoint import DType
from wire.reference import Reference
from wire.steps import TokenLogprobs

TOLERANCE = {DType.F32: 1e-4, DType.F16: 0.02, DType.BF16: 0.06}
"""Of `deviation`."""

_LEAST_SPREAD = 1e-3
"""Logits of a model that prefers nothing have no spread, and what rounding makes of it is no measure."""


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
