"""Simulated step times and faults of a mock stage."""

import re
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any

from wire.foreign_text import parse_digits
from wire.steps import Step, unpack_column

_COUNTS = ("poison_after", "hang_after", "oom_at")
_MOST_COUNT = 1_000_000_000
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)", re.ASCII)
_MOST_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class MockSpec:
    """Seconds per step with slices, per token, and per token and thousand tokens of context that it attends
    to.

    After `poison_after` steps of the process all steps fail as on a broken device; after `hang_after`,
    none ends. A step of `oom_at` tokens or more runs out of memory. None disables a fault.
    """

    step: float = 0.0
    token: float = 0.0
    context: float = 0.0
    poison_after: int | None = None
    hang_after: int | None = None
    oom_at: int | None = None

    @classmethod
    def parse(cls, text: str) -> "MockSpec":
        """Parse "step=20ms,token=0.05ms,poison_after=100" with units us, ms and s. Raises ValueError."""
        names = [field.name for field in fields(cls)]
        values = dict[str, Any]()
        for part in text.split(","):
            name, separator, value = part.strip().partition("=")
            if name not in names or not separator:
                forms = (f"{name}=N" if name in _COUNTS else f"{name}=TIME" for name in names)
                raise ValueError(f"mock time {part!r}: expected {', '.join(forms)}")
            if name in values:
                raise ValueError(f"mock time {name!r} is given twice")
            values[name] = _parse_count(name, value) if name in _COUNTS else _parse_time(name, value)
        return cls(**values)

    def __str__(self) -> str:
        """The text that `parse` reads as this spec."""
        given = [(field.name, getattr(self, field.name)) for field in fields(self)]
        texts = [
            f"{name}={value}" if name in _COUNTS else f"{name}={Decimal(repr(value)):f}s"
            for name, value in given
            if value
        ]
        return ",".join(texts) or "step=0s"

    def longest_step_s(self, *, num_tokens: int, context: int) -> float:
        """Upper bound for a step of `num_tokens` that attend to at most `context` tokens each."""
        return self.step + num_tokens * (self.token + self.context * context / 1000)

    def step_s(self, step: Step) -> float:
        """Seconds for `step`, 0 without slices."""
        if not step.num_slices:
            return 0.0
        if not (self.token or self.context):
            return self.step
        num_pairs = sum(unpack_column(step.decodes.positions)) + len(step.decodes)
        for chunk in step.chunks:
            count = len(chunk.tokens)
            num_pairs += count * chunk.first_position + count * (count + 1) // 2
        return self.step + self.token * step.num_tokens + self.context * num_pairs / 1000


def _parse_count(name: str, text: str) -> int:
    if not (count := parse_digits(text.strip(), limit=_MOST_COUNT)):
        raise ValueError(f"mock {name}={text!r}: expected a number from 1 to {_MOST_COUNT}")
    return count


def _parse_time(name: str, text: str) -> float:
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"mock time {name}={text!r}: expected a number with us, ms or s, such as 20ms")
    time_s = float(found[1]) * _UNITS[found[2]]
    if time_s > _MOST_S:
        raise ValueError(f"mock time {name}={text!r}: at most {_MOST_S}s")
    return time_s
