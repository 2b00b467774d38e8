"""Draws the steps of a pipeline and the tokens of a request while a worker is killed. Pure.

Fixed style and plain SVG, so that two drawings of one run are the same bytes. The page behind the picture is
light or dark: text and lines follow `prefers-color-scheme`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT = 960, 130, 20
TOP, ROW, BAR = 64, 58, 26
TICK_S = 0.5
NUM_COLOURS = 4
"""Neighbouring steps differ in colour."""

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.small { font-size: 12px; fill: #59636e; }
.head { font-size: 15px; font-weight: 600; }
.axis { stroke: #d1d9e0; }
.lost { fill: #d1242f; fill-opacity: 0.10; }
.kill { stroke: #d1242f; stroke-width: 2; }
.killed { fill: #d1242f; font-weight: 600; }
.token { stroke: #1a7f37; stroke-width: 1.2; }
.pause { stroke: #1f2328; }
.s0 { fill: #0969da; } .s1 { fill: #54aeff; } .s2 { fill: #8250df; } .s3 { fill: #c297ff; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; }
  .small { fill: #9198a1; }
  .axis { stroke: #3d444d; }
  .lost { fill: #f85149; fill-opacity: 0.16; }
  .kill { stroke: #f85149; }
  .killed { fill: #f85149; }
  .token { stroke: #3fb950; }
  .pause { stroke: #f0f6fc; }
  .s0 { fill: #1f6feb; } .s1 { fill: #79c0ff; } .s2 { fill: #8957e5; } .s3 { fill: #d2a8ff; }
}
"""


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """Computation of a step on a worker, in seconds from the beginning of the picture."""

    worker: str
    step_id: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KillRun:
    """A run, in seconds from the beginning of the picture.

    `layers` has the layers of each worker, as text, before and after the loss; the killed one has none after.
    `tokens_s` are arrivals at the client of the one of `num_requests` requests that paused longest.
    `rejoin_s` is the time that the killed worker had to rejoin.
    """

    workers: tuple[str, ...]
    killed: str
    killed_s: float
    duration_s: float
    steps: tuple[WorkerStep, ...]
    tokens_s: tuple[float, ...]
    layers: dict[str, tuple[str, str]]
    num_requests: int
    rejoin_s: float

    @property
    def pause(self) -> tuple[float, float]:
        """Begin and end of the longest gap between tokens that ends after the kill.

        Raises ValueError without a token before and one after the kill.
        """
        gaps = [gap for gap in pairwise(self.tokens_s) if gap[1] > self.killed_s]
        if not gaps or self.tokens_s[0] > self.killed_s:
            raise ValueError(f"no tokens before and after the kill at {self.killed_s:.2f} s")
        return max(gaps, key=lambda gap: gap[1] - gap[0])


def draw(run: KillRun) -> str:
    """The SVG file. Raises ValueError as `KillRun.pause` does."""
    begin_s, end_s = run.pause
    rows_end = TOP + ROW * len(run.workers)
    height = rows_end + ROW + 36
    title = (
        f"kill -9 of one of {len(run.workers)} workers: {run.num_requests} running requests pause up to "
        f"{end_s - begin_s:.1f} s, none fails"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        _text(LEFT, 22, title, "head"),
        *_axis(run, rows_end + ROW),
        *(part for row, worker in enumerate(run.workers) for part in _worker(run, worker, TOP + ROW * row)),
        *_tokens(run, rows_end, begin_s, end_s),
        *_kill(run, rows_end + ROW),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _x(run: KillRun, time_s: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * time_s / run.duration_s


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>'


def _bar(begin: float, end: float, top: float, style: str) -> str:
    return f'<rect x="{begin:.2f}" y="{top + 5}" width="{end - begin:.2f}" height="{BAR}" class="{style}"/>'


def _axis(run: KillRun, bottom: float) -> Iterable[str]:
    """Ticks, counted from the kill."""
    first, last = -int(run.killed_s / TICK_S), int((run.duration_s - run.killed_s) / TICK_S)
    for tick in range(first, last + 1):
        x = _x(run, run.killed_s + tick * TICK_S)
        yield _line(x, TOP - 12, x, bottom, "axis")
        yield _text(x, bottom + 18, f"{tick * TICK_S:g} s", "small", "middle")


def _worker(run: KillRun, worker: str, top: float) -> Iterable[str]:
    before, after = run.layers[worker]
    yield _text(8, top + 22, worker)
    yield _text(LEFT + 4, top, before, "small")
    if worker == run.killed:
        x = _x(run, run.killed_s)
        yield _bar(x, WIDTH - RIGHT, top, "lost")
        text = f"killed; not back after {run.rejoin_s:g} s: the others load its layers and go on"
        yield _text(x + 10, top + 22, text, "small")
    else:
        yield _text(WIDTH - RIGHT, top, after, "small", "end")
    for step in run.steps:
        if step.worker == worker:
            style = f"s{step.step_id % NUM_COLOURS}"
            yield _bar(_x(run, step.begin_s), _x(run, step.end_s), top, style)


def _tokens(run: KillRun, top: float, begin_s: float, end_s: float) -> Iterable[str]:
    yield _text(8, top + 20, "tokens of")
    yield _text(8, top + 36, "one request")
    for token_s in run.tokens_s:
        yield _line(_x(run, token_s), top + 8, _x(run, token_s), top + 34, "token")
    begin, end = _x(run, begin_s), _x(run, end_s)
    yield _line(begin + 3, top + 21, end - 3, top + 21, "pause")
    for x in (begin + 3, end - 3):
        yield _line(x, top + 15, x, top + 27, "pause")
    yield _text((begin + end) / 2, top + 14, f"{end_s - begin_s:.2f} s", "", "middle")


def _kill(run: KillRun, bottom: float) -> Sequence[str]:
    x = _x(run, run.killed_s)
    return (
        _line(x, TOP - 16, x, bottom, "kill"),
        _text(x, TOP - 22, f"kill -9 {run.killed}", "killed", "middle"),
    )
