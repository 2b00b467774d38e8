"""`python -m tests.simulation --seconds 60 --seed 1`, and `--seed 1 --schedule 17` for one with its story."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext

from tests.simulation.campaign import Tally, campaign, examine
from tests.simulation.coverage import missing, unlisted
from tests.simulation.gateway_schedule import examine_gateways
from tests.simulation.planted import BUGS
from tests.simulation.planted_gateways import GATEWAY_BUGS

GATEWAY_SCHEDULES = 100


def main() -> int:
    arguments = _arguments()
    if arguments.gateways or arguments.bug in GATEWAY_BUGS:
        return _gateways(arguments)
    if arguments.schedule is not None:
        return _tell(arguments.seed, arguments.schedule, arguments.bug, has_states=arguments.states)
    tally = campaign(
        arguments.seed,
        num_schedules=arguments.count,
        seconds=arguments.seconds,
        num_processes=arguments.processes,
        bug=arguments.bug,
        has_states=arguments.states,
    )
    _report(tally)
    return 1 if tally.failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--count", type=int, help="maximum number of schedules")
    parser.add_argument("--processes", type=int, help="default: one per CPU")
    parser.add_argument("--schedule", type=int, help="tell the story of this one only")
    parser.add_argument("--states", action="store_true", help="schedules of a model with recurrent states")
    parser.add_argument("--gateways", action="store_true", help="schedules of gateways")
    parser.add_argument(
        "--bug", choices=sorted(BUGS | GATEWAY_BUGS), help="with this bug planted, until it is caught"
    )
    return parser.parse_args()


def _gateways(arguments: argparse.Namespace) -> int:
    """Schedules of gateways, one after another in this process."""
    is_single = arguments.schedule is not None
    numbers = [arguments.schedule] if is_single else range(arguments.count or GATEWAY_SCHEDULES)
    num_failed = 0
    with nullcontext() if arguments.bug is None else (BUGS | GATEWAY_BUGS)[arguments.bug]():
        for number in numbers:
            verdict = examine_gateways(arguments.seed, number, is_tracing=is_single)
            num_failed += bool(verdict.problems)
            if verdict.problems or is_single:
                print(f"{number}: requests: {dict(verdict.ends)}, faults: {dict(verdict.faults)}")
                print("\n".join(verdict.problems) or "all holds")
    print(f"{num_failed} of {len(numbers)} schedules failed")
    return 1 if num_failed else 0


def _tell(seed: int, number: int, bug: str | None, *, has_states: bool) -> int:
    verdict = examine(seed, number, bug, has_states=has_states, is_tracing=True)
    print(f"{verdict.num_events} events, requests: {dict(verdict.ends)}, faults: {dict(verdict.faults)}")
    print("\n".join(verdict.problems) or "all holds")
    return 1 if verdict.problems else 0


def _report(tally: Tally) -> None:
    number = max(1, tally.num_schedules)
    print(
        f"{tally.num_schedules} schedules in {tally.elapsed_s:.1f} s: {tally.per_minute:.0f} per minute, "
        f"{1000 * tally.cpu_s / number:.1f} ms of CPU each\n"
        f"per schedule {tally.num_events / number:.0f} events (least {tally.least_events}), "
        f"{tally.num_faults / number:.1f} faults, {sum(tally.ends.values()) / number:.1f} requests"
    )
    print("requests ended:", _listed(tally.ends))
    print("faults:", _listed(tally.faults))
    if tally.states:
        print("recurrent states:", _listed(tally.states))
    print("transitions:")
    for (before, event, after), times in sorted(tally.transitions.items()):
        print(f"  {before:20} {event:13} {after:20} {times}")
    for transition in missing(tally.transitions):
        print("  never taken:", *transition)
    for transition in unlisted(tally.transitions):
        print("  not in the table:", *transition)
    for verdict in tally.failed[:10]:
        print(f"FAILED --seed {verdict.seed} --schedule {verdict.number}:", *verdict.problems[:5], sep="\n  ")
    print(f"{len(tally.failed)} schedules failed")


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {times}" for name, times in sorted(counts.items(), key=lambda count: -count[1]))


if __name__ == "__main__":
    sys.exit(main())
