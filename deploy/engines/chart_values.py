"""Values of the Helm chart: one dataclass from which values.yaml and its schema are made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import yaml

WIDTH = 110
_SCALARS: Mapping[type, str] = {str: "string", int: "integer", bool: "boolean", NoneType: "null"}


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # ships no types
    """Indents lists, as charts do."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
        return super().increase_indent(flow, False)


KubernetesObject = Mapping[str, Any]
"""A part of an object that is Kubernetes's own; its API server checks it."""


class CertificateProvider(Enum):
    """Where the certificates of pods come from."""

    NONE = "none"
    CSI = "csi"
    SECRETS = "secrets"


@dataclass(frozen=True, kw_only=True)
class SecretFiles:
    """A Secret whose keys are the names of files."""

    name: Annotated[str, "name of the volume"]
    secret: Annotated[str, "name of the Secret, which must exist"]
    mount_path: Annotated[str, "directory of the files"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """The checkpoint of coordinator and workers."""

    path: Annotated[str, "directory in the pods"]
    volume: Annotated[KubernetesObject, "any source of a volume: persistentVolumeClaim, image, csi"]


@dataclass(frozen=True, kw_only=True)
class _ProcessSet:
    """Pods with equal settings."""

    replicas: Annotated[int, "their number; of gateways that scale, the least one"]


@dataclass(frozen=True, kw_only=True)
class _Process:
    """What all processes have."""

    args: Annotated[tuple[str, ...], "command line of stageline"]
    ports: Annotated[Mapping[str, int], "ports by name"]
    resources: Annotated[KubernetesObject, "requests and limits"]
    files: Annotated[tuple[SecretFiles, ...], "files with secrets, and others that the command line names"]
    node_selector: Annotated[Mapping[str, str], "labels of its nodes"] = field(default_factory=dict)
    tolerations: Annotated[tuple[KubernetesObject, ...], "taints of nodes that it tolerates"] = ()
    priority_class_name: Annotated[str, "priority class"] = ""
    runtime_class_name: Annotated[str, "runtime class, such as nvidia"] = ""


@dataclass(frozen=True, kw_only=True)
class Coordinator(_Process):
    """The coordinator; its volume has the journal."""

    storage: Annotated[str, "size of its volume"] = "10Gi"
    storage_class: Annotated[str, "storage class; the cluster's default if empty"] = ""


@dataclass(frozen=True, kw_only=True)
class Autoscaling:
    """Number of gateways. Workers are never scaled: the pipeline decides their number."""

    enabled: Annotated[bool, "whether their number changes"] = True
    max_replicas: Annotated[int, "upper limit; replicas is the lower one"] = 8
    cpu_percent: Annotated[int, "use of the requested CPU to aim at"] = 70
    prometheus: Annotated[str, "URL of Prometheus, for scaling by a metric with KEDA; CPU alone if empty"] = (
        ""
    )
    query: Annotated[str, "query of the metric"] = "sum(stageline_gateway_active)"
    threshold: Annotated[str, "value of the metric for each gateway"] = "64"


@dataclass(frozen=True, kw_only=True)
class Gateways(_Process, _ProcessSet):
    """Gateways with equal settings."""

    service_type: Annotated[str, "ClusterIP, NodePort or LoadBalancer"] = "ClusterIP"
    hosts: Annotated[tuple[str, ...], "further host names for the certificate, such as the ingress's"] = ()
    autoscaling: Annotated[Autoscaling, "number of gateways"] = field(default_factory=Autoscaling)


@dataclass(frozen=True, kw_only=True)
class Workers(_Process, _ProcessSet):
    """Workers with equal settings: one StatefulSet."""


@dataclass(frozen=True, kw_only=True)
class Issuer:
    """An issuer of cert-manager, whose authority is for this cluster alone."""

    name: Annotated[str, "name; with provider secrets and no name, the Secrets must exist"] = ""
    kind: Annotated[str, "Issuer or ClusterIssuer"] = "Issuer"


@dataclass(frozen=True, kw_only=True)
class ChartCertificates:
    """Certificates with URIs spiffe://DOMAIN/stageline/CLUSTER/ROLE/NAME."""

    provider: Annotated[
        CertificateProvider,
        "csi: each pod has its own key, by cert-manager's CSI driver; secrets: Secrets NAME-tls, and workers "
        "of a StatefulSet can read each other's keys; none: plain text",
    ]
    trust_domain: Annotated[str, "DOMAIN"]
    issuer: Annotated[Issuer, "issuer of cert-manager"] = field(default_factory=Issuer)
    duration: Annotated[str, "life of a certificate; it is renewed at two thirds"] = "168h"


@dataclass(frozen=True, kw_only=True)
class NetworkPolicy:
    """Who may connect; lists have the form of a NetworkPolicy's `from`."""

    callers: Annotated[
        Mapping[str, tuple[str, ...]], "roles that may call a method of a process, by its role; do not change"
    ]
    enabled: Annotated[bool, "whether pods refuse other connections"] = True
    users: Annotated[tuple[KubernetesObject, ...], "clients and operators, at the coordinator"] = ()
    dashboard: Annotated[
        tuple[KubernetesObject, ...], "users of the dashboard, and Prometheus; by default every namespace"
    ] = ({"namespaceSelector": {}},)
    gateway: Annotated[tuple[KubernetesObject, ...], "users of gateways; all if empty"] = ()


@dataclass(frozen=True, kw_only=True)
class Probes:
    """Probes of kubelet. A loading worker is alive, and not ready before it has joined."""

    startup_seconds: Annotated[int, "time until the first answer"] = 1800
    liveness_failures: Annotated[int, "failures, 10 seconds apart, until a restart"] = 6
    readiness_period_seconds: Annotated[int, "interval of readiness probes"] = 5
    timeout_seconds: Annotated[int, "time for an answer"] = 5


@dataclass(frozen=True, kw_only=True)
class SecretKey:
    """A key of a Secret."""

    secret: Annotated[str, "name of the Secret"]
    key: Annotated[str, "key in it"]


@dataclass(frozen=True, kw_only=True)
class Monitoring:
    """Objects of the Prometheus operator, where it is installed."""

    enabled: Annotated[bool, "whether Prometheus scrapes the processes"] = True
    interval: Annotated[str, "interval of scrapes"] = "15s"
    authority: Annotated[SecretKey | None, "certificate of the authority, for Prometheus"] = None
    api_key: Annotated[SecretKey | None, "API key of role viewer, if there are keys"] = None
    alerts: Annotated[bool, "whether there are rules for alerts"] = True


@dataclass(frozen=True, kw_only=True)
class LeaderWorkerSet:
    """Several whole pipelines, each with a coordinator and gateway, instead of one."""

    enabled: Annotated[bool, "needs the LeaderWorkerSet controller"] = False
    pipelines: Annotated[int, "their number"] = 2
    exclusive_topology: Annotated[str, "label of nodes that a pipeline has for itself"] = ""


@dataclass(frozen=True, kw_only=True)
class ChartValues:
    """Values of the chart."""

    name: Annotated[str, "name of the cluster: first part of all names, and CLUSTER in certificates"]
    image: Annotated[str, "image with stageline in its PATH"]
    environment: Annotated[Mapping[str, str], "variables of all processes"]
    model: Annotated[Model | None, "checkpoint; null for the built-in model"]
    drain_timeout: Annotated[int, "seconds in which running requests may finish at a stop"]
    coordinator: Annotated[Coordinator, "the coordinator"]
    gateways: Annotated[Mapping[str, Gateways], "gateways of the HTTP API, by the name of their Deployment"]
    workers: Annotated[Mapping[str, Workers], "stage workers, by the name of their StatefulSet"]
    certificates: Annotated[ChartCertificates, "certificates"]
    network_policy: Annotated[NetworkPolicy, "who may connect"]
    probes: Annotated[Probes, "probes"] = field(default_factory=Probes)
    monitoring: Annotated[Monitoring, "metrics and alerts"] = field(default_factory=Monitoring)
    leader_worker_set: Annotated[LeaderWorkerSet, "several pipelines"] = field(
        default_factory=LeaderWorkerSet
    )
    image_pull_policy: Annotated[str, "when the image is pulled"] = "IfNotPresent"
    image_pull_secrets: Annotated[tuple[KubernetesObject, ...], "names of Secrets for the registry"] = ()
    user: Annotated[int, "user and group of the processes"] = 10001
    cache_size: Annotated[str, "limit of a pod's cache"] = "2Gi"
    tmp_size: Annotated[str, "limit of temporary files and of the state of gateways and workers"] = "1Gi"
    spread: Annotated[str, "ScheduleAnyway, or DoNotSchedule: never two workers on a node"] = "ScheduleAnyway"
    endpoint_removal: Annotated[int, "seconds until no node sends connections to a stopping gateway"] = 10


def values_yaml(values: ChartValues, *, head: str) -> str:
    """The text of values.yaml, each key with its meaning."""
    return "\n".join((head.rstrip(), *_section_lines(values, 0, is_explained=True), ""))


def values_schema() -> dict[str, Any]:
    """JSON schema of values.yaml: Helm refuses unknown keys and values of other types."""
    schema = _schema(ChartValues)
    # Helm gives every chart this key.
    schema["properties"]["global"] = {"type": "object"}
    return {"$schema": "https://json-schema.org/draft-07/schema#", **schema}


def plain_values(value: Any) -> Any:
    """Mappings, lists and scalars of values, with the keys of values.yaml."""
    if is_dataclass(value):
        return {_key(item.name): plain_values(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {name: plain_values(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [plain_values(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def _key(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(part.capitalize() for part in others)


def _meanings(section: type) -> dict[str, str]:
    hints = get_type_hints(section, include_extras=True)
    return {item.name: hints[item.name].__metadata__[0] for item in fields(section)}


def _section_lines(section: Any, indent: int, *, is_explained: bool) -> Iterator[str]:
    pad = " " * indent
    meanings = _meanings(type(section))
    for item in fields(section):
        value = getattr(section, item.name)
        if is_explained:
            yield from _comment(meanings[item.name], pad)
        key = f"{pad}{_key(item.name)}:"
        if is_dataclass(value):
            yield key
            yield from _section_lines(value, indent + 2, is_explained=is_explained)
        elif isinstance(value, Mapping) and value and all(map(is_dataclass, value.values())):
            yield key
            for number, (name, below) in enumerate(value.items()):
                yield f"{pad}  {name}:"
                yield from _section_lines(below, indent + 4, is_explained=is_explained and number == 0)
        elif isinstance(value, tuple) and value and is_dataclass(value[0]):
            yield key
            yield from _list_lines(value, indent + 2, is_explained=is_explained)
        else:
            yield from _value_lines(item.name, value, pad)


def _list_lines(sections: tuple[Any, ...], indent: int, *, is_explained: bool) -> Iterator[str]:
    for number, section in enumerate(sections):
        lines = list(_section_lines(section, indent + 2, is_explained=is_explained and number == 0))
        first = next(index for index, line in enumerate(lines) if not line.lstrip().startswith("#"))
        yield from (line[2:] for line in lines[:first])
        yield f"{' ' * indent}- {lines[first].lstrip()}"
        yield from lines[first + 1 :]


def _value_lines(name: str, value: Any, pad: str) -> Iterator[str]:
    entry = {_key(name): plain_values(value)}
    text = yaml.dump(entry, Dumper=_Dumper, sort_keys=False, width=WIDTH, allow_unicode=True)
    yield from (pad + line for line in text.splitlines())


def _comment(text: str, pad: str) -> Iterator[str]:
    line = f"{pad}#"
    sentence = text if text.partition(" ")[0].endswith(":") else text[0].upper() + text[1:]
    for word in f"{sentence}.".split():
        if len(line) + 1 + len(word) > WIDTH:
            yield line
            line = f"{pad}#"
        line += f" {word}"
    yield line


def _schema(kind: Any) -> dict[str, Any]:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _SCALARS:
        return {"type": _SCALARS[kind]}
    if is_dataclass(kind):
        return _section_schema(kind)  # type: ignore[arg-type]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    if origin in (Union, UnionType):
        return {"anyOf": [_schema(argument) for argument in arguments]}
    if origin is tuple:
        return {"type": "array", "items": _schema(arguments[0])}
    assert origin is not None and issubclass(origin, Mapping), kind
    values = {} if arguments[1] is Any else {"additionalProperties": _schema(arguments[1])}
    return {"type": "object", **values}


def _section_schema(section: type) -> dict[str, Any]:
    hints, meanings = get_type_hints(section), _meanings(section)
    properties = {
        _key(item.name): {"description": meanings[item.name], **_schema(hints[item.name])}
        for item in fields(section)
    }
    # Helm removes a key that is null.
    required = [
        name for name, schema in properties.items() if {"type": "null"} not in schema.get("anyOf", ())
    ]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
