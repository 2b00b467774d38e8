"""`stageline bench serve`: a load on a running cluster."""

import asyncio
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypedDict

import typer
import uvloop
from rich.console import Console

from stageline.cli import options
from stageline.cli.options import CommandFailed, report, takes
from stageline.load.driver import Driver, LoadConfig, WarmupFailed, prepared
from stageline.load.plan import Arrivals, LoadSpec, PlannedRequest, make_plan, parse_lengths
from stageline.load.report import check_plot, json_report, report_view, save_plot, shown_progress, warnings_of
from stageline.load.results import Limits, LoadRun, summarize
from stageline_rpc.v1 import inference_pb2
from wire.addresses import DEFAULT_ADDRESS
from wire.errors import reason_of
from wire.exit_codes import ExitCode

DEFAULT_RATE_PER_S = 4.0
DEFAULT_NUM_REQUESTS = 100
DEFAULT_PROMPT_TOKENS = "128"
DEFAULT_OUTPUT_TOKENS = "64"
DEFAULT_TIMEOUT_S = 600.0

_LENGTHS = "N, uniform:A-B, normal:MEAN,SD or lognormal:MEAN,SD; :A-B after the last two bounds them"

_load = partial(typer.Option, rich_help_panel="Arrivals")
_shape = partial(typer.Option, rich_help_panel="Requests")
_slo = partial(typer.Option, metavar="MS", rich_help_panel="Latency limits for goodput")


class ArrivalFlags(TypedDict, total=False):
    """Arrivals of requests."""

    request_rate: Annotated[
        float | None,
        _load(
            metavar="R",
            help=f"Requests per second; inf sends all at once (default: {DEFAULT_RATE_PER_S:g}).",
        ),
    ]
    num_requests: Annotated[
        int | None,
        _load(
            metavar="N",
            min=1,
            help=f"Number of requests (default: {DEFAULT_NUM_REQUESTS}, none with --duration).",
        ),
    ]
    duration: Annotated[
        float | None, _load(metavar="SECONDS", help="Duration of arrivals, instead of --num-requests.")
    ]
    burstiness: Annotated[
        float | None,
        _load(
            metavar="X",
            help="Shape of gamma-distributed arrivals; lower values are burstier (default: 1, Poisson).",
        ),
    ]
    max_concurrency: Annotated[
        int | None,
        _load(
            metavar="N",
            min=1,
            help="Maximum concurrent requests; the wait of others counts as latency (default: unlimited).",
        ),
    ]
    seed: Annotated[
        int | None,
        _load(
            metavar="N",
            min=0,
            max=2**64 - 1,
            help="Random seed of lengths, tokens and arrival times (default: 0).",
        ),
    ]
    warmup: Annotated[
        int | None,
        _load(metavar="N", min=0, help="Requests sent before the measurement, all at once (default: 0)."),
    ]


class ShapeFlags(TypedDict, total=False):
    """Shape of a request."""

    prompt_tokens: Annotated[
        str | None,
        _shape(
            metavar="LENGTHS", help=f"Random prompt lengths: {_LENGTHS} (default: {DEFAULT_PROMPT_TOKENS})."
        ),
    ]
    output_tokens: Annotated[
        str | None,
        _shape(
            metavar="LENGTHS",
            help=f"Exact output lengths, as for --prompt-tokens (default: {DEFAULT_OUTPUT_TOKENS}).",
        ),
    ]
    shared_prefix: Annotated[
        int | None,
        _shape(metavar="N", min=0, help="Tokens before each prompt that its group shares (default: 0)."),
    ]
    prefix_groups: Annotated[
        int | None,
        _shape(metavar="K", min=1, help="Groups of requests with the same prefix (default: 1)."),
    ]
    temperature: Annotated[
        float | None,
        _shape(metavar="T", help="Sampling temperature; 0 takes the likeliest token (default: 0)."),
    ]
    timeout: Annotated[
        float | None,
        _shape(
            metavar="SECONDS",
            help=f"Maximum time from sending a request to its end (default: {DEFAULT_TIMEOUT_S:g}s).",
        ),
    ]


class LimitFlags(TypedDict, total=False):
    """Limits of a good request, in milliseconds."""

    slo_ttft: Annotated[float | None, _slo(help="Maximum time to the first token, from the due time.")]
    slo_itl: Annotated[float | None, _slo(help="Maximum gap between two messages of a request.")]
    slo_tpot: Annotated[float | None, _slo(help="Maximum mean time per output token after the first.")]
    slo_e2e: Annotated[float | None, _slo(help="Maximum time to the last token, from the due time.")]


def load_config(coordinator: str, flags: Mapping[str, Any], tls_dir: Path | None = None) -> LoadConfig:
    """Build the config from `flags`; None means the default. Raises ValueError."""
    given = {name: value for name, value in flags.items() if value is not None}
    return LoadConfig(
        coordinator=coordinator,
        tls_dir=tls_dir,
        spec=_spec(given),
        limits=_limits(given),
        max_concurrency=given.get("max_concurrency"),
        num_warmups=given.get("warmup", 0),
        temperature=given.get("temperature", 0.0),
        timeout_s=given.get("timeout", DEFAULT_TIMEOUT_S),
    )


def _spec(given: Mapping[str, Any]) -> LoadSpec:
    if "num_requests" in given and "duration" in given:
        raise ValueError("--num-requests and --duration exclude each other")
    return LoadSpec(
        arrivals=Arrivals(
            rate_per_s=given.get("request_rate", DEFAULT_RATE_PER_S),
            burstiness=given.get("burstiness", 1.0),
        ),
        num_requests=(None if "duration" in given else given.get("num_requests", DEFAULT_NUM_REQUESTS)),
        duration_s=given.get("duration"),
        prompt_lengths=parse_lengths(given.get("prompt_tokens", DEFAULT_PROMPT_TOKENS)),
        output_lengths=parse_lengths(given.get("output_tokens", DEFAULT_OUTPUT_TOKENS)),
        shared_prefix_tokens=given.get("shared_prefix", 0),
        num_prefix_groups=given.get("prefix_groups", 1),
        seed=given.get("seed", 0),
    )


def _limits(given: Mapping[str, Any]) -> Limits:
    limits_s = {name: given[name] / 1e3 for name in LimitFlags.__annotations__ if name in given}
    return Limits(
        ttft_s=limits_s.get("slo_ttft"),
        itl_s=limits_s.get("slo_itl"),
        tpot_s=limits_s.get("slo_tpot"),
        e2e_s=limits_s.get("slo_e2e"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputFiles:
    """Output paths. Raises ValueError for a path that cannot be written."""

    json: Path | None
    plot: Path | None

    def __post_init__(self) -> None:
        for path in (self.json, self.plot):
            if path is not None and (path.is_dir() or not path.parent.is_dir()):
                raise ValueError(
                    f"cannot write {str(path)!r}: it is a directory, or its directory does not exist"
                )
        if self.plot is not None:
            check_plot(self.plot)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    config: LoadConfig
    model: inference_pb2.GetModelResponse
    started_at: str
    run: LoadRun


def run_load(config: LoadConfig, files: OutputFiles) -> int:
    """Return the exit code, which is FAILED if requests failed."""
    plan = options.build_config(lambda: make_plan(config.spec))
    measured = uvloop.run(_measure(config, plan))
    _tell(measured, files)
    if measured.run.is_interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.FAILED if any(record.has_failed for record in measured.run.records) else ExitCode.DONE


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
    """The first error of each reason code."""
    errors: dict[str, str] = {}
    for record in run.records:
        if record.has_failed:
            errors.setdefault(record.reason, f"request {record.planned.index}: {record.error}")
    return errors


bench = typer.Typer()


@bench.callback()
def _bench() -> None:
    """Measure a running cluster."""


@takes(ArrivalFlags, ShapeFlags, LimitFlags)
def serve(
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for all results, with a record of each request.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.svg|png",
            help="File for plots of latencies, and of tokens and concurrency over time.",
        ),
    ] = None,
    coordinator: options.Coordinator = DEFAULT_ADDRESS,
    tls_dir: options.TlsDirectory = None,
    **flags: Any,
) -> int:
    """Send requests at their due times, regardless of responses; show throughput and latencies.

    The load is open-loop: latencies count from the due time, even if the request had to wait to be sent.
    """
    config = options.build_config(lambda: load_config(coordinator, flags, tls_dir))
    files = options.build_config(lambda: OutputFiles(json=json, plot=plot))
    return run_load(config, files)


bench.command("serve")(serve)
