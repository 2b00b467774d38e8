"""Schedules for what random ones seldom reach: each is made so that certain decisions must be taken."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from coordinator.cluster.transitions import ClusterPhase
from tests.simulation.cluster import Cluster, Shape
from tests.simulation.customers import draw_customers
from tests.simulation.faults import Fault
from tests.simulation.schedule import Schedule, Strike

SEED = 0
NUM_STAGES = 3

Step = tuple[float, Fault, ClusterPhase | None]


def _named(name: str, harm: Callable[[Cluster], None]) -> Fault:
    def fault(cluster: Cluster, random: Random) -> str:
        harm(cluster)
        return name

    fault.__name__ = name
    return fault


def fail_loads(worker: int, count: int) -> Fault:
    def harm(cluster: Cluster) -> None:
        cluster.hosts[worker].machine.num_failing_loads = count

    return _named("fail_loads", harm)


def spoil(worker: int) -> Fault:
    def harm(cluster: Cluster) -> None:
        cluster.hosts[worker].machine.is_bad = True

    return _named("spoil", harm)


def kill(worker: int, *, returns_after_s: float | None = None) -> Fault:
    def harm(cluster: Cluster) -> None:
        host = cluster.hosts[worker]
        if host.is_up:
            cluster.kill_worker(host)
        if returns_after_s is not None:
            cluster.loop.call_later(returns_after_s, cluster.start_worker, host)

    return _named("kill", harm)


def drain(worker: int, *, returns_after_s: float | None = None) -> Fault:
    def harm(cluster: Cluster) -> None:
        host = cluster.hosts[worker]
        if host.worker is not None:
            host.worker.ask_to_leave()
        if returns_after_s is not None:
            cluster.loop.call_later(returns_after_s, cluster.start_worker, host)

    return _named("drain", harm)


def cut(one: int, other: int) -> Fault:
    def harm(cluster: Cluster) -> None:
        cluster.network.cut(f"worker-{one}", f"worker-{other}")

    return _named("cut", harm)


_SERVING, _LOADING, _BLOCKED = ClusterPhase.SERVING, ClusterPhase.LOADING, ClusterPhase.BLOCKED

DIRECTED: dict[str, list[Step]] = {
    "a worker cannot load before the cluster has served": [
        (0.0, fail_loads(0, 2), None),
        (1.5, drain(1), _BLOCKED),
        (2.0, kill(2), _BLOCKED),
        (2.5, kill(0, returns_after_s=0.1), None),
    ],
    "a spare cannot load either, and the last one does": [
        (0.0, fail_loads(0, 2), None),
        (1.5, kill(0, returns_after_s=0.0), _BLOCKED),
    ],
    "all leave, one after another": [
        (1.5, drain(0), _SERVING),
        (2.0, drain(1), _SERVING),
        (2.6, drain(2, returns_after_s=2.0), _SERVING),
    ],
    "the last one leaves while it starts": [
        (1.5, kill(0), _SERVING),
        (1.5, kill(1), None),
        (1.6, drain(2), ClusterPhase.STARTING_EPOCH),
    ],
    "a worker leaves during the wait for a return": [
        (1.5, kill(0), _SERVING),
        (1.5, drain(1), ClusterPhase.WAITING_FOR_WORKERS),
    ],
    "a stage becomes unreachable": [(1.5, cut(0, 1), _SERVING), (4.0, cut(1, 2), _SERVING)],
    "every plan is bad at first": [(0.0, spoil(1), None), (2.0, drain(0), _BLOCKED)],
    "the newcomer is bad": [
        (1.5, kill(1), _SERVING),
        (1.5, spoil(1), None),
        (3.0, kill(1, returns_after_s=0.0), None),
    ],
    "all but one are lost, and that one cannot load": [
        (1.5, fail_loads(2, 2), _SERVING),
        (1.5, kill(0), None),
        (1.5, kill(1), None),
        (4.4, kill(2, returns_after_s=0.1), None),
    ],
}


def directed(number: int) -> Schedule:
    """The one with this number."""
    name = list(DIRECTED)[number]
    random = Random(f"{SEED}/{name}")
    shape = Shape(num_stages=NUM_STAGES, num_workers=NUM_STAGES, num_blocks=24, is_checked="bad" in name)
    return Schedule(
        seed=SEED,
        number=number,
        shape=shape,
        customers=draw_customers(random, shape, 5),
        faults=[Strike(moment_s=at_s, fault=fault, phase=phase) for at_s, fault, phase in DIRECTED[name]],
    )
