"""Rows of results.json: a figure, its bound and target, or why it was not measured. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from bench.harness.figure import Better

SCHEMA = 1
"""Number of the layout of results.json; raised when a field changes its meaning."""


class Verdict(StrEnum):
    """NOT_MEASURED is never a success: the row has a reason instead of a value."""

    REACHED = "reached"
    MISSED = "missed"
    NO_TARGET = "no target"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A figure in `unit`. `value` is None if it was not measured, and `reason` says why.

    `bound` is what the hardware allows, from rates of the same run: the least time, or the highest rate.
    With a bound, `target` is the least `ratio`; without, it limits the value in the direction of `better`.
    `details` are further numbers, with the unit in their names.
    """

    phase: str
    name: str
    unit: str
    value: float | None = None
    bound: float | None = None
    target: float | None = None
    better: Better = Better.HIGHER
    reason: str = ""
    details: Mapping[str, float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.value is None) != bool(self.reason):
            raise ValueError(f"{self.name}: a value or a reason, got {self.value} and {self.reason!r}")

    @property
    def ratio(self) -> float | None:
        """Share of the bound that was reached, 1 at best; None without bound or value."""
        if self.value is None or not self.bound:
            return None
        if self.better is Better.HIGHER:
            return self.value / self.bound
        return self.bound / self.value if self.value else None

    @property
    def verdict(self) -> Verdict:
        if self.value is None:
            return Verdict.NOT_MEASURED
        if self.target is None:
            return Verdict.NO_TARGET
        if self.bound is not None:
            return _verdict((self.ratio or 0.0) >= self.target)
        is_higher = self.better is Better.HIGHER
        return _verdict(self.value >= self.target if is_higher else self.value <= self.target)

    def as_json(self, *, device: str, versions: Mapping[str, str]) -> dict[str, Any]:
        """The row of results.json."""
        return {
            "phase": self.phase,
            "name": self.name,
            "value": _rounded(self.value),
            "unit": self.unit,
            "bound": _rounded(self.bound),
            "ratio": _rounded(self.ratio),
            "target": self.target,
            "better": self.better.value,
            "verdict": self.verdict.value,
            "reason": self.reason,
            "device": device,
            "versions": dict(versions),
            "details": {
                name: _rounded(value) if isinstance(value, float) else value
                for name, value in self.details.items()
            },
        }


def _verdict(is_reached: bool) -> Verdict:
    return Verdict.REACHED if is_reached else Verdict.MISSED


def _rounded(value: float | None) -> float | None:
    """Four significant digits; more would be noise."""
    return None if value is None else float(f"{value:.4g}")


def encode(row: Row) -> dict[str, Any]:
    """A row for another process."""
    return asdict(row)


def decode(values: Mapping[str, Any]) -> Row:
    """The row of `encode`."""
    return Row(**{**values, "better": Better(values["better"])})


def with_missing(rows: Iterable[Row], wanted: Iterable[Row], reasons: Mapping[str, str]) -> list[Row]:
    """`rows`, and each of `wanted` that none of them has, with the reason of its phase."""
    found = list(rows)
    names = {row.name for row in found}
    return found + [
        Row(
            phase=row.phase,
            name=row.name,
            unit=row.unit,
            target=row.target,
            better=row.better,
            reason=reasons.get(row.phase) or "its phase ended without it",
        )
        for row in wanted
        if row.name not in names
    ]
