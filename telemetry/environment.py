"""What OpenTelemetry's standard variables ask for.

https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/ -- endpoints, headers,
certificates, compression and timeouts are read by the exporters themselves.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler, TraceIdRatioBased

from telemetry.exporter_variables import check_exporter_variables
from telemetry.metrics.export_settings import NO_COLLECTOR, MetricsExport, metrics_export

PROTOCOLS = ("grpc", "http/protobuf")


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings:
    """`protocol`: how traces go to a collector; None where there is none. `sampler` None: what the command
    line says. `metrics`: where those go.
    """

    is_disabled: bool = False
    protocol: str | None = None
    sampler: Sampler | None = None
    service_version: str = "unknown"
    metrics: MetricsExport = NO_COLLECTOR


NO_SETTINGS = TelemetrySettings()
"""Where no variable is set."""
DISABLED = TelemetrySettings(is_disabled=True, sampler=ALWAYS_OFF)
"""Nothing is recorded, and nothing sent."""


def read_environment(environment: Mapping[str, str], *, version: str) -> TelemetrySettings:
    """`version` is that of the program. Raises ValueError for a value that nobody would act on."""
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
        raise ValueError(f"OTEL_TRACES_EXPORTER is {exporter!r}, but only otlp and none are there")
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if exporter == "none" or not any(environment.get(name, "").strip() for name in endpoints):
        return None
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((value for name in names if (value := environment.get(name, "").strip())), "grpc")
    if protocol not in PROTOCOLS:
        raise ValueError(f"OTLP protocol {protocol!r} is none of {', '.join(PROTOCOLS)}")
    check_exporter_variables(environment, "TRACES")
    return protocol


def _sampler(environment: Mapping[str, str]) -> Sampler | None:
    name = environment.get("OTEL_TRACES_SAMPLER", "").strip().lower()
    if not name:
        return None
    argument = environment.get("OTEL_TRACES_SAMPLER_ARG", "").strip() or "1.0"
    base, is_parent_based = name.removeprefix("parentbased_"), name.startswith("parentbased_")
    match base:
        case "always_on":
            sampler: Sampler = ALWAYS_ON
        case "always_off":
            sampler = ALWAYS_OFF
        case "traceidratio":
            sampler = TraceIdRatioBased(parse_ratio(argument, "OTEL_TRACES_SAMPLER_ARG"))
        case _:
            raise ValueError(
                f"OTEL_TRACES_SAMPLER is {name!r}, but must be always_on, always_off, traceidratio, or one "
                "of them after parentbased_"
            )
    return ParentBased(sampler) if is_parent_based else sampler


def parse_ratio(text: str, name: str) -> float:
    """A number from 0 to 1. Raises ValueError, which calls it `name`."""
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise ValueError(f"{name} is {text!r}, but must be a number from 0 to 1")
    return ratio
