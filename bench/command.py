"""Command line of the figures: measures them against their own bounds, and compares with the recorded run.

    python -m bench                     all figures (`make bench`)
    python -m bench hop decode          these groups only
    python -m bench --list              list the groups
    python -m bench --quick             smoke test: few rounds and small sizes
    python -m bench --record            replace the recorded run of these groups
    python -m bench --output F.json     also write a row per figure: {name, measured, bound, ratio, target}

Exit code: 0; 1 if a figure could not be measured; with --strict also if one is worse, misses its target or is
impossible; 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path

import uvloop
from rich.console import Console

from bench.harness import recorded
from bench.harness.catalogue import GROUPS, chosen
from bench.harness.figure import Verdict
from bench.harness.group import Group, OtherEngine, Setting
from bench.harness.machine import Machine
from bench.harness.readme import with_recorded
from bench.harness.recorded import Change, Compared
from bench.harness.report import markdown, show
from bench.harness.run import GroupResult, run_groups

RESULTS = Path(__file__).parent / "results"
README = RESULTS.parent / "README.md"
RECORDED = RESULTS / "recorded.json"
LATEST = RESULTS / "latest"
RUN_FILE = "run.json"
PIPED_WIDTH = 160


def main(arguments: list[str]) -> int:
    # Read by gRPC on import, by a group's module; silences its warnings about started processes.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Its handlers of forks sometimes crash a child before exec.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    options = _parse(arguments)
    if options.list:
        for group in GROUPS:
            by_name = "" if group.is_default else ", by name only"
            print(f"{group.name:<12} {group.about} (about {group.about_s} s{by_name})")
        return 0
    if options.markdown:
        print(markdown(recorded.read(RECORDED)))
        return 0
    try:
        groups = chosen(options.groups)
    except ValueError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 2
    return _run(groups, options)


def _run(groups: list[Group], options: argparse.Namespace) -> int:
    console, progress = Console(), Console(stderr=True)
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH)
    setting = Setting(
        is_quick=options.quick,
        output_directory=LATEST if _is_rows_file(options.output) else options.output,
        cache_directory=cache_directory(),
        say=lambda text: progress.print(f"  {text}", style="dim", highlight=False),
        coordinator_arguments=tuple(shlex.split(options.coordinator)),
        other_engine=OtherEngine(vllm_python=options.vllm_python, openai_url=options.openai_url),
        against=options.against,
    )
    machine = Machine.here()
    console.print(f"{machine}\n", highlight=False)
    setting.output_directory.mkdir(parents=True, exist_ok=True)
    results = uvloop.run(run_groups(groups, setting))
    before = recorded.read(RECORDED)
    figures = [figure for result in results for figure in result.figures]
    compared = [*recorded.compare(figures, before), *recorded.gone(results, before)]
    show(results, compared, console)
    _keep(results, machine, options, setting.output_directory, console)
    if _is_rows_file(options.output):
        recorded.write(options.output, recorded.rows(figures))
        console.print(f"rows: {options.output}", highlight=False)
    return _exit_code(results, compared, is_strict=options.strict)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help="default: all")
    parser.add_argument("--list", action="store_true", help="list the groups and exit")
    parser.add_argument("--markdown", action="store_true", help="print the recorded run as a table and exit")
    parser.add_argument("--quick", action="store_true", help="few rounds, small sizes; not comparable")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="exit code 1 if a figure is worse, misses its target or is impossible",
    )
    parser.add_argument("--record", action="store_true", help="record this run for its groups")
    parser.add_argument(
        "--output",
        type=Path,
        default=LATEST,
        metavar="PATH",
        help="folder of numbers and timelines; a name that ends in .json is a file of rows instead",
    )
    _add_flags_of_groups(parser)
    options = parser.parse_args(arguments)
    if options.record and options.coordinator:
        parser.error("runs with --coordinator are not recorded")
    if options.quick and options.record:
        parser.error("--quick runs are not recorded")
    return options


def _add_flags_of_groups(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--coordinator",
        default="",
        metavar="FLAGS",
        help='further flags of the coordinator of real stages: --coordinator="--max-decode-slowdown 10"',
    )
    parser.add_argument(
        "--vllm-python", type=Path, metavar="PATH", help="peers: Python of an environment with vLLM for CPU"
    )
    parser.add_argument(
        "--openai-url", metavar="URL", help="peers: OpenAI-compatible server of the same model"
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="CHECKOUT",
        help="stage-step: another commit's checkout with .venv, measured in turns",
    )


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "stageline-bench"


def _is_rows_file(output: Path) -> bool:
    return output.suffix == ".json"


def _keep(
    results: list[GroupResult],
    machine: Machine,
    options: argparse.Namespace,
    folder: Path,
    console: Console,
) -> None:
    run = recorded.as_json(results, machine, is_quick=options.quick)
    recorded.write(folder / RUN_FILE, run)
    console.print(f"\nnumbers and timelines: {folder}", highlight=False)
    if options.record:
        recorded.write(RECORDED, recorded.merged(recorded.read(RECORDED), run))
        README.write_text(with_recorded(README.read_text(), recorded.read(RECORDED)))
        for timeline in folder.glob("*_timeline.svg"):
            shutil.copy(timeline, RESULTS)
        console.print(f"recorded in {RECORDED} and {README}", highlight=False)


def _exit_code(results: list[GroupResult], compared: list[Compared], *, is_strict: bool) -> int:
    if any(result.problem for result in results):
        return 1
    is_bad = any(change.change in (Change.WORSE, Change.GONE) for change in compared) or any(
        figure.verdict in (Verdict.MISSED, Verdict.IMPOSSIBLE)
        for result in results
        for figure in result.figures
    )
    return 1 if is_strict and is_bad else 0
