"""Memory samples and object counts of the coordinator, and detection of growth. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

MB = 1e6
MOST_GROWTH_BYTES = 2 * MB
WINDOWS = ((1 / 3, 1 / 2), (5 / 6, 1.0))
"""Shares of the whole time whose medians are compared: of 30 minutes, 10 to 15 and 25 to 30."""
COUNTED_AT = (1 / 3, 2 / 3, 1.0)
"""Fractions of the run at which objects are counted, with no live request."""
NOISE_OBJECTS = 200
NOISE_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Sample:
    """Resident bytes at a time since the start, in seconds."""

    at_s: float
    resident_bytes: int


@dataclass(slots=True)
class Report:
    """Report of a churn run."""

    seconds: float
    rate: float
    samples: list[Sample] = field(default_factory=list)
    counts: list[Mapping[str, int]] = field(default_factory=list)
    allocator: list[Mapping[str, int]] = field(default_factory=list)
    num_requests: Mapping[str, int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def growth_bytes(self) -> float:
        """Median of resident memory in the second window less that in the first."""
        first, second = (median(self._in_window(*window)) for window in WINDOWS)
        return second - first

    @property
    def growing(self) -> dict[str, list[int]]:
        """Types whose count grows beyond noise at every measurement."""
        return growing_types(self.counts)

    @property
    def has_passed(self) -> bool:
        return self.growth_bytes <= MOST_GROWTH_BYTES and not self.growing and not self.problems

    def line(self) -> str:
        """The verdict."""
        types = ", ".join(f"{name} {'->'.join(map(str, them))}" for name, them in self.growing.items())
        return (
            f"churn: {sum(self.num_requests.values())} requests in {self.seconds / 60:g} min, "
            f"resident memory {self.growth_bytes / MB:+.2f} MB (at most {MOST_GROWTH_BYTES / MB:+.0f} MB), "
            f"growing types: {types or 'none'}, {len(self.problems)} problems: "
            f"{'PASS' if self.has_passed else 'FAIL'}"
        )

    def fields(self) -> dict[str, object]:
        """The report as plain data."""
        return {
            "passed": self.has_passed,
            "seconds": self.seconds,
            "rate": self.rate,
            "growth_bytes": self.growth_bytes,
            "growing": self.growing,
            "requests": dict(self.num_requests),
            "problems": self.problems,
            "counts": [dict(count) for count in self.counts],
            "allocator": [dict(counters) for counters in self.allocator],
            "resident": [[round(sample.at_s, 1), sample.resident_bytes] for sample in self.samples],
        }

    def _in_window(self, begin: float, end: float) -> list[int]:
        begin_s, end_s = begin * self.seconds, end * self.seconds
        return [sample.resident_bytes for sample in self.samples if begin_s <= sample.at_s <= end_s]


def growing_types(counts: Sequence[Mapping[str, int]]) -> dict[str, list[int]]:
    """Types that grow from each count to the next by more than noise, with their counts."""
    names = sorted({name for count in counts for name in count})
    series = {name: [count.get(name, 0) for count in counts] for name in names}
    return {name: values for name, values in series.items() if _grows(values)}


def _grows(values: Sequence[int]) -> bool:
    steps = pairwise(values)
    return len(values) > 1 and all(
        later - earlier > NOISE_OBJECTS + NOISE_SHARE * earlier for earlier, later in steps
    )
