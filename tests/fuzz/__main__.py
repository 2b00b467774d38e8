"""`python -m tests.fuzz --seed N --cases N [--surface NAME ...]`: fuzz each surface in a process of its own.

Exits with 1 if a case ended in anything but success or a typed error, hung, ended the process, or if memory
grew. `--case N` runs one case again, with its traceback; `--keep` stores it in the corpus.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tests.fuzz.harness import CORPUS, shares
from tests.fuzz.processes import run_surface
from tests.fuzz.surfaces import SURFACES

DEFAULT_CASES = 100_000
LEAST_CASES = 2_000


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    names = options.surface or list(SURFACES)
    if options.case is not None:
        return _run_again(names[0], options.seed, options.case, keep=options.keep)
    numbers = shares([SURFACES[name] for name in names], options.cases)
    tallies = [run_surface(name, options.seed, numbers[name]) for name in names]
    findings = [finding for tally in tallies for finding in tally.findings]
    for finding in findings:
        print(f"\n{finding.line()}\n{finding.problem}")
    num_cases = sum(tally.num_cases for tally in tallies)
    print(f"seed {options.seed}: {num_cases} cases of {len(names)} surfaces, {len(findings)} findings")
    return 1 if findings else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--cases", type=int, default=DEFAULT_CASES)
    parser.add_argument("--surface", action="append", choices=SURFACES)
    parser.add_argument("--case", type=int)
    parser.add_argument("--keep", action="store_true")
    return parser


def _run_again(name: str, seed: int, number: int, *, keep: bool) -> int:
    surface = SURFACES[name]
    data = surface.case(seed, number)
    print(repr(data[:4000]))
    if keep:
        path = CORPUS / name / f"{seed}-{number}.case"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    with surface.opened() as opened:
        print(opened.examine(data))
        opened.check()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
