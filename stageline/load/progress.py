"""How far a load is, while it runs, on standard error and only on a terminal."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from stageline.load.record import Tally

_INTERVAL_S = 0.25


@asynccontextmanager
async def shown_progress(tally: Tally, num_planned: int) -> AsyncIterator[None]:
    """Shows the tally as it grows, until the block ends."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with _progress(console) as progress:
        bar = progress.add_task("", total=num_planned, told="")
        showing = asyncio.create_task(_show(progress, bar, tally), name="progress")
        try:
            yield
        finally:
            showing.cancel()
            await asyncio.wait([showing])


def _progress(console: Console) -> Progress:
    columns = (
        MofNCompleteColumn(),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.fields[told]}"),
    )
    # Drawn by the event loop: a thread of its own would hold up the clock of what arrives.
    return Progress(*columns, console=console, auto_refresh=False, transient=True)


async def _show(progress: Progress, bar: TaskID, tally: Tally) -> None:
    before = 0
    while True:
        await asyncio.sleep(_INTERVAL_S)
        tokens_per_s = (tally.output_tokens - before) / _INTERVAL_S
        before = tally.output_tokens
        progress.update(
            bar,
            completed=tally.num_completed + tally.num_failed,
            told=f"{tally.num_running} running, {tally.num_failed} failed, {tokens_per_s:.0f} tokens/s",
            refresh=True,
        )
