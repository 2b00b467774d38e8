"""Writes the timeline of a part of a run."""

from __future__ import annotations

from pathlib import Path

from bench.harness.cluster import BenchCluster
from bench.harness.timeline import Timeline, timeline
from bench.harness.timeline_svg import draw


def write_timeline(cluster: BenchCluster, begin_s: float, end_s: float, file: Path, title: str) -> Timeline:
    """Draws [begin_s, end_s]. Raises ValueError where the stages do not tell their times."""
    drawn = timeline(cluster.steps(), begin_s, end_s)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(draw(drawn, title))
    return drawn
