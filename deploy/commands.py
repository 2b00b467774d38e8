"""The command line of every process of a cluster: the only place that makes one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from certificates.identity import Role
from checkpoint.gguf.files import SUFFIX
from coordinator.config import CoordinatorConfig
from deploy.spec.cluster_spec import (
    COORDINATOR_KEYS,
    GATEWAY_KEYS,
    WORKER_KEYS,
    ClusterSpec,
    GatewaySpec,
    Resources,
    WorkerSpec,
    default_listen_address,
)
from deploy.spec.document import PathPart, WrongField, read_document
from deploy.spec.fields import flags_of, parse_words, read_section, words_of
from gateway.config import DEFAULT_HTTP_ADDRESS, GatewayConfig
from stage_worker.config import WorkerConfig
from weights.location import ModelLocation
from wire.addresses import Address, local_address, parse_address
from wire.flags import OFF, unread_variable, variables_of
from wire.transport import is_loopback_host

CONFIGS: Mapping[Role, type] = {
    Role.COORDINATOR: CoordinatorConfig,
    Role.WORKER: WorkerConfig,
    Role.GATEWAY: GatewayConfig,
}
GRACE_S = 30.0
"""Time for the end of a process beyond its drain."""
_WRITTEN = ("--journal", "--tokens-file", "--audit-log", "--cache-dir")
_SECRET = ("--token-file", "--join-token-file")
_REREAD = ("--keys-file", "--deny-list")
"""Flags of files that a process reads again when another file replaces them."""
_OF_ITS_HOST = ("--threads", "--cpu-set")
"""Flags whose limits only the host of the process knows."""
_KEYS: Mapping[Role, Mapping[str, str]] = {
    Role.COORDINATOR: COORDINATOR_KEYS,
    Role.WORKER: WORKER_KEYS,
    Role.GATEWAY: GATEWAY_KEYS,
}
"""Keys of the file that set flags."""
_PORTS = {
    "--listen": "rpc",
    "--http": "dashboard",
    "--enroll-listen": "enrolment",
    "--payload-listen": "payloads",
    "--weights-listen": "weights",
    "--health-listen": "health",
}


@dataclass(frozen=True, slots=True)
class UsedPath:
    """A path that a process is given; `is_written` with its directory, `is_secret` read once at the start."""

    flag: str
    path: Path
    is_written: bool
    is_secret: bool

    @property
    def mounted(self) -> Path:
        """What a container needs of the host.

        A mounted file stays the one that it was when another replaces it. So files that are replaced, or
        made, come with their directory.
        """
        if self.flag == "--model":
            return mounted_model(self.path)
        return self.path.parent if self.is_written or self.flag in _REREAD else self.path


def mounted_model(path: Path) -> Path:
    """The directory of a checkpoint, also of a GGUF file, which may be one of several."""
    return path.parent if path.suffix == SUFFIX else path


@dataclass(frozen=True, slots=True)
class Port:
    """A port on which a process listens."""

    name: str
    address: Address


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessCommand:
    """One process. `argv` is without the program; `host` is None where the coordinator's is."""

    role: Role
    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    host: str | None
    resources: Resources
    model: ModelLocation | None = None
    """The checkpoint of a worker whose command line leaves its path to the coordinator."""

    def listening_on(self, address: str) -> ProcessCommand:
        """This process at another listen address."""
        words = list(self.argv)
        words[words.index("--listen") + 1] = address
        return replace(self, argv=tuple(words))

    @property
    def config_type(self) -> type:
        """The config that the process makes of its command line."""
        return CONFIGS[self.role]

    def values(self) -> dict[str, Any]:
        """The values of its flags. Raises ValueError for a flag that it does not have."""
        return parse_words(self.config_type, self.argv[1:])

    @property
    def ports(self) -> tuple[Port, ...]:
        """Ports with a known number."""
        found = ((_PORTS[flag], value) for flag, value in self.values().items() if flag in _PORTS)
        ports = (Port(name, parse_address(value)) for name, value in found if value not in (None, OFF))
        return tuple(port for port in ports if port.address.port)

    @property
    def paths(self) -> tuple[UsedPath, ...]:
        """Paths that it reads and writes."""
        values = self.values() if self.model is None else {**self.values(), "--model": self.model}
        each = ((flag, path) for flag, value in values.items() for path in _as_tuple(value))
        return tuple(
            UsedPath(flag, path, flag in _WRITTEN, flag in _SECRET)
            for flag, path in each
            if isinstance(path, Path)
        )

    @property
    def uses_gpu(self) -> bool:
        """Whether it is a worker on a GPU."""
        return self.role is Role.WORKER and self.values().get("--device", "cpu") != "cpu"

    @property
    def num_gpus(self) -> int:
        """GPUs that an engine reserves for it: by default one for a worker on a GPU."""
        given = self.resources.gpus
        return int(self.uses_gpu) if given is None else given

    def config(self) -> Any:
        """The config of the process. Raises ValueError as the process itself would, except for its host."""
        sections: defaultdict[str | None, dict[str, Any]] = defaultdict(dict)
        for flag, value in self.values().items():
            if flag not in _OF_ITS_HOST:
                setting = flags_of(self.config_type)[flag]
                sections[setting.section][setting.attribute] = value
        types = get_type_hints(self.config_type)
        values = sections.pop(None, {})
        for section, given in sections.items():
            assert section is not None
            values[section] = types[section](**given)
        return self.config_type(**values)


def commands(spec: ClusterSpec) -> tuple[ProcessCommand, ...]:
    """Every process: the coordinator, the gateways, the workers."""
    return (
        coordinator_command(spec),
        *(gateway_command(spec, gateway) for gateway in spec.gateways),
        *(worker_command(spec, worker) for worker in spec.workers),
    )


def coordinator_command(spec: ClusterSpec) -> ProcessCommand:
    """The coordinator."""
    coordinator, security, timeouts = spec.coordinator, spec.security, spec.timeouts
    serves_page = coordinator.http is not None and not _is_loopback(coordinator.http)
    values = {
        "--listen": coordinator.listen_address,
        "--stages": spec.num_stages,
        "--model": spec.model,
        "--dtype": spec.dtype,
        "--quantize": spec.quantize,
        "--journal": coordinator.journal,
        "--token-file": security.token_file,
        "--keys-file": security.keys_file if serves_page else None,
        "--enroll-listen": security.enroll_listen,
        "--ca-dir": security.authority,
        "--tokens-file": security.join_tokens,
        "--drain-timeout": spec.drain_timeout_s,
        "--heartbeat": timeouts.heartbeat_s,
        "--lease": timeouts.lease_s,
        "--recovery-timeout": timeouts.recovery_s,
        "--trace-sample": spec.telemetry.trace_sample,
    }
    page = words_of(CoordinatorConfig, {"--http": coordinator.http})
    return ProcessCommand(
        role=Role.COORDINATOR,
        name=coordinator.name,
        argv=(
            "coordinator",
            *_last_given(
                *_given(CoordinatorConfig, values),
                *page,
                *_shared(spec, Role.COORDINATOR, coordinator.name),
                *coordinator.flags,
            ),
        ),
        environment=_environment(spec),
        host=coordinator.host,
        resources=coordinator.resources,
    )


def gateway_command(spec: ClusterSpec, gateway: GatewaySpec) -> ProcessCommand:
    """A gateway."""
    host = gateway.host or spec.coordinator.host
    values = {
        "--coordinator": spec.coordinator.address,
        "--listen": gateway.listen or default_listen_address(DEFAULT_HTTP_ADDRESS, host),
        "--dashboard-url": gateway.dashboard_url or _dashboard_url(spec),
        "--keys-file": spec.security.keys_file,
        "--drain-timeout": spec.drain_timeout_s,
    }
    return ProcessCommand(
        role=Role.GATEWAY,
        name=gateway.name,
        argv=(
            "gateway",
            *_last_given(
                *_given(GatewayConfig, values), *_shared(spec, Role.GATEWAY, gateway.name), *gateway.flags
            ),
        ),
        environment=_environment(spec),
        host=host,
        resources=gateway.resources,
    )


def worker_command(spec: ClusterSpec, worker: WorkerSpec) -> ProcessCommand:
    """A stage worker."""
    security = spec.security
    enroll = security.enroll_listen if security.join_token_file is not None else None
    values = {
        "--coordinator": spec.coordinator.address,
        "--name": worker.name,
        "--listen": worker.listen,
        "--advertise": worker.advertised,
        "--memory": worker.memory_bytes,
        "--device": None if worker.device == "cpu" else worker.device,
        "--model": worker.model,
        "--join-token-file": security.join_token_file,
        "--enroll": None if enroll is None else _enrolment_address(spec, enroll),
    }
    return ProcessCommand(
        role=Role.WORKER,
        name=worker.name,
        argv=(
            "worker",
            *_last_given(
                *_given(WorkerConfig, values), *_shared(spec, Role.WORKER, worker.name), *worker.flags
            ),
        ),
        environment=_environment(spec),
        host=worker.host or spec.coordinator.host,
        resources=worker.resources,
        model=spec.model if worker.model is None else None,
    )


def drain_timeout_s(spec: ClusterSpec) -> float:
    """Seconds in which a process that is stopped ends by itself."""
    longest = max(
        flags_of(config)["--drain-timeout"].default for config in (CoordinatorConfig, GatewayConfig)
    )
    return float(spec.drain_timeout_s or longest) + GRACE_S


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _last_given(*words: str) -> list[str]:
    """Leave out flags that are given again: those of a process replace those of its cluster."""
    parts: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not parts:
            parts.append([])
        parts[-1].append(word)
    last = {part[0].partition("=")[0]: index for index, part in enumerate(parts)}
    return [word for index in sorted(last.values()) for word in parts[index]]


def _given(config: type, values: Mapping[str, Any]) -> list[str]:
    return words_of(config, {flag: value for flag, value in values.items() if value is not None})


def _shared(spec: ClusterSpec, role: Role, name: str) -> list[str]:
    security, telemetry = spec.security, spec.telemetry
    enrols = role is Role.WORKER and security.join_token_file is not None
    directory = None if security.tls_directory is None or enrols else security.tls_directory / name
    return _given(
        CONFIGS[role],
        {
            "--tls-dir": directory,
            "--deny-list": security.deny_list,
            "--insecure": True if security.insecure else None,
            "--log-format": telemetry.log_format,
            "--log-level": telemetry.log_level,
        },
    )


def _environment(spec: ClusterSpec) -> dict[str, str]:
    endpoint = spec.telemetry.otlp_endpoint
    exported = {} if endpoint is None else {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
    return {**exported, **spec.environment}


def _dashboard_url(spec: ClusterSpec) -> str | None:
    """URL of the dashboard for readers of the gateway's page; None where they cannot reach it."""
    if spec.coordinator.http is None:
        return None
    address, host = parse_address(spec.coordinator.http), spec.coordinator.host
    if address.port == 0 or (host is not None and _is_loopback(spec.coordinator.http)):
        return None
    scheme = "http" if spec.security.tls_directory is None else "https"
    return f"{scheme}://{local_address(address) if host is None else Address(host, address.port)}/"


def _enrolment_address(spec: ClusterSpec, listen: str) -> str:
    reached = parse_address(spec.coordinator.address)
    return str(Address(reached.host, parse_address(listen).port))


def _is_loopback(address: str) -> bool:
    return is_loopback_host(parse_address(address).host)


def read_cluster_spec(file: Path) -> ClusterSpec:
    """Read a cluster file. Raises SpecError with FILE:LINE and the path of the field, or OSError."""
    document = read_document(file)
    spec = read_section(ClusterSpec, document)
    try:
        check(spec)
    except WrongField as error:
        raise document.error_at(error) from None
    return spec


def check(spec: ClusterSpec) -> None:
    """Make the config of every process. Raises WrongField with what the process would reject."""
    if spec.num_stages > len(spec.workers):
        num_workers = len(spec.workers)
        raise WrongField(("stages",), f"is {spec.num_stages}, the limit is one per worker: {num_workers}")
    _check_hosts(spec)
    _check_environment(spec)
    places: list[tuple[PathPart, ...]] = [("coordinator",)]
    places += [("gateways", index) for index in range(len(spec.gateways))]
    places += [("workers", index) for index in range(len(spec.workers))]
    for place, command in zip(places, commands(spec), strict=True):
        try:
            config = command.config()
            if isinstance(config, CoordinatorConfig):
                config.check_enrolment()
        except ValueError as error:
            raise _wrong_field(place, command.role, str(error)) from None


def check_ports(together: Iterable[ProcessCommand]) -> None:
    """Raises WrongField if two processes of one host listen on one port."""
    users: dict[int, str] = {}
    for command in together:
        section = "coordinator" if command.role is Role.COORDINATOR else f"{command.role.value}s"
        for port in command.ports:
            number = port.address.port
            if (other := users.get(number)) is not None:
                both = f"{command.name!r} and {other!r} both listen"
                twice = f"{command.name!r} listens twice"
                raise WrongField((section,), f"{twice if other == command.name else both} on port {number}")
            users[number] = command.name


def _wrong_field(place: tuple[PathPart, ...], role: Role, text: str) -> WrongField:
    """An error of a process in the words of the file: at its key, if it names a flag first."""
    keys = _KEYS[role]
    first = text.partition(" ")[0].removeprefix("--").replace("_", "-")
    if (key := keys.get(f"--{first}")) is not None:
        section, _, name = key.rpartition(".")
        place = (*place, name) if section in ("workers", "gateways") else tuple(key.split("."))
    for flag, key in keys.items():
        text = re.sub(rf"(?<![\w-]){flag}(?![\w-])", key, text)
    return WrongField(place, text)


def _check_hosts(spec: ClusterSpec) -> None:
    elsewhere = [worker.name for worker in spec.workers if worker.host is not None]
    elsewhere += [gateway.name for gateway in spec.gateways if gateway.host is not None]
    if spec.coordinator.host is None and elsewhere:
        raise WrongField(("coordinator", "host"), f"is missing: {elsewhere[0]!r} is on a host of its own")


def _check_environment(spec: ClusterSpec) -> None:
    for role, config in CONFIGS.items():
        for name in variables_of(config):
            if name in spec.environment:
                raise WrongField(
                    ("environment", name), f"is a flag of the {role.value}: set it by its key, or under flags"
                )
    if (problem := unread_variable(spec.environment, lambda: tuple(CONFIGS.values()))) is not None:
        raise WrongField(("environment",), problem)
