"""Where metrics are exported to, as OpenTelemetry's standard variables say."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from telemetry.exporter_variables import check_exporter_variables

DEFAULT_INTERVAL_S = 60.0
"""OpenTelemetry's own."""


class OtlpProtocol(Enum):
    """How a collector is spoken to."""

    GRPC = "grpc"
    HTTP = "http/protobuf"


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsExport:
    """`collector` None: there is none.

    Endpoint, headers, certificates, compression and timeout are read from the environment by the SDK's
    exporter itself.
    """

    collector: OtlpProtocol | None = None
    interval_s: float = DEFAULT_INTERVAL_S
    to_coordinator_interval_s: float = 2.0


NO_COLLECTOR = MetricsExport()


def metrics_export(environment: Mapping[str, str]) -> MetricsExport:
    """As the variables OTEL_* say. Raises ValueError for a value that nobody would act on."""
    return MetricsExport(collector=_collector(environment), interval_s=_interval_s(environment))


def _collector(environment: Mapping[str, str]) -> OtlpProtocol | None:
    exporter = environment.get("OTEL_METRICS_EXPORTER", "").strip() or "otlp"
    if exporter not in ("otlp", "none"):
        raise ValueError(f"OTEL_METRICS_EXPORTER is {exporter!r}, but only otlp and none are there")
    if exporter == "none" or not _of_metrics(environment, "ENDPOINT"):
        return None
    protocol = _of_metrics(environment, "PROTOCOL") or OtlpProtocol.GRPC.value
    if protocol not in (known := [each.value for each in OtlpProtocol]):
        raise ValueError(f"OTLP protocol {protocol!r} is none of {', '.join(known)}")
    check_exporter_variables(environment, "METRICS")
    return OtlpProtocol(protocol)


def _of_metrics(environment: Mapping[str, str], what: str) -> str:
    """The variable for metrics, or else the one for everything."""
    own = environment.get(f"OTEL_EXPORTER_OTLP_METRICS_{what}", "").strip()
    return own or environment.get(f"OTEL_EXPORTER_OTLP_{what}", "").strip()


def _interval_s(environment: Mapping[str, str]) -> float:
    text = environment.get("OTEL_METRIC_EXPORT_INTERVAL", "").strip()
    if not text:
        return DEFAULT_INTERVAL_S
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"OTEL_METRIC_EXPORT_INTERVAL is {text!r}, but must be a whole number of milliseconds"
        )
    return int(text) / 1000
