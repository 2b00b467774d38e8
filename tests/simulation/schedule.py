"""One random schedule: drawn from a seed and a number, run, judged."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from tests.simulation.cluster import Cluster, Shape, simulated
from tests.simulation.customers import Customer, Visit, draw_customers
from tests.simulation.faults import FAULTS, Fault, relieve
from tests.simulation.observed import TAKEN, Transition
from tests.simulation.oracle import Listener
from tests.simulation.virtual_loop import BEGAN_S

FAULTS_FROM_S, FAULTS_UNTIL_S = 0.1, 5.0
CALM_S = 60.0
"""When no fault lasts any more, every request must end within so long."""
SETTLE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What happens when."""

    seed: int
    number: int
    shape: Shape
    customers: list[Customer]
    faults: list[tuple[float, Fault]]


@dataclass(slots=True)
class Verdict:
    """What has come of a schedule."""

    seed: int
    number: int
    problems: list[str] = field(default_factory=list)
    num_events: int = 0
    cpu_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    transitions: Counter[Transition] = field(default_factory=Counter)


def draw(seed: int, number: int) -> Schedule:
    """Faults come in bursts, so that some hit a recovery."""
    random = Random(f"{seed}/{number}")
    num_stages = random.choice((3, 3, 3, 4))
    shape = Shape(
        num_stages=num_stages,
        num_workers=num_stages + random.choice((0, 0, 1, 2)),
        num_blocks=random.choice((12, 16, 24, 48)),
    )
    faults: list[tuple[float, Fault]] = []
    moment_s = random.uniform(FAULTS_FROM_S, 2.0)
    for _ in range(random.randint(2, 5)):
        faults.append((moment_s, random.choice(FAULTS)))
        moment_s = min(FAULTS_UNTIL_S, moment_s + random.choice((0.02, 0.25, 0.6, 1.5)) * random.random())
    return Schedule(
        seed=seed,
        number=number,
        shape=shape,
        customers=draw_customers(random, shape, random.randint(4, 8)),
        faults=faults,
    )


def run(schedule: Schedule, *, is_tracing: bool = False) -> Verdict:
    """The same for the same schedule, always."""
    began_s = time.process_time()
    random = Random(f"{schedule.seed}/{schedule.number}/run")
    TAKEN.clear()
    with simulated(random):
        cluster = Cluster(schedule.shape, random)
        listener = Listener(cluster.oracle, is_tracing=is_tracing)
        root = logging.getLogger()
        root.addHandler(listener)
        level = root.level
        root.setLevel(listener.level)
        try:
            faults = _play(cluster, schedule, random, is_tracing=is_tracing)
            taken, num_events = Counter(TAKEN), cluster.loop.num_timers
        finally:
            cluster.close()
            root.removeHandler(listener)
            root.setLevel(level)
    return Verdict(
        seed=schedule.seed,
        number=schedule.number,
        problems=cluster.oracle.problems + cluster.loop.problems,
        num_events=num_events,
        cpu_s=time.process_time() - began_s,
        faults=faults,
        ends=Counter(each.end.split(":")[0] for each in schedule.customers),
        transitions=taken,
    )


def _play(cluster: Cluster, schedule: Schedule, random: Random, *, is_tracing: bool) -> Counter[str]:
    """The faults that there were."""
    loop, customers = cluster.loop, schedule.customers
    faults: Counter[str] = Counter()
    began_s = loop.time()

    def tell(what: str) -> None:
        if is_tracing:
            print(f"{loop.time() - BEGAN_S:9.4f} ******* {what}")

    for host in cluster.hosts:
        loop.call_later(random.uniform(0, 0.3), cluster.start_worker, host)
    for each in customers:
        cluster.clients.spawn(Visit(each, cluster).run())
    for moment_s, fault in schedule.faults:
        loop.run_until(began_s + moment_s)
        while not (what := fault(cluster, random)):
            fault = random.choice(FAULTS)
        faults[fault.__name__] += 1
        tell(what)
    loop.run_until(began_s + FAULTS_UNTIL_S)
    tell("no fault lasts")
    relieve(cluster)
    loop.run_until(loop.time() + CALM_S, is_done=lambda: all(each.is_done for each in customers))
    loop.run_until(loop.time() + SETTLE_S)
    for each in customers:
        if not each.is_done:
            cluster.oracle.note(f"{each.name} ({each.habit.name}) waits for ever, with {each.got}")
    cluster.oracle.check_idle(cluster.executors())
    return faults
