"""A run as a picture. Needs matplotlib, which `stageline[bench]` installs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stageline.load.record import LoadRun
from stageline.load.timeline import timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".svg", ".png")

_SIZE_INCHES = (10.0, 7.0)
_MS = 1e3


def check_plot(path: Path) -> None:
    """Raises ValueError for a name that is no picture's, and where matplotlib is not installed."""
    if path.suffix not in FORMATS:
        raise ValueError(f"{str(path)!r} ends with none of {', '.join(FORMATS)}")
    try:
        import matplotlib.figure  # noqa: F401 - imported late: it takes a while, and most runs draw nothing
    except ImportError:
        raise ValueError(
            "a plot needs matplotlib: install it with `pip install 'stageline[bench]'`"
        ) from None


def save_plot(run: LoadRun, title: str, path: Path) -> None:
    """TTFT and ITL as cumulative distributions; output tokens per second and concurrency over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")  # no window: it is drawn with Agg or as SVG
    figure.suptitle(title)
    axes = figure.subplots(2, 2)
    completed = [record for record in run.records if record.is_complete]
    _draw_cdf(axes[0, 0], "time to first token", [record.ttft_s for record in completed])
    _draw_cdf(axes[0, 1], "inter-token latency", [gap_s for record in completed for gap_s in record.gaps_s])
    course = timeline(run)
    edges_s = np.arange(len(course.concurrency) + 1) * course.interval_s
    _draw_course(axes[1, 0], "output tokens per second", course.output_tokens_per_s, edges_s.tolist())
    _draw_course(axes[1, 1], "requests running", course.concurrency, edges_s.tolist())
    figure.savefig(path)


def _draw_cdf(axes: Axes, name: str, values_s: list[float]) -> None:
    values_ms = np.sort(np.array(values_s)) * _MS
    if values_ms.size:
        axes.ecdf(values_ms)
        for percent in (50, 99):
            at_ms = float(np.percentile(values_ms, percent))
            axes.axvline(at_ms, linestyle=":", color="gray")
            axes.annotate(f" p{percent} {at_ms:.1f} ms", (at_ms, percent / 100), va="top")
    axes.set(xlabel=f"{name} [ms]", ylabel="share of samples", xlim=(0, None), ylim=(0, 1))


def _draw_course(axes: Axes, name: str, values: list[float], edges_s: list[float]) -> None:
    axes.stairs(values, edges_s, fill=True, alpha=0.6)
    axes.set(xlabel="time [s]", ylabel=name, xlim=(0, edges_s[-1]), ylim=(0, None))
