"""Writes the timeline of a part of a run."""

from __future__ import annotations

from bench.harness.cluster import BenchCluster
from bench.harness.group import Setting
from bench.harness.timeline import timeline
from bench.harness.timeline_svg import draw


def write_timeline(
    setting: Setting, cluster: BenchCluster, begin_s: float, end_s: float, *, name: str, title: str
) -> None:
    """Draws [begin_s, end_s] of the machine's clock into NAME_timeline.svg; says so when it cannot."""
    file = setting.output_directory / f"{name}_timeline.svg"
    try:
        drawn = timeline(cluster.steps(), begin_s, end_s)
    except ValueError as error:
        setting.say(f"no {file.name}: {error}")
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(draw(drawn, title))
