"""How long prompts and outputs are: distributions of token counts, and how they are written.

    128                      always so many
    uniform:64-512           each of these equally likely, both ends included
    normal:256,64            mean and standard deviation
    lognormal:256,128        mean and standard deviation of the lengths themselves, not of their logarithm
    normal:256,64:16-1024    what is drawn outside of the range is set to its nearer end

Draws are rounded to whole tokens, and to one at least.
"""

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

MAX_TOKENS = 2**24

_EXAMPLES = "128, uniform:64-512, normal:256,64 or lognormal:256,128:16-1024"
_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
_RANGE = re.compile(r"([0-9]+)-([0-9]+)")
_MOMENTS = re.compile(rf"{_NUMBER},{_NUMBER}(?::([0-9]+-[0-9]+))?")


class Lengths(Protocol):
    """A distribution of token counts."""

    def draw(self, num_draws: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Independent draws, each at least 1; shape (num_draws,)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UniformLengths:
    """Each whole number in [lowest, highest] equally likely. Raises ValueError."""

    lowest: int
    highest: int

    def __post_init__(self) -> None:
        if not 1 <= self.lowest <= self.highest <= MAX_TOKENS:
            raise ValueError(
                f"{self.lowest} to {self.highest} tokens are no range of lengths in [1, {MAX_TOKENS}]"
            )

    def draw(self, num_draws: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        return rng.integers(self.lowest, self.highest, num_draws, endpoint=True)


class Shape(StrEnum):
    """What a distribution looks like around its mean."""

    NORMAL = "normal"
    LOGNORMAL = "lognormal"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClippedLengths:
    """A shape with the mean and standard deviation that it has before it is clipped. Raises ValueError."""

    shape: Shape
    mean: float
    deviation: float
    bounds: UniformLengths = UniformLengths(lowest=1, highest=MAX_TOKENS)

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= MAX_TOKENS:
            raise ValueError(f"a mean of {self.mean:g} tokens is not in [1, {MAX_TOKENS}]")

    def draw(self, num_draws: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        drawn = self._draw(num_draws, rng).clip(self.bounds.lowest, self.bounds.highest)
        tokens: npt.NDArray[np.int64] = np.rint(drawn).astype(np.int64)
        return tokens

    def _draw(self, num_draws: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        if self.shape is Shape.NORMAL:
            return rng.normal(self.mean, self.deviation, num_draws)
        # The logarithm's own moments, from those of the lengths.
        variance = math.log1p((self.deviation / self.mean) ** 2)
        return rng.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), num_draws)


def parse_lengths(text: str) -> Lengths:
    """A distribution from its text (see the module). Raises ValueError."""
    kind, separator, arguments = text.partition(":")
    if not separator and re.fullmatch(r"[0-9]+", kind):
        return UniformLengths(lowest=int(kind), highest=int(kind))
    if kind == "uniform" and (found := _RANGE.fullmatch(arguments)):
        return _range(found)
    if kind in tuple(Shape) and (found := _MOMENTS.fullmatch(arguments)):
        mean, deviation, bounds = found.groups()
        distribution = ClippedLengths(shape=Shape(kind), mean=float(mean), deviation=float(deviation))
        return distribution if bounds is None else _clipped(distribution, bounds)
    raise ValueError(f"{text!r} is no distribution of lengths; write for example {_EXAMPLES}")


def _range(found: re.Match[str]) -> UniformLengths:
    return UniformLengths(lowest=int(found[1]), highest=int(found[2]))


def _clipped(distribution: ClippedLengths, bounds: str) -> ClippedLengths:
    found = _RANGE.fullmatch(bounds)
    assert found is not None, "the pattern around it has matched it"
    return ClippedLengths(
        shape=distribution.shape,
        mean=distribution.mean,
        deviation=distribution.deviation,
        bounds=_range(found),
    )
