"""One random schedule: drawn from a seed and a number, run, judged."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random
from uuid import UUID

from coordinator.cluster.transitions import ClusterPhase
from tests.simulation.cluster import Cluster, Shape, simulated
from tests.simulation.customers import Customer, Habit, Visit, draw_customers, late_guest
from tests.simulation.faults import DEVICE_FAULTS, FAULTS, Fault, fail_load, kill, relieve, spoil_weights
from tests.simulation.observed import STATES, TAKEN, Transition
from tests.simulation.oracle import Listener
from tests.simulation.stage_compute import NUM_LAYERS
from tests.simulation.virtual_loop import BEGAN_S, NeverCalm
from wire.ids import RequestId

PHASES = (
    ClusterPhase.WAITING_FOR_WORKERS,
    ClusterPhase.LOADING,
    ClusterPhase.STARTING_EPOCH,
    ClusterPhase.BLOCKED,
)
PHASE_WAIT_S = 0.8
CHECKED_SHARE, POISONED_SHARE = 0.25, 0.08
"""Shares of schedules with a self-check, and with a request that crashes its workers."""
FAULTS_FROM_S, FAULTS_UNTIL_S = 0.1, 5.0
CALM_S = 60.0
"""Limit for all requests to end after the last fault."""
SETTLE_S = 1.0
ACCEPTED_WITHIN_S = 0.05
"""What waited for an epoch is in its first steps then."""
MIN_PAYLOAD_BYTES = (1, 20, 1, 1 << 20)
"""All hidden states on payload connections, some, or none."""
LEAST_EVENTS = 300
"""Messages that arrive and timers that go off; where too little has happened, more clients come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A fault at a time since the start; optionally waits a while for a phase of the cluster."""

    moment_s: float
    fault: Fault
    phase: ClusterPhase | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What happens when."""

    seed: int
    number: int
    shape: Shape
    customers: list[Customer]
    faults: list[Strike]


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
    states: Counter[str] = field(default_factory=Counter)


def draw(seed: int, number: int) -> Schedule:
    """Faults come in bursts, so that some hit a recovery."""
    random = Random(f"{seed}/{number}")
    num_stages = random.choice((3, 3, 3, 4))
    shape = Shape(
        num_stages=num_stages,
        num_workers=num_stages + random.choice((0, 0, 1, 2)),
        num_blocks=random.choice((12, 16, 24, 48)),
        is_checked=random.random() < CHECKED_SHARE,
        poisoned_layer=random.randrange(NUM_LAYERS),
        min_payload_bytes=MIN_PAYLOAD_BYTES[number % len(MIN_PAYLOAD_BYTES)],
    )
    faults: list[Strike] = []
    moment_s = random.uniform(FAULTS_FROM_S, 2.0)
    for _ in range(random.randint(2, 5)):
        phase = random.choice(PHASES) if random.random() < 0.4 else None
        faults.append(Strike(moment_s=moment_s, fault=random.choice(FAULTS), phase=phase))
        moment_s = min(FAULTS_UNTIL_S, moment_s + random.choice((0.02, 0.25, 0.6, 1.5)) * random.random())
    if shape.is_checked:
        faults[0] = replace(faults[0], fault=spoil_weights)
    customers = draw_customers(random, shape, random.randint(4, 7))
    if random.random() < POISONED_SHARE:
        customers[0] = replace(customers[0], habit=Habit.READS, is_poison=True)
        shape = replace(shape, poison=frozenset({RequestId(UUID(customers[0].request_id).bytes)}))
    return Schedule(
        seed=seed,
        number=number,
        shape=shape,
        customers=customers,
        faults=_siege(random) if random.random() < 0.15 else faults,
    )


def on_failing_devices(seed: int, number: int) -> Schedule:
    """A random schedule whose devices take several steps, and fail instead of all else."""
    schedule, random = draw(seed, number), Random(f"{seed}/{number}/devices")
    return replace(
        schedule,
        shape=replace(schedule.shape, depth=3),
        faults=[
            replace(strike, fault=random.choice(DEVICE_FAULTS), phase=None) for strike in schedule.faults
        ],
    )


def with_states(seed: int, number: int) -> Schedule:
    """A random schedule of a model with recurrent states, often fewer than there are sequences."""
    schedule, random = draw(seed, number), Random(f"{seed}/{number}/states")
    return replace(schedule, shape=replace(schedule.shape, num_states=random.choice((2, 3, 4, 6, 12))))


def _siege(random: Random) -> list[Strike]:
    """A worker cannot load, and others die before it is replaced."""
    moment_s = random.uniform(0.5, 2.5)
    strikes = [Strike(moment_s=moment_s, fault=fail_load, phase=None)]
    for _ in range(2):
        moment_s += random.uniform(0.0, 0.6)
        phase = random.choice((ClusterPhase.LOADING, ClusterPhase.STARTING_EPOCH, ClusterPhase.SERVING))
        strikes.append(Strike(moment_s=moment_s, fault=kill, phase=phase))
    return strikes


def run(schedule: Schedule, *, is_tracing: bool = False) -> Verdict:
    """The same for the same schedule, always."""
    began_s = time.process_time()
    random = Random(f"{schedule.seed}/{schedule.number}/run")
    TAKEN.clear()
    STATES.clear()
    with simulated(random):
        cluster = Cluster(schedule.shape, random)
        listener = Listener(cluster.oracle, is_tracing=is_tracing)
        root = logging.getLogger()
        root.addHandler(listener)
        level = root.level
        root.setLevel(listener.level)
        try:
            faults = Counter[str]()
            try:
                _play(cluster, schedule, random, faults, is_tracing=is_tracing)
            except NeverCalm as error:
                cluster.oracle.note(str(error))
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
        ends=Counter(customer.end.split(":")[0] for customer in schedule.customers),
        transitions=taken,
        states=Counter(STATES),
    )


def _play(
    cluster: Cluster, schedule: Schedule, random: Random, faults: Counter[str], *, is_tracing: bool
) -> None:
    """Counts in `faults` those that there were."""
    loop, customers = cluster.loop, schedule.customers
    began_s = loop.time()

    def tell(what: str) -> None:
        if is_tracing:
            print(f"{loop.time() - BEGAN_S:9.4f} ******* {what}")

    for host in cluster.hosts:
        loop.call_later(random.uniform(0, 0.3), cluster.start_worker, host)
    for customer in customers:
        cluster.clients.spawn(Visit(customer, cluster).run())
    state = cluster.coordinator.controller.state
    for strike in schedule.faults:
        loop.run_until(began_s + strike.moment_s)
        if strike.phase is not None:
            until_s = min(loop.time() + PHASE_WAIT_S, began_s + FAULTS_UNTIL_S)
            loop.run_until(until_s, is_done=lambda phase=strike.phase: state.phase is phase)
        fault = strike.fault
        while not (what := fault(cluster, random)):
            fault = random.choice(FAULTS)
        faults[fault.__name__] += 1
        tell(what)
    loop.run_until(began_s + FAULTS_UNTIL_S)
    tell("no fault lasts")
    relieve(cluster)
    while True:
        loop.run_until(loop.time() + CALM_S, is_done=lambda: all(customer.is_done for customer in customers))
        loop.run_until(loop.time() + SETTLE_S)
        if loop.num_timers >= LEAST_EVENTS:
            break
        customers.append(late_guest(random, schedule.shape, len(customers)))
        cluster.clients.spawn(Visit(customers[-1], cluster).run())
    # Workers may still be about to take their places again.
    # And a request that goes on without its client may have been accepted only now, or an idle check be under
    # way.
    engine = cluster.coordinator.engine

    def is_calm() -> bool:
        is_busy = engine.registry.live or engine.scheduler.num_steps_in_flight
        return state.phase is ClusterPhase.SERVING and not is_busy

    for _ in range(2):
        loop.run_until(loop.time() + ACCEPTED_WITHIN_S)
        loop.run_until(loop.time() + CALM_S, is_done=is_calm)
    for customer in customers:
        if not customer.is_done:
            cluster.oracle.note(f"{customer.name} ({customer.habit.name}) does not end, with {customer.got}")
    cluster.oracle.check_idle(cluster.executors())
