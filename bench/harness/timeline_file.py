"""Draws timelines: one row per stage, one colour per step; white is idle time."""

from __future__ import annotations

import colorsys
from typing import TYPE_CHECKING

from bench.harness.cluster import BenchCluster
from bench.harness.group import Setting
from bench.harness.timeline import Timeline, timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_COLOURS = 12
"""Neighbouring steps, and steps in flight together, differ in colour."""


def write_timeline(
    setting: Setting, cluster: BenchCluster, begin_s: float, end_s: float, *, name: str, title: str
) -> None:
    """Draw [begin_s, end_s] of the machine's clock into NAME_timeline.svg, or print why it cannot."""
    file = setting.output_directory / f"{name}_timeline.svg"
    try:
        measured = timeline(cluster.steps(), begin_s, end_s)
    except ValueError as error:
        setting.say(f"no {file.name}: {error}")
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    draw(measured, title).savefig(file)


def draw(measured: Timeline, title: str) -> Figure:
    """Draw one collection of bars per stage, FIRST on top."""
    # Imported late: it takes a second where no list of fonts is cached, as in each test process.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1 + 0.3 * measured.num_stages), layout="constrained")
    axes = figure.subplots()
    for stage in range(measured.num_stages):
        bars = [bar for bar in measured.bars if bar.stage == stage]
        axes.broken_barh(
            [(bar.begin_s * 1e3, (bar.end_s - bar.begin_s) * 1e3) for bar in bars],
            (stage - 0.4, 0.8),
            facecolors=[_colour(bar.step_id) for bar in bars],
        )
    axes.set_yticks(range(measured.num_stages), [f"stage {stage}" for stage in range(measured.num_stages)])
    axes.secondary_yaxis("right").set_yticks(
        range(measured.num_stages), [f"{busy:.1%}" for busy in measured.busy]
    )
    axes.set(xlim=(0, measured.duration_s * 1e3), ylim=(measured.num_stages - 0.5, -0.5), xlabel="ms")
    travel_ms = measured.travel_s * 1e3
    axes.set_title(f"{title}\none colour per step, white is idle; all hops of a step {travel_ms:.2f} ms")
    return figure


def _colour(step_id: int) -> tuple[float, float, float]:
    # Steps of the golden angle keep neighbours far apart on the colour wheel.
    return colorsys.hls_to_rgb(step_id % NUM_COLOURS * 137.5 % 360 / 360, 0.58, 0.62)
