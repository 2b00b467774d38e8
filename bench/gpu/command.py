"""Measures a GPU in minutes: rates of the hardware, steps of a stage against them, a cluster, failures.

    python -m bench gpu --minutes 9 --out DIR             all phases; DIR/results.json grows with each
    python -m bench gpu --out DIR --only decode prompts   these phases, and those that they need
    python -m bench gpu --out DIR --device cpu --quick    smoke test without a GPU, tiny shapes
    python -m bench gpu --out DIR --record                keep the run in bench/results/gpu, by device

Exit code: 0; 1 if a phase failed, was cut off or skipped; 2 for a wrong command line. Figures that a device
cannot have, and those that the time was too short for, are "not measured", with the reason.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import tempfile
from pathlib import Path

from bench.gpu import facts, results
from bench.gpu.run import PHASES, REPOSITORY, Found, Phase, RunSettings, chosen, run_phases

RECORDED = REPOSITORY / "bench" / "results" / "gpu"
README = REPOSITORY / "bench" / "README.md"
UNKNOWN_DEVICE = "unknown device"


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    try:
        phases = chosen(options.only)
    except ValueError as error:
        print(f"bench gpu: error: {error}")
        return 2
    missing = _missing()
    options.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="stageline-bench-gpu-", dir=options.work)).absolute()
    try:
        return _run(phases, options, work, missing)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench gpu",
        description=__doc__,
        epilog="phases: " + "; ".join(f"{phase.name}: {phase.about}" for phase in PHASES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="results.json and logs")
    parser.add_argument("--minutes", type=float, default=9.0, help="time of all phases (default: 9)")
    parser.add_argument("--device", default="cuda:0", help="cuda:N or cpu (default: cuda:0)")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, as a smoke test")
    parser.add_argument("--only", nargs="+", default=[], metavar="PHASE", help="phases (default: all)")
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="folder for a checkpoint of 10 GB (default: temporary)"
    )
    parser.add_argument("--record", action="store_true", help="keep the run, and update bench/README.md")
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error(f"--minutes is {options.minutes:g}, must be above 0")
    if options.record and (options.quick or options.device == "cpu" or options.only):
        parser.error("only complete runs on a GPU are recorded: no --quick, --only or --device cpu")
    if options.device == "cpu" and not options.quick:
        parser.error("a CPU computes no full shapes: add --quick")
    return options


def _missing() -> list[str]:
    """Print and return what this environment lacks; phases that need it will fail with its name."""
    missing = facts.missing_packages()
    if missing:
        print(f"missing or too old packages: {', '.join(missing)}\n{facts.BRING}")
    if (compiler := facts.missing_compiler()) is not None:
        print(compiler)
        missing.append("C compiler")
    return missing


def _run(phases: list[Phase], options: argparse.Namespace, work: Path, missing: list[str]) -> int:
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    file = options.out / results.FILE
    found = Found(device="cpu" if options.device == "cpu" else UNKNOWN_DEVICE, versions=facts.versions())

    def run_so_far() -> dict[str, object]:
        return results.as_json(
            found, minutes=options.minutes, is_quick=options.quick, missing=missing, started=started
        )

    settings = RunSettings(
        device=options.device, is_quick=options.quick, minutes=options.minutes, output=options.out, work=work
    )
    run_phases(
        phases,
        settings,
        found,
        after_each=lambda _: results.write(file, run_so_far()),
        say=lambda text: print(text, flush=True),
    )
    run = run_so_far()
    if options.record:
        _record(run)
    print(f"\n{results.table(run)}\n\nresults: {file}")
    return 1 if found.has_failed else 0


def _record(run: dict[str, object]) -> None:
    RECORDED.mkdir(parents=True, exist_ok=True)
    results.write(RECORDED / results.file_name(str(run["device"])), run)
    README.write_text(results.with_runs(README.read_text(), results.recorded(RECORDED)))
