"""A cluster on Ray: an actor keeps each process running.

Ray places the actors, and starts them again elsewhere when their node is lost. Frames, requests and
heartbeats never pass through it.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from certificates.identity import Role
from deploy import ClusterFailed, parent_death_signal
from deploy.commands import ProcessCommand, check, commands, drain_timeout_s
from deploy.process import describe_exit_code, process_environment
from deploy.spec.cluster_spec import ClusterSpec
from deploy.spec.document import WrongField
from wire.exit_codes import ExitCode

PLACEMENT_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 10.0
RESTART_DELAY_S = 2.0
_HEAD = "node:__internal_head__"
"""Resource that Ray gives to the head node alone."""
_CHOSEN_DEVICES = ("cpu", "cuda", "cuda:0")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedProcess:
    """A process of the cluster.

    `node` has address and id; it is empty while Ray has no place for the process. `ended` is empty while the
    process runs.
    """

    name: str
    node: str = ""
    num_starts: int = 0
    ended: str = ""

    @property
    def text(self) -> str:
        """What it does, in words."""
        if not self.node:
            return "waits for a node"
        return self.ended or f"runs, start {self.num_starts}"


class KeptProcess:
    """An actor: starts a process again when it fails, and passes SIGTERM on to it, which drains."""

    def __init__(
        self, name: str, node: str, program: str, argv: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        found = shutil.which(program, path=path)
        if found is None:
            raise FileNotFoundError(f"program {program!r} not found on {node}: install Stageline there")
        launcher = (sys.executable, "-I", "-S", parent_death_signal.__file__, str(os.getpid()))
        self._name, self._node = name, node
        self._command = (*launcher, found, *argv)
        self._environment = process_environment(environment)
        self._lock = threading.Lock()
        self._is_stopping, self._has_started = threading.Event(), threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._num_starts, self._ended = 0, ""
        # The kernel kills the process when the thread that started it ends: this one ends with the actor.
        self._thread = threading.Thread(target=self._keep, name=name, daemon=True)
        self._thread.start()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def state(self) -> PlacedProcess:
        """Where it runs, after its first start."""
        self._has_started.wait()
        return PlacedProcess(name=self._name, node=self._node, num_starts=self._num_starts, ended=self._ended)

    def stop(self) -> None:
        """Send SIGTERM, and wait for the end."""
        with self._lock:
            self._is_stopping.set()
            if self._child is not None:
                self._child.terminate()
        self._thread.join()

    def _keep(self) -> None:
        while (child := self._start()) is not None:
            code = child.wait()
            self._ended = describe_exit_code(code)
            if code in (ExitCode.DONE, ExitCode.USAGE):
                return
            self._is_stopping.wait(RESTART_DELAY_S)

    def _start(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._is_stopping.is_set():
                return None
            # Its output is the actor's, which Ray collects.
            self._child = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, env=self._environment, start_new_session=True
            )
            self._num_starts += 1
            self._has_started.set()
            self._ended = ""
            return self._child

    def _on_sigterm(self, number: int, frame: object) -> None:
        """Drain, and exit as a failure, so that Ray starts the actor again if it has a node for it."""
        self.stop()
        sys.exit(ExitCode.FAILED)


class RayCluster:
    """The actors of a cluster, found again by their names. Raises ClusterFailed and WrongField."""

    def __init__(self, spec: ClusterSpec) -> None:
        """Connect to Ray at $RAY_ADDRESS, or to the one that runs on this host."""
        if spec.coordinator.host is not None:
            raise WrongField(("coordinator", "host"), "Ray chooses the hosts of processes: remove the key")
        _check_devices(spec)
        self._ray = _load_ray()
        self._util, self._errors = self._ray.util, self._ray.exceptions
        self._drain_timeout_s = drain_timeout_s(spec)
        try:
            self._ray.init(
                address="auto",
                namespace=f"stageline-{spec.name}",
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (ConnectionError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ClusterFailed(
                f"no Ray cluster answers ({reason}): start one with `ray start --head`, or set RAY_ADDRESS"
            ) from None
        placed = replace(spec.coordinator, host=self._head()["NodeManagerAddress"])
        self.spec = replace(spec, coordinator=placed)
        """The cluster with the address of the head node."""
        check(self.spec)
        self._commands = commands(self.spec)

    def close(self) -> None:
        """Disconnect from Ray; the processes go on."""
        self._ray.shutdown()

    def run(self) -> list[PlacedProcess]:
        """Start the actors, and wait until Ray has placed them."""
        if self._util.list_named_actors():
            raise ClusterFailed(f"cluster {self.spec.name} runs already on this Ray cluster: stop it first")
        workers = [command for command in self._commands if command.role is Role.WORKER]
        group = self._new_group(workers)
        try:
            for command in self._commands:
                index = workers.index(command) if command.role is Role.WORKER else None
                self._start(command, self._strategy(group, index))
            states = [self._wait_for_start(command.name) for command in self._commands]
        except BaseException:
            self.remove()
            raise
        return states

    def states(self) -> list[PlacedProcess]:
        """Coordinator, gateways and workers. Raises ClusterFailed if none is there."""
        names = self._names()
        if not names:
            raise ClusterFailed(f"cluster {self.spec.name} does not run on this Ray cluster")
        return [self._state(command.name) for command in self._commands if command.name in names]

    def stop(self) -> None:
        """Let running requests finish, end all processes, and remove their actors."""
        running = {state.name for state in self.states() if state.node}
        for is_worker in (False, True):
            found = [command for command in self._commands if (command.role is Role.WORKER) == is_worker]
            self._stop_all([command.name for command in found if command.name in running])
        self.remove()

    def remove(self) -> None:
        """Remove actors and their places, with what still runs."""
        for name in self._names():
            self._ray.kill(self._ray.get_actor(name), no_restart=True)
        try:
            group = self._util.get_placement_group(self.spec.name)
        except ValueError:
            return
        self._util.remove_placement_group(group)

    def _head(self) -> dict[str, Any]:
        nodes: list[dict[str, Any]] = self._ray.nodes()
        for node in nodes:
            if node["Alive"] and _HEAD in node["Resources"]:
                return node
        raise ClusterFailed("the Ray cluster has no head node")

    def _new_group(self, workers: Sequence[ProcessCommand]) -> Any:
        """Places of the workers: on nodes of their own where one more node is left for a restart."""
        bundles = [_resources(command) for command in workers]
        num_nodes = sum(node["Alive"] and _has_room(node, bundles) for node in self._ray.nodes())
        group = self._util.placement_group(
            bundles,
            strategy="STRICT_SPREAD" if num_nodes > len(workers) else "SPREAD",
            name=self.spec.name,
            lifetime="detached",
        )
        if not group.wait(PLACEMENT_TIMEOUT_S):
            self._util.remove_placement_group(group)
            raise ClusterFailed(
                f"Ray has no place for the workers within {PLACEMENT_TIMEOUT_S:g} s: wanted {bundles}, "
                f"free {self._ray.available_resources()}"
            )
        return group

    def _strategy(self, group: Any, index: int | None) -> dict[str, Any]:
        """Where an actor runs: at its place of the group, or on the head node."""
        if index is None:
            return {"resources": {_HEAD: 0.001}}
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        place = strategies.PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=index
        )
        return {"scheduling_strategy": place}

    def _start(self, command: ProcessCommand, place: Mapping[str, Any]) -> None:
        wanted = _resources(command)
        options = {
            "name": command.name,
            "lifetime": "detached",
            "max_restarts": -1,
            # A state is asked for while the process stops.
            "max_concurrency": 4,
            "num_cpus": wanted["CPU"],
            "num_gpus": wanted.get("GPU", 0),
            "memory": wanted.get("memory"),
            **place,
        }
        actor = self._ray.remote(RayActor).options(**options)
        actor.remote(command.name, self.spec.engine.program, command.argv, dict(command.environment))

    def _wait_for_start(self, name: str) -> PlacedProcess:
        try:
            state: PlacedProcess = self._ray.get(
                self._ray.get_actor(name).state.remote(), timeout=PLACEMENT_TIMEOUT_S
            )
        except self._errors.GetTimeoutError:
            raise ClusterFailed(f"{name} has not started within {PLACEMENT_TIMEOUT_S:g} s") from None
        except self._errors.RayActorError as error:
            raise ClusterFailed(f"{name} cannot start: {str(error).strip().splitlines()[-1]}") from None
        return state

    def _state(self, name: str) -> PlacedProcess:
        try:
            actor = self._ray.get_actor(name)
            state: PlacedProcess = self._ray.get(actor.state.remote(), timeout=ANSWER_TIMEOUT_S)
        except (self._errors.GetTimeoutError, self._errors.RayActorError):
            return PlacedProcess(name=name)
        return state

    def _stop_all(self, names: Sequence[str]) -> None:
        """Stop processes at the same time."""
        waiting = [self._ray.get_actor(name).stop.remote() for name in names]
        _, late = self._ray.wait(waiting, num_returns=len(waiting), timeout=self._drain_timeout_s)
        if late:
            logging.getLogger(__name__).warning(
                "%d processes did not end within %g s and are killed", len(late), self._drain_timeout_s
            )

    def _names(self) -> set[str]:
        return set(self._util.list_named_actors())


class RayActor(KeptProcess):
    """A kept process that knows its node from Ray."""

    def __init__(self, name: str, program: str, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        ray = _load_ray()
        node_id = ray.get_runtime_context().get_node_id()
        node = f"{ray.util.get_node_ip_address()} ({node_id[:8]})"
        super().__init__(name, node, program, argv, environment)


def _check_devices(spec: ClusterSpec) -> None:
    for index, worker in enumerate(spec.workers):
        if worker.device not in _CHOSEN_DEVICES:
            reason = f"is {worker.device}, but Ray chooses the GPU of a worker: write cuda"
            raise WrongField(("workers", index, "device"), reason)


def _resources(command: ProcessCommand) -> dict[str, float]:
    """What Ray reserves for a process: by default a CPU and the GPU of a worker, nothing for others."""
    given, is_worker = command.resources, command.role is Role.WORKER
    wanted: dict[str, float] = {"CPU": given.cpus if given.cpus is not None else int(is_worker)}
    if command.num_gpus:
        wanted["GPU"] = command.num_gpus
    if given.memory_bytes is not None:
        wanted["memory"] = given.memory_bytes
    return wanted


def _has_room(node: Mapping[str, Any], bundles: Sequence[Mapping[str, float]]) -> bool:
    """Whether a node can hold any of the workers, when nothing else is there."""
    return all(
        node["Resources"].get(name, 0) >= amount for bundle in bundles for name, amount in bundle.items()
    )


def _load_ray() -> Any:
    """The library, which is an optional dependency."""
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ClusterFailed("the engine ray needs Ray on this host: pip install 'ray>=2.50,<3'") from None
