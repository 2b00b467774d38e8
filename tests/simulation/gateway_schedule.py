"""One random schedule of gateways: drawn from a seed and a number, run, judged."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from coordinator.cluster.transitions import ClusterPhase
from tests.simulation import faults
from tests.simulation.cluster import Cluster, Shape, simulated
from tests.simulation.gateway_customers import (
    GatewayCustomer,
    GatewayVisit,
    Habit,
    draw_gateway_customers,
)
from tests.simulation.gateways import KEEP_S, Gateways
from tests.simulation.oracle import Listener
from tests.simulation.virtual_loop import BEGAN_S, NeverCalm

FAULTS_UNTIL_S = 4.0
CALM_S = 60.0
SWEEP_S = 3.0
"""In which the coordinator removes what has expired, and the journal what was removed."""
WORKER_FAULTS = (
    faults.kill,
    faults.drain,
    faults.freeze,
    faults.break_hop,
    faults.cut_hop,
    faults.lose_frame,
    faults.reorder_frames,
    faults.slow_network,
)


@dataclass(slots=True)
class GatewayVerdict:
    """What has come of a schedule."""

    seed: int
    number: int
    problems: list[str] = field(default_factory=list)
    num_events: int = 0
    cpu_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)


class GatewayRun:
    """Customers, gateways and faults of one schedule."""

    def __init__(self, cluster: Cluster, random: Random, customers: list[GatewayCustomer]) -> None:
        self.faults = Counter[str]()
        self._cluster, self._random = cluster, random
        self._customers = customers
        self._gateways = Gateways(cluster, random.choice((2, 3)))
        self._quiet = asyncio.Event()

    def play(self, tell: Callable[[str], None]) -> None:
        """Run to the end of all that is kept, and check that nothing is left."""
        cluster, random, loop = self._cluster, self._random, self._cluster.loop
        began_s = loop.time()
        for host in cluster.hosts:
            loop.call_later(random.uniform(0, 0.3), cluster.start_worker, host)
        for customer in self._customers:
            visit = GatewayVisit(customer, cluster, self._gateways, self._quiet)
            cluster.clients.spawn(visit.run())
        for moment_s in sorted(random.uniform(0.5, FAULTS_UNTIL_S) for _ in range(random.randint(3, 7))):
            loop.run_until(began_s + moment_s)
            tell(self._strike())
        loop.run_until(began_s + FAULTS_UNTIL_S)
        tell("no fault lasts")
        faults.relieve(cluster)
        for gateway in self._gateways.all:
            if gateway.process is not None:
                gateway.process.thaw()
            gateway.start()
        self._wait_for_ends()
        loop.run_until(loop.time() + CALM_S, is_done=self._is_calm)
        loop.run_until(loop.time() + KEEP_S + SWEEP_S)
        cluster.oracle.check_idle(cluster.executors())
        self._gateways.check_idle()

    def _wait_for_ends(self) -> None:
        """Slow readers take nothing before all others have ended."""
        loop = self._cluster.loop
        slow = [customer for customer in self._customers if customer.habit is Habit.IS_SLOW]
        others = [customer for customer in self._customers if customer.habit is not Habit.IS_SLOW]
        for waited_for in (others, slow):

            def have_ended(customers: list[GatewayCustomer] = waited_for) -> bool:
                return all(customer.end for customer in customers)

            loop.run_until(loop.time() + CALM_S, is_done=have_ended)
            for customer in waited_for:
                if not customer.end:
                    self._cluster.oracle.note(
                        f"{customer.name} ({customer.habit.name}) does not end, with {customer.got}"
                    )
            self._cluster.clients.context.run(loop.call_soon, self._quiet.set)

    def _is_calm(self) -> bool:
        server = self._cluster.coordinator
        is_busy = server.engine.registry.live or server.engine.scheduler.num_steps_in_flight
        return server.controller.state.phase is ClusterPhase.SERVING and not is_busy

    def _strike(self) -> str:
        own = (self._kill_gateway, self._break_stream, self._cut_gateway, self._freeze_gateway)
        fault = self._random.choice((*own, self._restart_coordinator))
        if self._random.random() < 0.4:
            worker_fault = self._random.choice(WORKER_FAULTS)
            if what := worker_fault(self._cluster, self._random):
                self.faults[worker_fault.__name__] += 1
                return what
        self.faults[fault.__name__.lstrip("_")] += 1
        return fault()

    def _kill_gateway(self) -> str:
        gateway = self._random.choice(self._gateways.all)
        gateway.kill()
        self._cluster.loop.call_later(self._random.uniform(0.0, 1.0), gateway.start)
        return f"{gateway.name} is killed"

    def _break_stream(self) -> str:
        if not (calls := self._gateways.calls()):
            return "no stream breaks"
        call = self._random.choice(calls)
        self._cluster.network.break_call(call)
        return f"the stream of {call.process.name} breaks"

    def _cut_gateway(self) -> str:
        name = self._random.choice(self._gateways.all).name
        seconds = self._random.choice((0.2, 1.0, 2.0))
        self._cluster.network.cut(name, "coordinator")
        self._cluster.loop.call_later(seconds, self._cluster.network.heal, name, "coordinator")
        return f"{name} is cut off for {seconds} s"

    def _freeze_gateway(self) -> str:
        gateway = self._random.choice(self._gateways.all)
        if gateway.process is None or gateway.process.is_dead:
            return "no gateway freezes"
        gateway.process.freeze()
        self._cluster.loop.call_later(self._random.choice((0.2, 1.0)), gateway.process.thaw)
        return f"{gateway.name} freezes"

    def _restart_coordinator(self) -> str:
        if self._cluster.coordinator_process.is_dead:
            return "the coordinator is down already"
        self._cluster.kill_coordinator()
        after_s = self._random.choice((0.0, 0.1, 0.5))
        self._cluster.loop.call_later(after_s, self._cluster.start_coordinator)
        return f"the coordinator is killed, and started again after {after_s} s"


def examine_gateways(seed: int, number: int, *, is_tracing: bool = False) -> GatewayVerdict:
    """Run one schedule; the same for the same seed and number, always."""
    random = Random(f"{seed}/{number}/gateways")
    num_stages = random.choice((2, 2, 3))
    with tempfile.TemporaryDirectory() as directory:
        shape = Shape(
            num_stages=num_stages,
            num_workers=num_stages + random.choice((0, 1)),
            num_blocks=random.choice((12, 24, 48)),
            journal=Path(directory) / "journal",
            keep_s=KEEP_S,
        )
        customers = draw_gateway_customers(random, shape, random.randint(6, 14))
        return _run(GatewayVerdict(seed, number), shape, customers, random, is_tracing=is_tracing)


def _run(
    verdict: GatewayVerdict,
    shape: Shape,
    customers: list[GatewayCustomer],
    random: Random,
    *,
    is_tracing: bool,
) -> GatewayVerdict:
    began_s = time.process_time()
    with simulated(random):
        cluster = Cluster(shape, random)
        listener = Listener(cluster.oracle, is_tracing=is_tracing)
        root = logging.getLogger()
        root.addHandler(listener)
        level = root.level
        root.setLevel(listener.level)

        def tell(what: str) -> None:
            if is_tracing:
                print(f"{cluster.loop.time() - BEGAN_S:9.4f} ******* {what}")

        try:
            run = GatewayRun(cluster, random, customers)
            try:
                run.play(tell)
            except NeverCalm as error:
                cluster.oracle.note(str(error))
            verdict.problems = cluster.oracle.problems + cluster.loop.problems
            verdict.num_events, verdict.faults = cluster.loop.num_timers, run.faults
            verdict.ends = Counter(customer.end.split(":")[0] for customer in customers)
        finally:
            cluster.close()
            if cluster.coordinator.journal is not None:
                cluster.coordinator.journal.close()
            root.removeHandler(listener)
            root.setLevel(level)
    verdict.cpu_s = time.process_time() - began_s
    return verdict
