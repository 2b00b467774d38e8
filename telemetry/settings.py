"""OpenTelemetry's standard environment variables.

https://opentelemetry.io/docs/specs/otel/protocol/exporter/

https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/ -- endpoints, headers,
certificates, compression and timeouts are read by the exporters themselves.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes

from wire.foreign_text import parse_digits

_COMPRESSIONS = ("none", "gzip", "deflate")
_FILES = ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")
_HEADER = re.compile(r"\s*[!#$%&'*+.^_`|~0-9A-Za-z-]+\s*=.*")


def check_exporter_variables(environment: Mapping[str, str], signal: str) -> None:
    """Check variables of `signal`, "TRACES" or "METRICS". Raises ValueError with name and value."""
    name, endpoint = _given(environment, signal, "ENDPOINT")
    if endpoint and not _is_endpoint(endpoint):
        raise ValueError(f"{name} is {endpoint!r}, but must be http://HOST:PORT or https://HOST:PORT")
    name, compression = _given(environment, signal, "COMPRESSION")
    if compression and compression.lower() not in _COMPRESSIONS:
        raise ValueError(f"{name} is {compression!r}, but must be one of {', '.join(_COMPRESSIONS)}")
    name, timeout = _given(environment, signal, "TIMEOUT")
    if timeout and not _is_time(timeout):
        raise ValueError(f"{name} is {timeout!r}, but must be a number of seconds above 0")
    name, headers = _given(environment, signal, "HEADERS")
    if any(not _HEADER.fullmatch(header) for header in headers.split(",") if header.strip()):
        raise ValueError(f"{name} is not KEY=VALUE,KEY=VALUE")
    for kind in _FILES:
        name, path = _given(environment, signal, kind)
        if path and not Path(path).is_file():
            raise ValueError(f"{name} is {path!r}, which does not exist")


def _given(environment: Mapping[str, str], signal: str, kind: str) -> tuple[str, str]:
    """The effective variable and its value; the one of the signal overrides the general one."""
    names = (f"OTEL_EXPORTER_OTLP_{signal}_{kind}", f"OTEL_EXPORTER_OTLP_{kind}")
    return next(
        ((name, value) for name in names if (value := environment.get(name, "").strip())), (names[1], "")
    )


def _is_endpoint(text: str) -> bool:
    try:
        parts = urlsplit(text if "://" in text else f"//{text}")
        has_port = parts.port is not None
    except ValueError:
        return False
    if "://" in text:
        return parts.scheme in ("http", "https") and bool(parts.hostname)
    return bool(parts.hostname) and has_port


def _is_time(text: str) -> bool:
    try:
        seconds = float(text)
    except ValueError:
        return False
    return 0 < seconds < math.inf


DEFAULT_INTERVAL_S = 60.0
"""OpenTelemetry's default."""


class OtlpProtocol(Enum):
    """Protocol of a collector."""

    GRPC = "grpc"
    HTTP = "http/protobuf"


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsExport:
    """Where metrics are exported; `collector` is None without a collector.

    Endpoint, headers, certificates, compression and timeout are read from the environment by the SDK's
    exporter itself.
    """

    collector: OtlpProtocol | None = None
    interval_s: float = DEFAULT_INTERVAL_S
    to_coordinator_interval_s: float = 2.0


NO_COLLECTOR = MetricsExport()


def metrics_export(environment: Mapping[str, str]) -> MetricsExport:
    """Read the OTEL_* variables. Raises ValueError for a value that would be ignored."""
    return MetricsExport(collector=_collector(environment), interval_s=_interval_s(environment))


def _collector(environment: Mapping[str, str]) -> OtlpProtocol | None:
    exporter = environment.get("OTEL_METRICS_EXPORTER", "").strip() or "otlp"
    if exporter not in ("otlp", "none"):
        raise ValueError(f"OTEL_METRICS_EXPORTER is {exporter!r}, must be otlp or none")
    if exporter == "none" or not _of_metrics(environment, "ENDPOINT"):
        return None
    protocol = _of_metrics(environment, "PROTOCOL") or OtlpProtocol.GRPC.value
    if protocol not in (known := [member.value for member in OtlpProtocol]):
        raise ValueError(f"OTLP protocol {protocol!r} is not one of {', '.join(known)}")
    check_exporter_variables(environment, "METRICS")
    return OtlpProtocol(protocol)


def _of_metrics(environment: Mapping[str, str], what: str) -> str:
    """The variable for metrics, else the general one."""
    own = environment.get(f"OTEL_EXPORTER_OTLP_METRICS_{what}", "").strip()
    return own or environment.get(f"OTEL_EXPORTER_OTLP_{what}", "").strip()


def _interval_s(environment: Mapping[str, str]) -> float:
    text = environment.get("OTEL_METRIC_EXPORT_INTERVAL", "").strip()
    if not text:
        return DEFAULT_INTERVAL_S
    if not (interval_ms := parse_digits(text, limit=2**31 - 1)):
        raise ValueError(
            f"OTEL_METRIC_EXPORT_INTERVAL is {text!r}, but must be a whole number of milliseconds"
        )
    return interval_ms / 1000


PROTOCOLS = ("grpc", "http/protobuf")
_PARENT_BASED = "parentbased_"


class StandardSampler(Sampler):
    """A sampler of OTEL_TRACES_SAMPLER. Another process decides as this one does by its description."""

    def __init__(self, name: str, ratio: float = 1.0) -> None:
        """`ratio` is OTEL_TRACES_SAMPLER_ARG. Raises ValueError for an unknown name."""
        match name.removeprefix(_PARENT_BASED):
            case "always_on":
                sampler: Sampler = ALWAYS_ON
            case "always_off":
                sampler = ALWAYS_OFF
            case "traceidratio":
                sampler = TraceIdRatioBased(ratio)
            case _:
                raise ValueError(
                    f"OTEL_TRACES_SAMPLER is {name!r}, but must be always_on, always_off, traceidratio, or "
                    "one of them after parentbased_"
                )
        self._sampler = ParentBased(sampler) if name.startswith(_PARENT_BASED) else sampler
        self._description = f"{name}={ratio}"

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        return self._sampler.should_sample(
            parent_context, trace_id, name, kind, attributes, links, trace_state
        )

    def get_description(self) -> str:
        """Return name and ratio: parentbased_traceidratio=0.01."""
        return self._description


def described_sampler(description: str) -> Sampler:
    """Return the sampler of a process by its description. Raises ValueError."""
    name, _, ratio = description.partition("=")
    return StandardSampler(name, parse_ratio(ratio or "1.0", name))


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings:
    """Settings from the environment.

    Attributes:
        protocol: of the collector of traces; None without a collector.
        sampler: None leaves sampling to the command line.
        metrics: where metrics are exported.
    """

    is_disabled: bool = False
    protocol: str | None = None
    sampler: Sampler | None = None
    service_version: str = "unknown"
    metrics: MetricsExport = NO_COLLECTOR


NO_SETTINGS = TelemetrySettings()
"""The settings without any variable."""
DISABLED = TelemetrySettings(is_disabled=True, sampler=StandardSampler("always_off"))
"""No recording and no exporting."""


def read_environment(environment: Mapping[str, str], *, version: str) -> TelemetrySettings:
    """Read the OTEL_* variables. Raises ValueError for a value that would be ignored."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return DISABLED
    return TelemetrySettings(
        protocol=_protocol(environment),
        sampler=_sampler(environment),
        service_version=version,
        metrics=metrics_export(environment),
    )


def _protocol(environment: Mapping[str, str]) -> str | None:
    exporter = environment.get("OTEL_TRACES_EXPORTER", "otlp").strip() or "otlp"
    if exporter not in ("otlp", "none"):
        raise ValueError(f"OTEL_TRACES_EXPORTER is {exporter!r}, must be otlp or none")
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if exporter == "none" or not any(environment.get(name, "").strip() for name in endpoints):
        return None
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((value for name in names if (value := environment.get(name, "").strip())), "grpc")
    if protocol not in PROTOCOLS:
        raise ValueError(f"OTLP protocol {protocol!r} is not one of {', '.join(PROTOCOLS)}")
    check_exporter_variables(environment, "TRACES")
    return protocol


def _sampler(environment: Mapping[str, str]) -> Sampler | None:
    name = environment.get("OTEL_TRACES_SAMPLER", "").strip().lower()
    if not name:
        return None
    argument = environment.get("OTEL_TRACES_SAMPLER_ARG", "").strip() or "1.0"
    ratio = parse_ratio(argument, "OTEL_TRACES_SAMPLER_ARG") if name.endswith("traceidratio") else 1.0
    return StandardSampler(name, ratio)


def parse_ratio(text: str, name: str) -> float:
    """Parse a number from 0 to 1. Raises ValueError with `name`."""
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise ValueError(f"{name} is {text!r}, but must be a number from 0 to 1")
    return ratio
