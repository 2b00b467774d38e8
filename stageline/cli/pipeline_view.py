"""The last seconds of the pipeline in characters: a row for each stage, a column for a slice of time."""

from collections.abc import Sequence

from rich.text import Text

from stageline_rpc.v1 import telemetry_pb2

WINDOW_US = 3_000_000
_SHADES = "·░▒▓█"
"""By the share of a column's time in which the stage computes; nothing of it is a bubble."""
_LABEL = 7
_MOST_COLUMNS = 150


def pipeline_rows(activity: telemetry_pb2.GetActivityResponse, *, width: int) -> list[Text]:
    """A heading, and a row for each stage; none where no step was answered lately.

    What is shown ends where everything is known: with the last answer, while steps are in flight.
    """
    num_stages = len(activity.stages)
    if not num_stages or not activity.steps:
        return []
    columns = max(10, min(_MOST_COLUMNS, width - _LABEL))
    end_us = max(step.answered_us for step in activity.steps) if activity.in_flight else activity.now_us
    begin_us = end_us - WINDOW_US
    title = f"Last {WINDOW_US // 1_000_000} s, {WINDOW_US / columns / 1000:.0f} ms a column: "
    rows = [Text.assemble(title, ("█", "blue"), " decode ", ("█", "yellow"), " prefill  · bubble")]
    for stage in range(num_stages):
        busy = [0.0] * columns
        chunks = [0.0] * columns
        for step in activity.steps:
            if 2 * stage + 1 >= len(step.computed_us):
                continue
            begin, end = (
                (step.sent_us + offset_us - begin_us) / WINDOW_US * columns
                for offset_us in step.computed_us[2 * stage : 2 * stage + 2]
            )
            is_chunk = step.kind != telemetry_pb2.STEP_KIND_DECODE
            _add(busy, begin, end)
            if is_chunk:
                _add(chunks, begin, end)
        rows.append(_row(stage, busy, chunks))
    return rows


def _add(columns: list[float], begin: float, end: float) -> None:
    """To each column the share of it that [begin, end) covers."""
    for column in range(max(0, int(begin)), min(len(columns), int(end) + 1)):
        columns[column] += max(0.0, min(end, column + 1) - max(begin, column))


def _row(stage: int, busy: Sequence[float], chunks: Sequence[float]) -> Text:
    row = Text(f"{stage:>4}   ")
    for share, chunk in zip(busy, chunks, strict=True):
        level = 0 if share < 0.01 else 1 + min(3, int(share * 4))
        style = "dim" if level == 0 else "yellow" if chunk > share / 2 else "blue"
        row.append(_SHADES[level], style=style)
    return row
