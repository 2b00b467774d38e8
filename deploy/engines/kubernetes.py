"""A Helm chart: the one of `deploy/kubernetes`, with values made from a cluster file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from os.path import commonpath
from pathlib import Path
from typing import Any

from certificates.identity import DEFAULT_TRUST_DOMAIN, Role
from deploy.commands import GRACE_S as END_S
from deploy.commands import ProcessCommand, check, commands, drain_timeout_s, mounted_model
from deploy.engines.chart_values import (
    CertificateProvider,
    ChartCertificates,
    ChartValues,
    Coordinator,
    Gateways,
    KubernetesObject,
    Model,
    NetworkPolicy,
    SecretFiles,
    Workers,
    values_schema,
    values_yaml,
)
from deploy.engines.rendered import RenderedFile
from deploy.spec.cluster_spec import ClusterSpec, CoordinatorSpec, GatewaySpec, Resources, WorkerSpec
from deploy.spec.document import PathPart, WrongField
from deploy.spec.fields import words_of
from stage_worker.config import ALL_GPUS
from wire.authorization import ROLES_OF_METHOD
from wire.transport import is_loopback_host

CHART = Path(__file__).parents[1] / "kubernetes"
VALUES, SCHEMA = "values.yaml", "values.schema.json"
ALERTS = CHART.with_name("observability") / "alerts.yaml"
_OTHERS = (VALUES, SCHEMA, ALERTS.name, "cluster.yaml")
_HEAD = """\
# Values of the chart, made from a cluster file by `stageline deploy render kubernetes`. Give your own ones in
# another file, such as tolerations: helm install NAME DIR -f site.yaml
"""
_STATE = Path("/var/lib/stageline")
_CACHE = Path("/var/cache/stageline")
_WRITTEN_FILES = ("--journal", "--audit-log")
# Stand for names that only Kubernetes knows, while the command lines are made and checked.
_COORDINATOR_HOST, _POD_HOST = "coordinator.invalid", "pod.invalid"
_TLS_DIRECTORY = Path("/tls.invalid")
_HEALTH_LISTEN, _HEALTH_PORT = "--health-listen", 7485
_WORKER_LISTEN, _PAYLOAD_PORT, _WEIGHTS_PORT = "0.0.0.0:7480", 7484, 7486
SERVED_BY: Mapping[Role, tuple[str, ...]] = {
    Role.COORDINATOR: (
        "stageline.v1.",
        "stageline.internal.v1.MembershipService/",
        "stageline.internal.v1.StepResultsService/",
        "opentelemetry.",
    ),
    Role.WORKER: ("stageline.internal.v1.StageService/",),
}
"""Services by the role of the process that has them, but health checks and reflection."""
_LEAST: Mapping[Role, KubernetesObject] = {
    Role.COORDINATOR: {"cpu": "500m", "memory": "1Gi"},
    Role.GATEWAY: {"cpu": "500m", "memory": "512Mi"},
    Role.WORKER: {},
}
"""Requests of a process without `resources`; autoscaling needs the requests of gateways."""


def render(spec: ClusterSpec) -> tuple[RenderedFile, ...]:
    """A chart directory. Raises WrongField."""
    values = values_yaml(chart_values(spec), head=_HEAD)
    schema = json.dumps(values_schema(), indent=2) + "\n"
    made = {VALUES: values, SCHEMA: schema, ALERTS.name: ALERTS.read_text(encoding="utf-8")}
    return (*_chart_files(), *(RenderedFile(name, text) for name, text in made.items()))


def chart_values(spec: ClusterSpec) -> ChartValues:
    """The values of a cluster. Raises WrongField."""
    _check(spec)
    placed = _placed(spec)
    check(placed)
    coordinator, *others = commands(placed)
    gateways = [command for command in others if command.role is Role.GATEWAY]
    workers = [command for command in others if command.role is Role.WORKER]
    gateway_sets, worker_sets = _groups(gateways), _groups(workers)
    _check_names(spec.name, tuple(gateway_sets), tuple(worker_sets))
    return ChartValues(
        name=spec.name,
        image=spec.engine.image,
        environment={name: _escaped(value) for name, value in coordinator.environment.items()},
        model=_model(spec.model) if isinstance(spec.model, Path) else None,
        drain_timeout=round(drain_timeout_s(spec) - END_S),
        coordinator=Coordinator(**_process(spec, coordinator)),
        gateways={
            name: Gateways(replicas=len(group), **_process(spec, group[0]))
            for name, group in gateway_sets.items()
        },
        workers={
            name: Workers(replicas=len(group), **_process(spec, group[0]))
            for name, group in worker_sets.items()
        },
        certificates=_certificates(spec),
        network_policy=NetworkPolicy(callers={role.value: _callers(role) for role in SERVED_BY}),
    )


def _certificates(spec: ClusterSpec) -> ChartCertificates:
    has_any = spec.security.tls_directory is not None
    provider = CertificateProvider.SECRETS if has_any else CertificateProvider.NONE
    return ChartCertificates(provider=provider, trust_domain=DEFAULT_TRUST_DOMAIN)


def _chart_files() -> Iterator[RenderedFile]:
    for path in sorted(CHART.rglob("*")):
        name = str(path.relative_to(CHART))
        if path.is_file() and name not in _OTHERS:
            yield RenderedFile(name, path.read_text(encoding="utf-8"))


def _check(spec: ClusterSpec) -> None:
    """What Kubernetes decides itself, or cannot do."""
    security = spec.security
    if spec.coordinator.host is not None:
        raise WrongField(("coordinator", "host"), _CHOOSES_NODES)
    if spec.coordinator.listen is not None:
        raise WrongField(("coordinator", "listen"), _CHOOSES_ADDRESSES)
    if security.enroll_listen is not None or security.join_token_file is not None:
        raise WrongField(
            ("security", "enroll-listen"),
            "Kubernetes has certificates by tls-dir: remove the keys of join tokens",
        )
    for place, process in _placed_processes(spec):
        if process.host is not None:
            raise WrongField((*place, "host"), _CHOOSES_NODES)
        if process.listen is not None:
            raise WrongField((*place, "listen"), _CHOOSES_ADDRESSES)
    for index, worker in enumerate(spec.workers):
        _check_worker(("workers", index), worker)


_CHOOSES_NODES = "Kubernetes chooses the nodes of pods: remove the key, and set nodeSelector in the values"
_CHOOSES_ADDRESSES = "the chart chooses the addresses of pods: remove the key"


def _check_names(name: str, gateways: tuple[str, ...], workers: tuple[str, ...]) -> None:
    """Names that Kubernetes would refuse, and names that the chart gives to objects of its own."""
    if name[0].isdigit():
        raise WrongField(("name",), f"{name!r} begins with a digit: names of services begin with a letter")
    sets = [(_COORDINATOR, ("coordinator",))]
    sets += [(gateway, ("gateways",)) for gateway in gateways]
    sets += [(worker, ("workers",)) for worker in workers]
    for found, place in sets:
        if place != ("coordinator",) and found in (_COORDINATOR, _WORKERS):
            raise WrongField(place, f"{found!r} is a name of the chart's own: give others")
        if len(full := f"{name}-{found}") > _LONGEST_NAME:
            limit = f"the limit of Kubernetes is {_LONGEST_NAME}"
            raise WrongField(
                ("name",), f"makes {full!r}, which has {len(full)} characters, {limit}: shorten it"
            )


_COORDINATOR, _WORKERS = "coordinator", "workers"
_LONGEST_NAME = 52
"""Of a StatefulSet: a label of its pods has a hash of 11 characters more, and at most 63."""


def _placed_processes(
    spec: ClusterSpec,
) -> Iterator[tuple[tuple[PathPart, ...], GatewaySpec | WorkerSpec]]:
    for index, gateway in enumerate(spec.gateways):
        yield ("gateways", index), gateway
    for index, worker in enumerate(spec.workers):
        yield ("workers", index), worker


def _check_worker(place: tuple[PathPart, ...], worker: WorkerSpec) -> None:
    if worker.advertise is not None:
        raise WrongField((*place, "advertise"), _CHOOSES_ADDRESSES)
    if worker.model is not None:
        raise WrongField((*place, "model"), "all pods have the model at one path: remove the key")
    if worker.device == ALL_GPUS:
        raise WrongField((*place, "device"), f"is {ALL_GPUS}, and a pod runs one worker: name one per GPU")
    number = int(worker.device.partition(":")[2] or 0)
    if number >= (worker.resources.gpus or 1):
        raise WrongField(
            (*place, "device"), f"is {worker.device}, and a pod sees its own GPUs only, from cuda:0: use cuda"
        )


def _placed(spec: ClusterSpec) -> ClusterSpec:
    """The cluster with the addresses of pods, and with a journal, as any node may be drained."""
    coordinator, security = spec.coordinator, spec.security
    has_login = security.insecure or (security.token_file or security.keys_file) is not None
    http = coordinator.http
    if http == CoordinatorSpec().http and has_login:
        http = "0.0.0.0:7481"
    return replace(
        spec,
        coordinator=replace(
            coordinator,
            host=_COORDINATOR_HOST,
            http=http,
            journal=coordinator.journal or _STATE / "journal",
            flags=(*coordinator.flags, *_health_words()),
        ),
        workers=tuple(_placed_worker(worker) for worker in spec.workers),
        security=replace(security, tls_directory=None if security.tls_directory is None else _TLS_DIRECTORY),
    )


def _placed_worker(worker: WorkerSpec) -> WorkerSpec:
    ports = [("payload", _PAYLOAD_PORT)]
    if "--mock" not in worker.flags:
        ports.append(("weights", _WEIGHTS_PORT))
    words = (word for name, port in ports for word in _port_words(worker, name, port))
    return replace(
        worker,
        host=_POD_HOST,
        listen=_WORKER_LISTEN,
        flags=(*worker.flags, *words, *_health_words()),
    )


def _port_words(worker: WorkerSpec, name: str, port: int) -> tuple[str, ...]:
    """A fixed port, as the chart's network policies would close one that changes."""
    if f"--{name}-listen" in worker.flags:
        return ()
    return f"--{name}-listen", f"0.0.0.0:{port}", f"--{name}-advertise", f"{_POD_HOST}:{port}"


def _health_words() -> tuple[str, str]:
    return _HEALTH_LISTEN, f"0.0.0.0:{_HEALTH_PORT}"


def _groups(found: Iterable[ProcessCommand]) -> dict[str, list[ProcessCommand]]:
    """Processes with equal settings, by the name of their set: what their names begin with."""
    equal: dict[Any, list[ProcessCommand]] = {}
    for command in found:
        equal.setdefault((_args(command), command.resources), []).append(command)
    groups: dict[str, list[ProcessCommand]] = {}
    for group in equal.values():
        name = _common_name(group)
        taken = (f"{name}{suffix}" for suffix in ("", *(f"-{chr(letter)}" for letter in range(98, 123))))
        groups[next(name for name in taken if name not in groups)] = group
    return groups


def _common_name(group: list[ProcessCommand]) -> str:
    """The words that all names begin with: gpu of gpu-0 and gpu-1."""
    words = commonpath([command.name.replace("-", os.sep) for command in group])
    return words.replace(os.sep, "-") or group[0].role.value


def _process(spec: ClusterSpec, command: ProcessCommand) -> dict[str, Any]:
    return {
        "args": _args(command),
        "ports": {
            "http" if command.role is Role.GATEWAY else port.name: port.address.port
            for port in command.ports
            if not is_loopback_host(port.address.host)
        },
        "resources": _resources(command),
        "files": tuple(_files(spec, command)),
    }


def _args(command: ProcessCommand) -> tuple[str, ...]:
    """The words of the process, with the paths of the pod and the names that only Kubernetes knows."""
    values = {flag: _relocated(flag, value) for flag, value in command.values().items()}
    if "--name" in values:
        values["--name"] = "$(POD_NAME)"
    if _COORDINATOR_HOST in values.get("--dashboard-url", ""):
        # Browsers do not know the names of pods.
        del values["--dashboard-url"]
    words = words_of(command.config_type, values)
    return (command.argv[0], *(_with_variables(word, values) for word in words))


def _with_variables(word: str, values: Mapping[str, Any]) -> str:
    if word == "$(POD_NAME)":
        return word
    if word == str(values.get("--tls-dir")):
        return "$(TLS_DIR)"
    found = _escaped(word)
    for host, variable in ((_COORDINATOR_HOST, "COORDINATOR_HOST"), (_POD_HOST, "POD_HOST")):
        found = found.replace(host, f"$({variable})")
    return found


def _escaped(text: str) -> str:
    """Text in which Kubernetes expands nothing."""
    return text.replace("$", "$$")


def _relocated(flag: str, value: Any) -> Any:
    """The path in a pod of a file that the cluster file names."""
    if isinstance(value, tuple):
        return tuple(_relocated(flag, item) for item in value)
    if not isinstance(value, Path) or flag in ("--tls-dir", "--model"):
        return value
    if flag in _WRITTEN_FILES:
        return _STATE / value.name
    if flag == "--cache-dir":
        return _CACHE / "weights"
    return Path(_directory(flag)) / value.name


def _directory(flag: str) -> str:
    return f"/etc/stageline/{flag.removeprefix('--')}"


def _files(spec: ClusterSpec, command: ProcessCommand) -> Iterator[SecretFiles]:
    found = (used.flag for used in command.paths if not used.is_written)
    for flag in dict.fromkeys(found):
        if flag not in ("--tls-dir", "--model", *_WRITTEN_FILES):
            name = flag.removeprefix("--")
            yield SecretFiles(name=name, secret=f"{spec.name}-{name}", mount_path=_directory(flag))


def _resources(command: ProcessCommand) -> KubernetesObject:
    resources: Resources = command.resources
    requests: dict[str, Any] = dict(_LEAST[command.role])
    limits: dict[str, Any] = {}
    if resources.cpus is not None:
        requests["cpu"] = resources.cpus
    if resources.memory_bytes is not None:
        requests["memory"] = limits["memory"] = _quantity(resources.memory_bytes)
    if command.num_gpus:
        limits["nvidia.com/gpu"] = command.num_gpus
    return {name: value for name, value in (("requests", requests), ("limits", limits)) if value}


def _quantity(size_bytes: int) -> str:
    for unit, size in (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10)):
        if size_bytes % size == 0:
            return f"{size_bytes // size}{unit}"
    return str(size_bytes)


def _model(path: Path) -> Model:
    directory = str(mounted_model(path))
    return Model(path=directory, volume={"hostPath": {"path": directory, "type": "Directory"}})


def _callers(server: Role) -> tuple[str, ...]:
    """Roles with a method of a process in the table of authorisation, besides those open to everyone."""
    found: set[Role] = set()
    for method, roles in ROLES_OF_METHOD.items():
        if method.lstrip("/").startswith(SERVED_BY[server]) and roles != frozenset(Role):
            found |= roles
    return tuple(sorted(role.value for role in found))
