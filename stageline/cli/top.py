"""`stageline top`: what the pipeline does, live."""

import asyncio
import contextlib
import os
import sys
import termios
from collections.abc import AsyncIterator
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from stageline.cli import options
from stageline.cli.top_view import Frame, top_view
from stageline.client import Client
from stageline.errors import StagelineError, Unavailable

_QUIT_KEYS = frozenset(b"qQ\x1b\x03")


def top(
    once: Annotated[
        bool, typer.Option("--once", help="Show it once and exit, as where the output is no terminal.")
    ] = False,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=60, help="How often to show it anew.")
    ] = 1.0,
    coordinator: options.Coordinator = options.DEFAULT_ADDRESS,
) -> int:
    """Show stages, their load, the pipeline and the requests, live; q ends it."""
    console = Console()
    watches = console.is_terminal and not once
    asyncio.run(_watch(coordinator, console, interval) if watches else _show_once(coordinator, console))
    return 0


async def _read(client: Client) -> Frame:
    status, activity = await asyncio.gather(client.status(), client.activity())
    return Frame(status, activity)


async def _show_once(coordinator: str, console: Console) -> None:
    async with Client(coordinator) as client:
        console.print(top_view(await _read(client), width=console.width))


async def _watch(coordinator: str, console: Console, interval_s: float) -> None:
    """Until a key asks to end; Ctrl-C does, too. A coordinator that does not answer is waited for."""
    async with Client(coordinator, connect_timeout_s=max(1.0, interval_s)) as client:
        frame = await _read(client)
        async with _key_pressed() as pressed:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while not pressed.is_set():
                    view = top_view(frame, width=console.width, height=console.height)
                    live.update(view, refresh=True)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(pressed.wait(), interval_s)
                    try:
                        frame = await _read(client)
                    except Unavailable as error:
                        live.update(Text(f"{error}; asking again (q ends)"), refresh=True)
                        continue
                    except StagelineError:
                        if pressed.is_set():
                            break
                        raise


@contextlib.asynccontextmanager
async def _key_pressed() -> AsyncIterator[asyncio.Event]:
    """Set when a key asks to end; keys are not shown meanwhile."""
    pressed = asyncio.Event()
    if not sys.stdin.isatty():
        yield pressed
        return
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    silent = termios.tcgetattr(descriptor)
    silent[3] &= ~(termios.ICANON | termios.ECHO)

    def read() -> None:
        keys = os.read(descriptor, 64)
        if not keys or _QUIT_KEYS & set(keys[:1]):
            pressed.set()

    termios.tcsetattr(descriptor, termios.TCSADRAIN, silent)
    loop.add_reader(descriptor, read)
    try:
        yield pressed
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
