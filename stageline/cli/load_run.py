"""Runs a load from its command line: progress, tables, files and exit code."""

import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import uvloop
from rich.console import Console

from stageline.cli import options
from stageline.cli.failures import FAILURE, INTERRUPTED, CommandFailed, report
from stageline.load.driver import Driver
from stageline.load.json_report import json_report
from stageline.load.metrics import summarize
from stageline.load.plan import PlannedRequest, make_plan
from stageline.load.plot import check_plot, save_plot
from stageline.load.progress import shown_progress
from stageline.load.record import LoadRun
from stageline.load.report import report_view, warnings_of
from stageline.load.session import LoadConfig, WarmupFailed, prepared
from stageline_rpc.v1 import inference_pb2
from wire.reasons import reason_of


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputFiles:
    """Where to write what was measured, if anywhere. Raises ValueError for where that cannot be."""

    json: Path | None
    plot: Path | None

    def __post_init__(self) -> None:
        for path in (self.json, self.plot):
            if path is not None and (path.is_dir() or not path.parent.is_dir()):
                raise ValueError(f"cannot write {str(path)!r}: it is a directory, or in none")
        if self.plot is not None:
            check_plot(self.plot)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    config: LoadConfig
    model: inference_pb2.GetModelResponse
    started_at: str
    run: LoadRun


def run_load(config: LoadConfig, files: OutputFiles) -> int:
    """Returns the exit code: 0, 1 when requests have failed, 130 when Ctrl-C has ended it before its time."""
    plan = options.build_config(lambda: make_plan(config.spec))
    measured = uvloop.run(_measure(config, plan))
    _tell(measured, files)
    if measured.run.is_interrupted:
        return INTERRUPTED
    return FAILURE if any(record.has_failed for record in measured.run.records) else 0


async def _measure(config: LoadConfig, plan: tuple[PlannedRequest, ...]) -> _Measured:
    async with prepared(config) as load:
        options.build_config(lambda: load.check_fits(plan))
        try:
            await load.warm_up()
        except WarmupFailed as error:
            raise CommandFailed(str(error), reason=reason_of(error)) from None
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        driver = load.driver()
        with _interrupted_by_ctrl_c(driver):
            async with shown_progress(driver.tally, len(plan)):
                run = await driver.run(plan)
        return _Measured(config=config, model=load.model, started_at=started_at, run=run)


@contextmanager
def _interrupted_by_ctrl_c(driver: Driver) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, driver.interrupt)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _tell(measured: _Measured, files: OutputFiles) -> None:
    config, run = measured.config, measured.run
    summary = summarize(run, config.limits)
    Console(highlight=False).print(report_view(summary, config.limits))
    for warning in warnings_of(summary):
        print(f"stageline: warning: {warning}", file=sys.stderr)
    for reason, error in _first_errors(run).items():
        report(error, reason=reason)
    if files.json is not None:
        text = json_report(config, measured.model, run, summary, started_at=measured.started_at)
        files.json.write_text(text, encoding="utf-8")
    if files.plot is not None:
        save_plot(
            run, f"{measured.model.name}: {summary.output_tokens_per_s:.0f} output tokens/s", files.plot
        )


def _first_errors(run: LoadRun) -> dict[str, str]:
    """The first error of each status."""
    errors: dict[str, str] = {}
    for record in run.records:
        if record.has_failed:
            errors.setdefault(record.status, f"request {record.planned.index}: {record.error}")
    return errors
