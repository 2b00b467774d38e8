"""CPU time of a stage for a step of decodes without its compute; beside another commit, in turns."""

from __future__ import annotations

import statistics
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from bench.harness import stage_step
from bench.harness.apart import measured_apart
from bench.harness.figure import Better, Figure, Round, of_rounds
from bench.harness.group import Setting
from bench.harness.peer import Peer

LIMITS_US = {64: 120.0, 256: 450.0}
"""By number of decodes; a third and a sixth of what one object per sequence cost."""
CHEAPER = {64: 3.0, 256: 6.0}
"""Times that a stage's step is to be cheaper than at the commit that columns replaced."""
COORDINATOR_MODULE = "bench.figures.coordinator_cost"
COORDINATOR_CHEAPER = {"scheduling 256 sequences in one step": 3.0, "a step of 256 sequences": 2.0}
"""By the begin of the figure's name."""

HOW = "CPU time of FrameAssembler.add, StepExecutor.run without compute and encode_hidden_states : the limit"
HOW_AGAINST = "CPU time of the other checkout : of this one, in turns; more is better"


async def measure(setting: Setting) -> list[Figure]:
    """Rounds of this checkout, and of another one if there is one."""
    num_rounds = setting.rounds(5)
    ours, others = await _stage_times(setting, num_rounds)
    figures = [
        Figure(
            name=f"stage step, {number} decodes without compute : {LIMITS_US[number]:g} us",
            measured=statistics.median(times_us),
            bound=LIMITS_US[number],
            unit="us",
            better=Better.LOWER,
            target=1.0,
            noise=0.2,
            how=HOW,
        )
        for number, times_us in ours.items()
    ]
    if setting.against is None:
        return figures
    for number, times_us in ours.items():
        pairs = zip(others[number], times_us, strict=True)
        figures.append(_times_cheaper(f"stage step, {number} decodes", list(pairs), CHEAPER[number]))
    return [*figures, *await _coordinator(setting, setting.against, num_rounds)]


async def _stage_times(
    setting: Setting, num_rounds: int
) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
    ours: dict[int, list[float]] = {number: [] for number in LIMITS_US}
    others: dict[int, list[float]] = {number: [] for number in LIMITS_US}
    async with AsyncExitStack() as stack:
        turns = [(await stack.enter_async_context(_peer(sys.executable)), ours)]
        if setting.against is not None:
            python = str(_python(setting.against))
            turns.append((await stack.enter_async_context(_peer(python)), others))
        for _ in range(num_rounds):
            for number in LIMITS_US:
                for peer, times_us in turns:
                    question = {"decodes": number, "blocks": 3 if setting.is_quick else 12}
                    times_us[number].append((await peer.ask(question))["stage_us"])
                setting.say(f"{number} decodes: {_last(ours[number], others[number])}")
    return ours, others


def _peer(python: str) -> Peer:
    return Peer("bench.harness.stage_step", command=(python, "-P", stage_step.__file__))


def _python(checkout: Path) -> Path:
    return checkout.absolute() / ".venv" / "bin" / "python"


def _last(ours_us: list[float], others_us: list[float]) -> str:
    other = f", the other checkout {others_us[-1]:.0f} us" if others_us else ""
    return f"{ours_us[-1]:.0f} us{other}"


async def _coordinator(setting: Setting, against: Path, num_rounds: int) -> list[Figure]:
    """Means of both checkouts' own group `coordinator`, by name; a median step may begin no block."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for _ in range(num_rounds):
        ours = await measured_apart(COORDINATOR_MODULE)(setting)
        other = await measured_apart(COORDINATOR_MODULE, python=_python(against), folder=against)(setting)
        others_us = {figure.name: figure.details["mean_us"] for figure in other}
        for figure in ours:
            if figure.name in others_us:
                pairs.setdefault(figure.name, []).append((others_us[figure.name], figure.details["mean_us"]))
    return [
        _times_cheaper(name.partition(" : ")[0], times_us, cheaper)
        for name, times_us in pairs.items()
        for begin, cheaper in COORDINATOR_CHEAPER.items()
        if name.startswith(begin)
    ]


def _times_cheaper(name: str, pairs_us: list[tuple[float, float]], target: float) -> Figure:
    """A figure of (other checkout, this one) pairs."""
    return of_rounds(
        f"{name}, other checkout : this one",
        [Round(other_us, our_us) for other_us, our_us in pairs_us],
        unit="us",
        target=target,
        noise=0.2,
        how=HOW_AGAINST,
    )
