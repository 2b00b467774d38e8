"""Configuration of a local cluster and its share of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from deploy.commands import check_ports, commands
from deploy.spec.cluster_spec import ClusterSpec, CoordinatorSpec, GatewaySpec, WorkerSpec
from deploy.spec.document import WrongField
from stage_worker.backends.mock_spec import MockSpec
from stage_worker.config import ALL_GPUS, AUTO, check_threads
from weights.location import ModelLocation
from wire.addresses import local_address, parse_address
from wire.host_memory import available_memory_bytes
from wire.sizes import format_size

_MEMORY_SHARE = 0.6


def memory_per_worker(num_workers: int) -> int:
    """An even share, in bytes, of 60 % of the memory that is available now."""
    return int(available_memory_bytes() * _MEMORY_SHARE) // num_workers


def threads_per_worker(num_workers: int) -> int:
    """An even share of the cores this process may run on, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // num_workers)


def cpus_of_worker(worker: int, num_workers: int) -> tuple[int, ...] | None:
    """Neighbouring CPUs for worker 0, 1, ...; None with fewer CPUs than workers."""
    cpus, share = sorted(os.sched_getaffinity(0)), threads_per_worker(num_workers)
    if len(cpus) < num_workers:
        return None
    return tuple(cpus[worker * share : (worker + 1) * share])


MAX_WORKERS = 1024
# -P: the folder that the user happens to stand in must not shadow our packages.
_STAGELINE = (sys.executable, "-P", "-m", "stageline")


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalRun:
    """A cluster whose processes all run on this machine, started with `command`.

    Without `log_directory`, logs go to a temporary directory, removed at the end unless something failed.
    """

    spec: ClusterSpec
    log_directory: Path | None = None
    command: tuple[str, ...] = _STAGELINE


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalClusterConfig:
    """A coordinator and `num_workers` workers, named worker-0, worker-1, ... Raises ValueError.

    `num_stages` defaults to the number of workers. `devices` and `mocks` (specs of mock stages) have one
    entry for all workers or one per worker. `memory_bytes` (per worker) and `num_threads` default to an
    even share of the machine. The coordinator serves its dashboard on `http` (HOST:PORT), if given, and a
    gateway the HTTP API on `gateway`. With
    `pins_workers`, workers on the CPU run on cores of their own, if there is one per thread.
    `worker_arguments` is empty or has the additional arguments of each worker. `environment` is added to
    this process's. Without `log_directory`, logs go to a temporary directory, removed at the end unless
    something failed.
    """

    num_workers: int = 3
    num_stages: int | None = None
    model: ModelLocation | None = None
    listen: str = "127.0.0.1:0"
    devices: tuple[str, ...] = ("cpu",)
    memory_bytes: int | None = None
    num_threads: int | None = None
    mocks: tuple[str, ...] = ()
    http: str | None = None
    gateway: str | None = None
    pins_workers: bool = True
    coordinator_arguments: tuple[str, ...] = ()
    worker_arguments: tuple[tuple[str, ...], ...] = ()
    gateway_arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    log_directory: Path | None = None
    command: tuple[str, ...] = _STAGELINE

    def __post_init__(self) -> None:
        parse_address(self.listen)
        if self.gateway is not None:
            parse_address(self.gateway)
        if self.num_workers < 1:
            raise ValueError(f"{self.num_workers} workers: there must be at least 1")
        if self.num_workers > MAX_WORKERS:
            raise ValueError(f"{self.num_workers} workers: the limit on one machine is {MAX_WORKERS}")
        if len(self.devices) not in (1, self.num_workers):
            raise ValueError(
                f"{len(self.devices)} devices for {self.num_workers} workers: give 1 or one each"
            )
        if self.mocks and len(self.mocks) not in (1, self.num_workers):
            raise ValueError(
                f"{len(self.mocks)} mock specs for {self.num_workers} workers: give 1 or one each"
            )
        if self.mocks and (self.devices != ("cpu",) or self.num_threads is not None):
            raise ValueError("mock stages compute nothing: they have neither device nor threads")
        for spec in self.mocks:
            MockSpec.parse(spec)
        if self.worker_arguments and len(self.worker_arguments) != self.num_workers:
            raise ValueError(f"arguments of {len(self.worker_arguments)} workers for {self.num_workers}")
        if self.num_threads is not None:
            check_threads(self.num_threads)
        if self.memory_bytes is None:
            _check_devices_unshared([self.device(worker) for worker in range(self.num_workers)])
        elif not self.mocks:
            self._check_host_memory(self.memory_bytes)

    def _check_host_memory(self, memory_bytes: int) -> None:
        """The memory of a GPU is known to its worker only."""
        num_on_host = sum(self.device(worker) == "cpu" for worker in range(self.num_workers))
        total_bytes = int(psutil.virtual_memory().total)
        if num_on_host * memory_bytes > total_bytes:
            raise ValueError(
                f"--memory is {format_size(memory_bytes)} for each of {num_on_host} workers on the CPU, "
                f"{format_size(num_on_host * memory_bytes)} in all, but this host has "
                f"{format_size(total_bytes)}: lower --memory or omit it"
            )

    def device(self, worker: int) -> str:
        return self.devices[worker] if len(self.devices) > 1 else self.devices[0]

    def run(self) -> LocalRun:
        """The cluster of this configuration."""
        gateways = () if self.gateway is None else (self._gateway_spec(self.gateway),)
        spec = ClusterSpec(
            model=self.model,
            stages=self.num_stages,
            coordinator=CoordinatorSpec(listen=self.listen, http=self.http, flags=self.coordinator_arguments),
            gateways=gateways,
            workers=tuple(self._worker_spec(worker) for worker in range(self.num_workers)),
            environment=self.environment,
        )
        spec = with_local_shares(spec, pins_workers=self.pins_workers)
        return LocalRun(spec=spec, log_directory=self.log_directory, command=self.command)

    def _gateway_spec(self, listen: str) -> GatewaySpec:
        return GatewaySpec(listen=listen, flags=self.gateway_arguments)

    def _worker_spec(self, worker: int) -> WorkerSpec:
        words: tuple[str, ...] = ()
        if self.mocks:
            words = ("--mock", self.mocks[worker % len(self.mocks)])
        elif self.num_threads is not None:
            words = ("--threads", str(self.num_threads))
        return WorkerSpec(
            name=worker_name(worker),
            listen="127.0.0.1:0",
            memory_bytes=self.memory_bytes,
            device=self.device(worker),
            flags=(*words, *(self.worker_arguments[worker] if self.worker_arguments else ())),
        )


def with_local_shares(spec: ClusterSpec, *, pins_workers: bool = True) -> ClusterSpec:
    """Give each worker its share of this machine, where the cluster does not say what it may use."""
    num_workers = len(spec.workers)
    shared = (
        _with_share(worker, *(index, num_workers), pins_workers) for index, worker in enumerate(spec.workers)
    )
    return replace(spec, workers=tuple(shared))


def _with_share(worker: WorkerSpec, index: int, num_workers: int, pins_workers: bool) -> WorkerSpec:
    if "--mock" in worker.flags:
        return worker
    is_on_cpu, given = worker.device == "cpu", worker.flags
    has_threads = "--threads" in given
    num_threads = int(given[given.index("--threads") + 1]) if has_threads else threads_per_worker(num_workers)
    words = [] if has_threads else ["--threads", str(num_threads)]
    cpus = cpus_of_worker(index, num_workers)
    if pins_workers and is_on_cpu and "--cpu-set" not in given and cpus and num_threads <= len(cpus):
        words += ["--cpu-set", ",".join(map(str, cpus))]
    memory_bytes = worker.memory_bytes
    if memory_bytes is None and is_on_cpu:
        memory_bytes = memory_per_worker(num_workers)
    return replace(worker, memory_bytes=memory_bytes, flags=(*words, *given))


def local_run(spec: ClusterSpec) -> LocalRun:
    """A cluster of a file, on this machine. Raises WrongField for what needs other hosts."""
    if spec.coordinator.host is not None:
        raise WrongField(("coordinator", "host"), "the engine local has one machine: remove the key")
    if spec.security.tls_directory is not None:
        reason = "the engine local speaks plain text within one machine: remove the key"
        raise WrongField(("security", "tls-dir"), reason)
    try:
        _check_devices_unshared([worker.device for worker in spec.workers if worker.memory_bytes is None])
    except ValueError as error:
        raise WrongField(("workers",), str(error)) from None
    on_cpu = [worker for worker in spec.workers if worker.device == "cpu" and "--mock" not in worker.flags]
    wanted, total = sum(worker.memory_bytes or 0 for worker in on_cpu), int(psutil.virtual_memory().total)
    if wanted > total:
        sizes = f"{format_size(wanted)} in all, but this host has {format_size(total)}"
        raise WrongField(("workers",), f"those on the CPU have {sizes}: lower their memory")
    check_ports(commands(spec))
    return LocalRun(spec=with_local_shares(spec))


def _check_devices_unshared(devices: list[str]) -> None:
    for device in devices:
        if device == ALL_GPUS:
            raise ValueError(f"{ALL_GPUS} is for `stageline worker`: name each worker's GPU, or auto")
        if device not in ("cpu", AUTO) and devices.count(device) > 1:
            raise ValueError(
                f"{devices.count(device)} workers share {device}: say with --memory how much each may use"
            )


def worker_name(worker: int) -> str:
    return f"worker-{worker}"


def dialled_address(listening: str) -> str:
    """The address, from this machine, of a server that listens on `listening`."""
    return str(local_address(parse_address(listening)))
