"""Draws a timeline: one row per stage, one colour per step, and what is white is idle. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from bench.harness.timeline import Bar, Timeline

WIDTH, LEFT, RIGHT, TOP = 1200, 90, 70, 46
ROW, GAP = 22, 6
NUM_COLOURS = 12
"""Neighbouring steps, and steps that are in flight together, differ in colour; then they come again."""

_TEXT = 'font-family="sans-serif" font-size="12" fill="#222"'


def draw(timeline: Timeline, title: str) -> str:
    """The SVG document."""
    height = TOP + timeline.num_stages * (ROW + GAP) + 40
    scale = (WIDTH - LEFT - RIGHT) / timeline.duration_s
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="20" {_TEXT} font-weight="bold">{escape(title)}</text>',
        f'<text x="{LEFT}" y="36" {_TEXT}>one colour per step, white is idle; '
        f"travel of a step over all hops {timeline.travel_s * 1e3:.2f} ms</text>",
        *_rows(timeline),
        *(_bar(bar, scale) for bar in timeline.bars),
        *_axis(timeline, scale),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _row_top(stage: int) -> int:
    return TOP + stage * (ROW + GAP)


def _rows(timeline: Timeline) -> Iterator[str]:
    for stage, busy in enumerate(timeline.busy):
        middle = _row_top(stage) + ROW * 0.7
        yield (
            f'<rect x="{LEFT}" y="{_row_top(stage)}" width="{WIDTH - LEFT - RIGHT}" height="{ROW}" '
            'fill="#fff" stroke="#bbb" stroke-width="0.5"/>'
        )
        yield f'<text x="8" y="{middle:.0f}" {_TEXT}>stage {stage}</text>'
        yield f'<text x="{WIDTH - RIGHT + 6}" y="{middle:.0f}" {_TEXT}>{busy:.1%}</text>'


def _bar(bar: Bar, scale: float) -> str:
    # Steps of the golden angle keep neighbours far apart on the colour wheel.
    hue = bar.step_id % NUM_COLOURS * 137.5 % 360
    left, width = LEFT + bar.begin_s * scale, (bar.end_s - bar.begin_s) * scale
    tokens = "1 token" if bar.num_tokens == 1 else f"{bar.num_tokens} tokens"
    spent_ms = (bar.end_s - bar.begin_s) * 1e3
    return (
        f'<rect x="{left:.2f}" y="{_row_top(bar.stage)}" width="{width:.2f}" height="{ROW}" '
        f'fill="hsl({hue:.0f},62%,58%)">'
        f"<title>step {bar.step_id}, stage {bar.stage}: {tokens}, {spent_ms:.2f} ms</title></rect>"
    )


def _axis(timeline: Timeline, scale: float) -> Iterator[str]:
    bottom = _row_top(timeline.num_stages) + 12
    for tick in range(11):
        at_s = timeline.duration_s * tick / 10
        yield (
            f'<text x="{LEFT + at_s * scale:.0f}" y="{bottom}" {_TEXT} text-anchor="middle">'
            f"{at_s * 1e3:.0f} ms</text>"
        )
