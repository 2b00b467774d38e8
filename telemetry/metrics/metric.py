"""What a metric is: its name, unit, labels and buckets, and what Prometheus calls it.

Names and units follow OpenTelemetry's conventions (dots, UCUM); the names for Prometheus are derived from
them by OpenTelemetry's rules for that. A label has a short name in Prometheus and is an attribute elsewhere.
"""

import re
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """COUNTER only grows, UP_DOWN is a sum that also shrinks, GAUGE is read off, HISTOGRAM counts values."""

    COUNTER = "counter"
    UP_DOWN = "up-down counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Process(Enum):
    """Who records a metric; the value is its service.name."""

    COORDINATOR = "stageline-coordinator"
    WORKER = "stageline-worker"


OTHER = "other"
"""The label value that stands for all that have no series of their own."""


@dataclass(frozen=True, slots=True)
class Label:
    """What tells the series of a metric apart: one of `values`, or else at most `most` different ones.

    `name` is the label in Prometheus, `attribute` that of OpenTelemetry, where its values are integers if
    `is_integer`.
    """

    name: str
    attribute: str
    values: tuple[str, ...] = ()
    most: int = 0
    is_integer: bool = False

    def __post_init__(self) -> None:
        if not self.values and self.most < 1:
            raise ValueError(f"label {self.name!r} has neither values nor a limit on how many")

    @property
    def num_values(self) -> int:
        """The most that there are, without OTHER."""
        return len(self.values) or self.most


_UNIT_WORDS = {"s": "seconds", "By": "bytes"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric. Those of workers have the label `worker` too, where the coordinator shows them.

    `bounds` are the upper bounds of a histogram's buckets, inclusive, in `unit`.
    """

    name: str
    kind: Kind
    unit: str
    processes: tuple[Process, ...]
    description: str
    labels: tuple[Label, ...] = ()
    bounds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if (self.kind is Kind.HISTOGRAM) != bool(self.bounds):
            raise ValueError(f"{self.name} is a {self.kind.value} with {len(self.bounds)} bucket bounds")
        if list(self.bounds) != sorted(set(self.bounds)):
            raise ValueError(f"the bucket bounds of {self.name} do not ascend: {self.bounds}")

    @property
    def prometheus_name(self) -> str:
        """Of its family: with the unit, and `_total` for a counter."""
        name = re.sub(r"[^a-zA-Z0-9]+", "_", self.name)
        if unit := self.prometheus_unit:
            name = name if name.endswith(f"_{unit}") else f"{name}_{unit}"
        return f"{name}_total" if self.kind is Kind.COUNTER else name

    @property
    def prometheus_unit(self) -> str:
        """The word that ends its name; what is counted, in braces in UCUM, is none."""
        if self.unit == "1":
            return "ratio" if self.kind is Kind.GAUGE else ""
        return _UNIT_WORDS[self.unit] if not self.unit.startswith("{") else ""

    @property
    def is_integer(self) -> bool:
        """It counts whole things."""
        return self.unit not in ("s", "1")

    @property
    def max_series(self) -> int:
        """Different label values that it may have, OTHER not counted."""
        product = 1
        for label in self.labels:
            product *= label.num_values
        return product
