"""`stageline bench serve`: drives a running cluster with a load, and shows how it was served."""

from pathlib import Path
from typing import Annotated, Any

import typer

from stageline.cli import options
from stageline.cli.flags import takes
from stageline.cli.load_flags import ArrivalFlags, LimitFlags, ShapeFlags

bench = typer.Typer()


@bench.callback()
def _bench() -> None:
    """Measure a running cluster."""


@takes(ArrivalFlags, ShapeFlags, LimitFlags)
def serve(
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all numbers, and a record of each request.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg|png", help="Draw latencies, and tokens and concurrency over time."),
    ] = None,
    coordinator: options.Coordinator = options.DEFAULT_ADDRESS,
    **flags: Any,
) -> int:
    """Send requests when they are due, however slow the answers are; show throughput and latencies.

    The load is open-loop: latencies count from when a request was due, also where it had to wait to be sent.
    """
    # Imported late: numpy takes a while.
    from stageline.cli.load_options import load_config
    from stageline.cli.load_run import OutputFiles, run_load

    config = options.build_config(lambda: load_config(coordinator, flags))
    files = options.build_config(lambda: OutputFiles(json=json, plot=plot))
    return run_load(config, files)


bench.command("serve")(serve)
