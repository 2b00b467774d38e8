"""`python -m tests.chaos --seconds 600 --seed 1`: random faults on a cluster of this machine under load."""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import random
import socket
import sys
from collections.abc import Callable

from tests.chaos.disturbances import DISTURBANCES
from tests.chaos.run import ChaosConfig, run_chaos
from tests.chaos.storm import StormConfig, run_storm
from tests.temporary import INTERRUPTED, LOGS_HELP, end_in_order, unused_directory
from wire.tensors import HopRoute


def main() -> int:
    """0 when every token was right, nothing was stuck and nothing was left behind; else 1. A storm must also
    keep its pauses within the limits.
    """
    given = _parse()
    end_in_order()
    seed = random.randrange(10**6) if given.seed is None else given.seed
    # Logs of the proxies, which expect these errors.
    logging.disable(logging.ERROR)
    say = functools.partial(print, flush=True)
    say(f"seed {seed}")
    try:
        return _run_storm(given, seed, say) if given.storm else _run_chaos(given, seed, say)
    except KeyboardInterrupt:
        return INTERRUPTED


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long to disturb the cluster")
    parser.add_argument("--seed", type=int, default=None, help="what is done to whom; random unless given")
    parser.add_argument("--real", action="store_true", help="stages that compute, in the place of mock ones")
    parser.add_argument("--recurrent", action="store_true", help="stages that compute with recurrent states")
    parser.add_argument("--no-journal", action="store_true", help="requests end with their coordinator")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="only what has this in its name"
    )
    parser.add_argument(
        "--storm", action="store_true", help="faults that wait for no recovery, half of them kill -9"
    )
    parser.add_argument(
        "--kill-coordinator", action="store_true", help="with --storm: the coordinator is killed, too"
    )
    parser.add_argument(
        "--hidden-states",
        default=HopRoute.AUTO.value,
        choices=[route.value for route in HopRoute],
        help="ways of hidden states between stages",
    )
    parser.add_argument("--logs", type=unused_directory, metavar="DIR", help=LOGS_HELP)
    given = parser.parse_args()
    if not all(any(text in disturbance.name for disturbance in DISTURBANCES) for text in given.only):
        parser.error(f"there are only {', '.join(disturbance.name for disturbance in DISTURBANCES)}")
    if given.real and given.recurrent:
        parser.error("--real and --recurrent are two models: choose one")
    if given.storm and (given.only or given.no_journal or given.recurrent):
        parser.error("--only, --no-journal and --recurrent are not for --storm")
    if given.kill_coordinator and not given.storm:
        parser.error("--kill-coordinator is for --storm; chaos kills the coordinator anyway")
    return given


def _run_storm(given: argparse.Namespace, seed: int, say: Callable[[str], None]) -> int:
    storm = StormConfig(
        seconds=given.seconds,
        seed=seed,
        is_real=given.real,
        kills_coordinator=given.kill_coordinator,
        hidden_states=HopRoute(given.hidden_states),
        logs=given.logs,
        say=say,
    )
    report = asyncio.run(run_storm(storm, _free_address()))
    say("\n".join(report.lines()))
    return 0 if report.is_right and report.is_fast else 1


def _run_chaos(given: argparse.Namespace, seed: int, say: Callable[[str], None]) -> int:
    config = ChaosConfig(
        seconds=given.seconds,
        seed=seed,
        is_real=given.real,
        is_recurrent=given.recurrent,
        has_journal=not given.no_journal,
        hidden_states=HopRoute(given.hidden_states),
        names=tuple(given.only),
        logs=given.logs,
        say=say,
    )
    report = asyncio.run(run_chaos(config, _free_address()))
    say("\n".join(report.lines()))
    return 1 if report.problems else 0


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


if __name__ == "__main__":
    sys.exit(main())
