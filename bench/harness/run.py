"""Measures groups one after another, each with a time limit; a failed group does not stop the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from bench.harness.catalogue import measure_of
from bench.harness.figure import Figure
from bench.harness.group import Group, Measure, Setting
from bench.harness.machine import ForeignLoad, Neighbour


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """Result of a group; without figures `problem` has the reason.

    `foreign_share` is the share of the machine's time used by other processes; `neighbours` are those that
    used the most and still run.
    """

    name: str
    figures: tuple[Figure, ...] = ()
    problem: str | None = None
    took_s: float = 0.0
    foreign_share: float = 0.0
    neighbours: tuple[Neighbour, ...] = ()


async def run_groups(
    groups: Iterable[Group], setting: Setting, *, load: Callable[[Group], Measure] = measure_of
) -> list[GroupResult]:
    """Measure groups; results in their order."""
    return [await _run(group, setting, load) for group in groups]


async def _run(group: Group, setting: Setting, load: Callable[[Group], Measure]) -> GroupResult:
    setting.say(f"{group.name}: {group.about} (about {group.about_s} s)")
    started_s, others = time.monotonic(), ForeignLoad()
    try:
        async with asyncio.timeout(group.timeout_s):
            figures = await load(group)(setting)
        result = GroupResult(name=group.name, figures=tuple(figures))
    except TimeoutError:
        result = GroupResult(name=group.name, problem=f"not done after {group.timeout_s:g} s")
    except Exception as error:
        # continue with the other groups after any error
        result = GroupResult(name=group.name, problem=f"{type(error).__name__}: {error}")
    return replace(
        result,
        took_s=time.monotonic() - started_s,
        foreign_share=others.share(),
        neighbours=others.neighbours(),
    )
