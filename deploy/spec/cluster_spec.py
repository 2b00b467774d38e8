"""`ClusterSpec`: what a cluster file says, and nothing about the engine that runs it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from coordinator.config import CoordinatorConfig
from deploy.spec.document import WrongField
from deploy.spec.fields import (
    Key,
    absolute_path,
    cpu_count,
    flag_value,
    flag_words,
    host,
    list_of,
    number,
    section_of,
    size,
    text,
    variables,
    word,
)
from gateway.config import GatewayConfig
from stage_worker.config import WorkerConfig
from weights.location import ModelLocation
from wire.addresses import DEFAULT_ADDRESS, Address, local_address, parse_address

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_TAKEN_BY_ALL = {
    "--tls-dir": "security.tls-dir",
    "--deny-list": "security.deny-list",
    "--insecure": "security.insecure",
    "--log-format": "telemetry.log-format",
    "--log-level": "telemetry.log-level",
}
COORDINATOR_KEYS: Mapping[str, str] = {
    **_TAKEN_BY_ALL,
    "--stages": "stages",
    "--model": "model",
    "--dtype": "dtype",
    "--quantize": "quantize",
    "--listen": "coordinator.listen",
    "--http": "coordinator.http",
    "--journal": "coordinator.journal",
    "--drain-timeout": "drain-timeout",
    "--heartbeat": "timeouts.heartbeat",
    "--lease": "timeouts.lease",
    "--recovery-timeout": "timeouts.recovery",
    "--token-file": "security.token-file",
    "--keys-file": "security.keys-file",
    "--enroll-listen": "security.enroll-listen",
    "--ca-dir": "security.ca-dir",
    "--tokens-file": "security.tokens-file",
    "--trace-sample": "telemetry.trace-sample",
}
GATEWAY_KEYS: Mapping[str, str] = {
    **_TAKEN_BY_ALL,
    "--coordinator": "coordinator.host",
    "--listen": "gateways.listen",
    "--dashboard-url": "gateways.dashboard-url",
    "--drain-timeout": "drain-timeout",
    "--keys-file": "security.keys-file",
}
WORKER_KEYS: Mapping[str, str] = {
    **_TAKEN_BY_ALL,
    "--coordinator": "coordinator.host",
    "--name": "workers.name",
    "--device": "workers.device",
    "--memory": "workers.memory",
    "--model": "workers.model",
    "--listen": "workers.listen",
    "--advertise": "workers.advertise",
    "--join-token-file": "security.join-token-file",
    "--enroll": "security.enroll-listen",
}
_host = Key("host", "host name or address at which the others reach the process", host)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What an engine reserves for a process; None leaves it to the engine."""

    cpus: Annotated[float | None, Key("cpus", "CPUs, such as 8 or 0.5 (Slurm: whole ones)", cpu_count)] = None
    memory_bytes: Annotated[int | None, Key("memory", "host memory, such as 32GiB", size)] = None
    gpus: Annotated[int | None, Key("gpus", "GPUs", partial(number, low=0, high=64))] = None


NO_RESOURCES = Resources()
_resources = Key("resources", "what the engine reserves for the process", section_of(Resources))


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorSpec:
    """The coordinator. Without `host` the whole cluster is on one machine."""

    name: Annotated[str, Key("name", "name in units, services and certificates", text)] = "coordinator"
    host: Annotated[str | None, _host] = None
    listen: Annotated[
        str | None,
        Key("listen", "listen address; 0.0.0.0:7480 with a host", flag_value(CoordinatorConfig, "--listen")),
    ] = None
    http: Annotated[
        str | None,
        Key("http", "address of dashboard and metrics, or off", flag_value(CoordinatorConfig, "--http")),
    ] = "127.0.0.1:7481"
    journal: Annotated[
        Path | None,
        Key("journal", "file in which requests survive restarts", flag_value(CoordinatorConfig, "--journal")),
    ] = None
    resources: Annotated[Resources, _resources] = NO_RESOURCES
    flags: Annotated[
        tuple[str, ...],
        Key(
            "flags",
            "further flags of `stageline coordinator`",
            flag_words(CoordinatorConfig, taken=COORDINATOR_KEYS),
        ),
    ] = ()

    @property
    def listen_address(self) -> str:
        """HOST:PORT that it listens on."""
        return self.listen or default_listen_address(DEFAULT_ADDRESS, self.host)

    @property
    def address(self) -> str:
        """HOST:PORT at which the other processes reach it."""
        return _reached_at(self.listen_address, self.host)


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewaySpec:
    """A gateway; without `host` it is on the coordinator's."""

    name: Annotated[str, Key("name", "unique name", text)] = "gateway"
    host: Annotated[str | None, _host] = None
    listen: Annotated[
        str | None,
        Key("listen", "listen address; 0.0.0.0:7482 with a host", flag_value(GatewayConfig, "--listen")),
    ] = None
    dashboard_url: Annotated[
        str | None,
        Key(
            "dashboard-url",
            "dashboard to link to; default the coordinator's, if others reach it",
            flag_value(GatewayConfig, "--dashboard-url"),
        ),
    ] = None
    resources: Annotated[Resources, _resources] = NO_RESOURCES
    flags: Annotated[
        tuple[str, ...],
        Key("flags", "further flags of `stageline gateway`", flag_words(GatewayConfig, taken=GATEWAY_KEYS)),
    ] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """A stage worker; without `host` it is on the coordinator's."""

    name: Annotated[str, Key("name", "unique name, of the worker's certificate too", text)]
    device: Annotated[
        str, Key("device", "cpu, cuda:N, auto or cuda:all", flag_value(WorkerConfig, "--device"))
    ] = "cpu"
    memory_bytes: Annotated[
        int | None,
        Key("memory", "memory of the device to use, such as 20GiB", flag_value(WorkerConfig, "--memory")),
    ] = None
    host: Annotated[str | None, _host] = None
    listen: Annotated[
        str | None,
        Key("listen", "listen address; default a free port", flag_value(WorkerConfig, "--listen")),
    ] = None
    advertise: Annotated[
        str | None,
        Key(
            "advertise",
            "address at which others reach it; default the host with the port of listen",
            flag_value(WorkerConfig, "--advertise"),
        ),
    ] = None
    model: Annotated[
        Path | None,
        Key("model", "checkpoint on its host, if elsewhere", flag_value(WorkerConfig, "--model")),
    ] = None
    resources: Annotated[Resources, _resources] = NO_RESOURCES
    flags: Annotated[
        tuple[str, ...],
        Key("flags", "further flags of `stageline worker`", flag_words(WorkerConfig, taken=WORKER_KEYS)),
    ] = ()

    @property
    def advertised(self) -> str | None:
        """HOST:PORT at which others reach it; None for the address that it listens on."""
        if self.advertise is not None or self.host is None or self.listen is None:
            return self.advertise
        return str(Address(self.host, parse_address(self.listen).port))


@dataclass(frozen=True, kw_only=True, slots=True)
class SecuritySpec:
    """Certificates, keys and tokens: paths of files on the hosts, never secrets."""

    tls_directory: Annotated[
        Path | None,
        Key("tls-dir", "directory with one directory of certificate files per process name", absolute_path),
    ] = None
    insecure: Annotated[
        bool,
        Key(
            "insecure",
            "true to listen beyond a host without certificates",
            flag_value(CoordinatorConfig, "--insecure"),
        ),
    ] = False
    deny_list: Annotated[
        Path | None, Key("deny-list", "certificates to refuse", flag_value(CoordinatorConfig, "--deny-list"))
    ] = None
    keys_file: Annotated[
        Path | None,
        Key("keys-file", "API keys, for gateways and dashboard", flag_value(GatewayConfig, "--keys-file")),
    ] = None
    token_file: Annotated[
        Path | None, Key("token-file", "operator token", flag_value(CoordinatorConfig, "--token-file"))
    ] = None
    enroll_listen: Annotated[
        str | None,
        Key(
            "enroll-listen",
            "address at which workers with a join token get certificates",
            flag_value(CoordinatorConfig, "--enroll-listen"),
        ),
    ] = None
    authority: Annotated[
        Path | None,
        Key("ca-dir", "authority that signs them", flag_value(CoordinatorConfig, "--ca-dir")),
    ] = None
    join_tokens: Annotated[
        Path | None,
        Key("tokens-file", "join tokens, at the coordinator", flag_value(CoordinatorConfig, "--tokens-file")),
    ] = None
    join_token_file: Annotated[
        Path | None,
        Key(
            "join-token-file",
            "join token of workers, which then need no tls-dir",
            flag_value(WorkerConfig, "--join-token-file"),
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.join_token_file is not None and self.enroll_listen is None:
            raise WrongField(("join-token-file",), "needs enroll-listen, ca-dir and tokens-file")


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeoutsSpec:
    """Seconds; None is the default of the flag."""

    heartbeat_s: Annotated[
        float | None,
        Key("heartbeat", "interval of heartbeats", flag_value(CoordinatorConfig, "--heartbeat")),
    ] = None
    lease_s: Annotated[
        float | None,
        Key("lease", "silence after which a worker is lost", flag_value(CoordinatorConfig, "--lease")),
    ] = None
    recovery_s: Annotated[
        float | None,
        Key(
            "recovery",
            "wait of requests for a pipeline",
            flag_value(CoordinatorConfig, "--recovery-timeout"),
        ),
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TelemetrySpec:
    """Logs, traces and metrics of all processes."""

    otlp_endpoint: Annotated[
        str | None, Key("otlp-endpoint", "OTLP collector, such as http://otel:4317", text)
    ] = None
    trace_sample: Annotated[
        float | None,
        Key("trace-sample", "share of requests to trace", flag_value(CoordinatorConfig, "--trace-sample")),
    ] = None
    log_format: Annotated[
        Any, Key("log-format", "console or json", flag_value(CoordinatorConfig, "--log-format"))
    ] = None
    log_level: Annotated[
        Any, Key("log-level", "minimum level", flag_value(CoordinatorConfig, "--log-level"))
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """What only some engines need."""

    program: Annotated[str, Key("program", "`stageline` on the hosts (systemd, slurm, ray)", text)] = (
        "stageline"
    )
    user: Annotated[str, Key("user", "user and group of the processes (systemd)", word)] = "stageline"
    image: Annotated[str, Key("image", "image of a container (compose, kubernetes)", word)] = "stageline"
    partition: Annotated[str | None, Key("partition", "partition (slurm)", word)] = None
    account: Annotated[str | None, Key("account", "account (slurm)", word)] = None
    time: Annotated[str | None, Key("time", "time limit, such as 1-00:00:00 (slurm)", word)] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """A coordinator, its workers and gateways. Raises WrongField."""

    workers: Annotated[tuple[WorkerSpec, ...], Key("workers", "stage workers", list_of(WorkerSpec))]
    name: Annotated[str, Key("name", "name of the cluster, for files and units", text)] = "stageline"
    model: Annotated[
        ModelLocation | None,
        Key(
            "model",
            "checkpoint or its address, by default the built-in model",
            flag_value(CoordinatorConfig, "--model"),
        ),
    ] = None
    stages: Annotated[
        int | None,
        Key("stages", "stages; by default one per worker", flag_value(CoordinatorConfig, "--stages")),
    ] = None
    dtype: Annotated[
        str | None, Key("dtype", "dtype of weights and compute", flag_value(CoordinatorConfig, "--dtype"))
    ] = None
    quantize: Annotated[
        str | None,
        Key("quantize", "int8 or int4 matrices", flag_value(CoordinatorConfig, "--quantize")),
    ] = None
    coordinator: Annotated[
        CoordinatorSpec, Key("coordinator", "the coordinator", section_of(CoordinatorSpec))
    ] = field(default_factory=CoordinatorSpec)
    gateways: Annotated[
        tuple[GatewaySpec, ...],
        Key("gateways", "gateways of the HTTP API; [] for none", list_of(GatewaySpec)),
    ] = (GatewaySpec(),)
    security: Annotated[
        SecuritySpec, Key("security", "certificates, keys and tokens", section_of(SecuritySpec))
    ] = field(default_factory=SecuritySpec)
    drain_timeout_s: Annotated[
        float | None,
        Key(
            "drain-timeout",
            "seconds in which running requests may finish at a stop",
            flag_value(CoordinatorConfig, "--drain-timeout"),
        ),
    ] = None
    timeouts: Annotated[TimeoutsSpec, Key("timeouts", "seconds", section_of(TimeoutsSpec))] = field(
        default_factory=TimeoutsSpec
    )
    environment: Annotated[Mapping[str, str], Key("environment", "variables of all processes", variables)] = (
        field(default_factory=dict)
    )
    telemetry: Annotated[
        TelemetrySpec, Key("telemetry", "logs, traces and metrics", section_of(TelemetrySpec))
    ] = field(default_factory=TelemetrySpec)
    engine: Annotated[EngineSpec, Key("engine", "settings of engines", section_of(EngineSpec))] = field(
        default_factory=EngineSpec
    )

    def __post_init__(self) -> None:
        if not self.workers:
            raise WrongField(("workers",), "is empty: a cluster has at least one worker")
        self._check_names()

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline; workers beyond them are spares."""
        return self.stages or len(self.workers)

    def serving_at(self, address: str, *, dashboard_url: str | None) -> ClusterSpec:
        """This cluster with a running coordinator, whose ports are known."""
        return replace(
            self,
            coordinator=replace(self.coordinator, listen=address),
            gateways=tuple(replace(gateway, dashboard_url=dashboard_url) for gateway in self.gateways),
        )

    def _check_names(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise WrongField(("name",), _NOT_A_NAME.format(self.name))
        users: dict[str, str] = {}
        for path, name in self._names():
            if not _NAME.fullmatch(name):
                raise WrongField((*path, "name"), _NOT_A_NAME.format(name))
            if name in users:
                raise WrongField((*path, "name"), f"{name!r} is the name of {users[name]} too: give another")
            users[name] = path[0] if len(path) == 1 else f"{path[0]}[{path[1]}]"

    def _names(self) -> Iterator[tuple[tuple[Any, ...], str]]:
        yield ("coordinator",), self.coordinator.name
        for index, gateway in enumerate(self.gateways):
            yield ("gateways", index), gateway.name
        for index, worker in enumerate(self.workers):
            yield ("workers", index), worker.name


_NOT_A_NAME = "{!r} is not a name: use 1 to 63 of a-z, 0-9 and '-', with a letter or digit at both ends"


def default_listen_address(default: str, host: str | None) -> str:
    """The listen address of a process: `default`, on all interfaces if it has a host."""
    port = parse_address(default).port
    if host is None:
        return default
    return str(Address("::" if ":" in host else "0.0.0.0", port))


def _reached_at(listening: str, host: str | None) -> str:
    address = parse_address(listening)
    return str(local_address(address) if host is None else Address(host, address.port))
