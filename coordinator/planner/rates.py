"""Rates of devices for comparison: measurements vary, so that similar ones count as equal. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

from wire.device_rates import DeviceRates

TOLERANCE = 1.15
"""Ratio up to which a rate counts as equal to the next smaller one."""


def levelled(rates: Sequence[DeviceRates | None]) -> tuple[DeviceRates, ...] | None:
    """The rates with one value for all that are similar.

    None if they make no difference: all are similar, or one is unknown, since it cannot be compared.
    """
    known = [rate for rate in rates if rate is not None]
    if not known or len(known) < len(rates):
        return None
    bytes_per_s = _levels([rate.bytes_per_s for rate in known])
    operations_per_s = _levels([rate.operations_per_s for rate in known])
    found = tuple(
        DeviceRates(bytes_per_s=read, operations_per_s=computed)
        for read, computed in zip(bytes_per_s, operations_per_s, strict=True)
    )
    return found if len(set(found)) > 1 else None


def settled(measured: DeviceRates | None, before: DeviceRates | None) -> DeviceRates | None:
    """The rates of a worker that rejoined: those `before` if it measured similar ones, so that no split
    changes because of a measurement.
    """
    if measured is None or before is None:
        return measured
    pairs = (
        (measured.bytes_per_s, before.bytes_per_s),
        (measured.operations_per_s, before.operations_per_s),
    )
    return before if all(max(pair) <= TOLERANCE * min(pair) for pair in pairs) else measured


def _levels(values: Sequence[float]) -> list[float]:
    """Each value by the median of its group; groups are apart by more than the tolerance."""
    ordered = sorted(set(values))
    groups = [[ordered[0]]]
    for value in ordered[1:]:
        if value > TOLERANCE * groups[-1][-1]:
            groups.append([])
        groups[-1].append(value)
    level = {value: median_low(group) for group in groups for value in group}
    return [level[value] for value in values]
