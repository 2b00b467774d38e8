"""What goes wrong. A fault is a function of a few lines; what it begins it also ends, or `relieve` does."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from coordinator.cluster.membership import WorkerState
from coordinator.cluster.transitions import ClusterPhase
from tests.simulation.cluster import Cluster, Host
from tests.simulation.network import Direction
from tests.simulation.payloads import SimSender

_OUT = (WorkerState.QUARANTINED, WorkerState.LOST, WorkerState.SUSPECT)
"""States that a worker does not leave by itself."""
REORDER_WITHIN_S = 0.3
ENDS_WITHIN_S = 0.5
"""How often the supervisor of a leaving worker looks whether it has ended."""

Fault = Callable[[Cluster, Random], str]
"""Inject a fault and return its description; empty without a target."""


def kill(cluster: Cluster, random: Random) -> str:
    host = _some_host(cluster, random)
    cluster.kill_worker(host)
    if random.random() < 0.7:
        cluster.loop.call_later(random.uniform(0.05, 2.5), cluster.start_worker, host)
    return f"{host.name} is killed"


def drain(cluster: Cluster, random: Random) -> str:
    """Drain a worker as on SIGTERM; it is restarted, once it has ended."""
    host = _some_host(cluster, random)
    if host.worker is None or not host.worker.ask_to_leave():
        return ""
    leaving = host.process

    def restart() -> None:
        if host.process is leaving and host.is_up:
            cluster.loop.call_later(ENDS_WITHIN_S, restart)
        else:
            cluster.start_worker(host)

    cluster.loop.call_later(random.uniform(0.5, 2.5), restart)
    return f"{host.name} is to leave"


def replace(cluster: Cluster, random: Random) -> str:
    """A new process while the coordinator still believes in the old one."""
    host = _some_host(cluster, random)
    cluster.kill_worker(host)
    cluster.start_worker(host)
    return f"{host.name} is killed and started again at once"


def freeze(cluster: Cluster, random: Random) -> str:
    host = _some_host(cluster, random)
    process = host.process
    assert process is not None
    process.freeze()
    cluster.network.num_stalls += 1
    seconds = random.choice((0.3, 1.0, 2.5, 4.0))
    cluster.loop.call_later(seconds, process.thaw)
    return f"{host.name} freezes for {seconds} s"


def cut_control(cluster: Cluster, random: Random) -> str:
    return _cut(cluster, "coordinator", _some_host(cluster, random).name, random)


def cut_hop(cluster: Cluster, random: Random) -> str:
    names = [worker.identity.name for worker in cluster.coordinator.controller.state.stage_workers]
    if len(names) < 2:
        names = [host.name for host in cluster.hosts]
    first = random.randrange(len(names) - 1)
    return _cut(cluster, names[first], names[first + 1], random)


def break_hop(cluster: Cluster, random: Random) -> str:
    calls = cluster.network.forwards()
    if not calls:
        return ""
    call = random.choice(calls)
    cluster.network.break_call(call)
    return f"the stream from {call.process.name} breaks"


def lose_frame(cluster: Cluster, random: Random) -> str:
    return _tamper(cluster, random, "lost", lambda way, data: [])


def repeat_frame(cluster: Cluster, random: Random) -> str:
    return _tamper(cluster, random, "repeated", lambda way, data: [data, data])


def reorder_frames(cluster: Cluster, random: Random) -> str:
    """The next one overtakes this one; without a next one it is only late."""

    def hold(way: Direction, data: bytes) -> list[bytes]:
        late = [data]

        def release() -> None:
            if late:
                way.pass_on(late.pop())

        def overtake(way: Direction, overtaking: bytes) -> list[bytes]:
            return [overtaking, late.pop()] if late else [overtaking]

        way.tampering.insert(0, overtake)
        cluster.loop.call_later(REORDER_WITHIN_S, release)
        return []

    return _tamper(cluster, random, "overtaken", hold)


def corrupt_frame(cluster: Cluster, random: Random) -> str:
    def flip(way: Direction, data: bytes) -> list[bytes]:
        # Half of them hit the hidden states, which come last.
        position = random.randrange(len(data) // 2 if random.random() < 0.5 else len(data) - 4, len(data))
        flipped = data[position] ^ (1 << random.randrange(8))
        return [data[:position] + bytes((flipped,)) + data[position + 1 :]]

    return _tamper(cluster, random, "corrupted", flip, kinds=("/Forward",))


def truncate_frame(cluster: Cluster, random: Random) -> str:
    return _tamper(
        cluster,
        random,
        "cut short",
        lambda way, data: [data[: random.randrange(1, len(data))]],
        kinds=("/Forward",),
    )


def break_payloads(cluster: Cluster, random: Random) -> str:
    """Only the payload connection of a hop breaks."""
    link = _some_link(cluster, random)
    if link is None:
        return ""
    link.break_off()
    return f"the payload connection from {link.process.name} breaks"


def hold_payloads(cluster: Cluster, random: Random) -> str:
    """Payloads stop on their way, the stream of their frames does not."""
    link = _some_link(cluster, random)
    if link is None:
        return ""
    seconds = random.choice((0.3, 1.5, 8.0))
    link.up.is_held = True
    cluster.network.num_stalls += 1

    def release() -> None:
        link.up.is_held = False
        link.up.flush()

    cluster.loop.call_later(seconds, release)
    return f"payloads from {link.process.name} are held for {seconds} s"


def corrupt_payload(cluster: Cluster, random: Random) -> str:
    def flip(way: Direction, data: bytes) -> list[bytes]:
        position = random.randrange(len(data))
        flipped = data[position] ^ (1 << random.randrange(8))
        return [data[:position] + bytes((flipped,)) + data[position + 1 :]]

    return _tamper_payload(cluster, random, "corrupted", flip)


def lose_payload(cluster: Cluster, random: Random) -> str:
    return _tamper_payload(cluster, random, "lost", lambda way, data: [])


def truncate_payload(cluster: Cluster, random: Random) -> str:
    return _tamper_payload(
        cluster, random, "cut short", lambda way, data: [data[: random.randrange(1, len(data))]]
    )


def fail_load(cluster: Cluster, random: Random) -> str:
    """The next load fails, and there will be one: a worker that has a stage dies."""
    host = random.choice(cluster.hosts)
    host.machine.num_failing_loads = 1
    return f"the next load of {host.name} fails; {replace(cluster, random)}"


def spoil_weights(cluster: Cluster, random: Random) -> str:
    """A new process has bad weights; only where a self-check looks for them."""
    if not cluster.shape.is_checked:
        return ""
    host = _some_host(cluster, random)
    cluster.kill_worker(host)
    host.machine.is_bad = True
    cluster.loop.call_later(random.uniform(0.0, 1.5), cluster.start_worker, host)
    return f"{host.name} comes back with bad weights"


def slow_load(cluster: Cluster, random: Random) -> str:
    host = random.choice(cluster.hosts)
    host.machine.load_s = random.uniform(0.5, 3.0)
    return f"{host.name} loads for {host.machine.load_s:.1f} s; {kill(cluster, random)}"


def slow_stage(cluster: Cluster, random: Random) -> str:
    host = random.choice(cluster.hosts)
    host.machine.step_s = random.uniform(0.02, 0.2)
    return f"{host.name} needs {host.machine.step_s:.2f} s per step"


def slow_network(cluster: Cluster, random: Random) -> str:
    cluster.network.slowest_s = random.uniform(0.02, 0.3)
    cluster.loop.call_later(random.uniform(0.2, 2.0), _speed_up, cluster)
    return f"messages take up to {cluster.network.slowest_s:.2f} s"


def replay_control(cluster: Cluster, random: Random) -> str:
    """Repeat earlier messages of a worker on its present stream."""
    joins = [call for call in cluster.network.calls if call.method.endswith("/Join") and call.status is None]
    if not joins:
        return ""
    call = random.choice(joins)
    history = cluster.network.history.get(call.process.name, [])
    if not history:
        return ""
    call.up.pass_on(random.choice(history))
    return f"a message of {call.process.name} is repeated"


FAULTS: tuple[Fault, ...] = (
    kill,
    drain,
    replace,
    freeze,
    cut_control,
    cut_hop,
    break_hop,
    lose_frame,
    repeat_frame,
    reorder_frames,
    corrupt_frame,
    truncate_frame,
    break_payloads,
    hold_payloads,
    corrupt_payload,
    lose_payload,
    truncate_payload,
    fail_load,
    spoil_weights,
    slow_load,
    slow_stage,
    slow_network,
    replay_control,
)


def poison_device(cluster: Cluster, random: Random) -> str:
    """Every step fails until the process is another one."""
    host = _some_host(cluster, random)
    host.device.failure = "the context is poisoned"
    cluster.oracle.num_device_faults += 1
    return f"the device of {host.name} is poisoned"


def exhaust_device(cluster: Cluster, random: Random) -> str:
    host = _some_host(cluster, random)
    host.device.num_out_of_memory += 1
    cluster.oracle.num_device_faults += 1
    return f"a step on {host.name} finds too little memory"


def hang_device(cluster: Cluster, random: Random) -> str:
    """No step ends, and the process goes on."""
    host = _some_host(cluster, random)
    host.device.is_hung = True
    cluster.oracle.num_device_faults += 1
    cluster.network.num_stalls += 1
    return f"the device of {host.name} hangs"


def kill_in_flight(cluster: Cluster, random: Random) -> str:
    """A process that dies with steps on its device, and is restarted."""
    host = _some_host(cluster, random)
    if not cluster.coordinator.engine.scheduler.num_steps_in_flight:
        return ""
    cluster.kill_worker(host)
    cluster.loop.call_later(random.uniform(0.05, 1.0), cluster.start_worker, host)
    return f"{host.name} is killed with steps in flight"


DEVICE_FAULTS: tuple[Fault, ...] = (poison_device, exhaust_device, hang_device, kill_in_flight)


def relieve(cluster: Cluster) -> None:
    """End all faults: the network works and is fast, and workers that could not load are restarted."""
    _speed_up(cluster)
    cluster.network.heal_all()
    for host in cluster.hosts:
        host.machine.load_s, host.machine.step_s, host.machine.num_failing_loads = 0.2, 0.004, 0
        is_cured, host.machine.is_bad = host.machine.is_bad, False
        if host.process is not None:
            host.process.thaw()
        if host.is_up and host.device.is_hung:
            cluster.kill_worker(host)
        record = cluster.coordinator.controller.state.workers.get(host.name)
        if host.is_up and (is_cured or (record is not None and record.shown_state in _OUT)):
            cluster.kill_worker(host)
        cluster.start_worker(host)


def _some_host(cluster: Cluster, random: Random) -> Host:
    """One that is up and not frozen, rather with a stage than without."""
    state = cluster.coordinator.controller.state
    up = [host for host in cluster.hosts if host.is_up and host.process and not host.process.is_frozen]
    staged = {worker.identity.name for worker in state.stage_workers}
    chosen = [host for host in up if host.name in staged]
    if state.phase is not ClusterPhase.BLOCKED and chosen and random.random() < 0.85:
        return random.choice(chosen)
    if not up:
        relieve(cluster)
        return random.choice(cluster.hosts)
    return random.choice(up)


def _speed_up(cluster: Cluster) -> None:
    cluster.network.slowest_s = 0.002


def _cut(cluster: Cluster, one: str, other: str, random: Random) -> str:
    seconds = random.choice((0.3, 1.5, 3.0, 5.0))
    cluster.network.cut(one, other)
    cluster.loop.call_later(seconds, cluster.network.heal, one, other)
    return f"{one} and {other} are cut off for {seconds} s"


def _some_link(cluster: Cluster, random: Random) -> SimSender | None:
    links = cluster.network.payload_links
    return random.choice(links) if links else None


def _tamper_payload(
    cluster: Cluster, random: Random, what: str, tampering: Callable[[Direction, bytes], list[bytes]]
) -> str:
    link = _some_link(cluster, random)
    if link is None:
        return ""
    link.up.tampering.append(tampering)
    return f"the next payload from {link.process.name} is {what}"


def _tamper(
    cluster: Cluster,
    random: Random,
    what: str,
    tampering: Callable[[Direction, bytes], list[bytes]],
    kinds: tuple[str, ...] = ("/Forward", "/Deliver"),
) -> str:
    calls = [call for call in cluster.network.forwards() if call.method.endswith(kinds)]
    if not calls:
        return ""
    call = random.choice(calls)
    call.up.tampering.append(tampering)
    return f"the next {call.method.rpartition('/')[2]} message from {call.process.name} is {what}"
