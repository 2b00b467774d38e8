"""Where metrics are exported to, as OpenTelemetry's standard variables say."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

log = logging.getLogger(__name__)

DEFAULT_INTERVAL_S = 60.0
"""OpenTelemetry's own."""


class OtlpProtocol(Enum):
    """How a collector is spoken to."""

    GRPC = "grpc"
    HTTP = "http/protobuf"


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsExport:
    """`collector` None: there is none. With `is_disabled` a worker does not tell the coordinator either.

    Endpoint, headers, certificates, compression and timeout are read from the environment by the SDK's
    exporter itself.
    """

    is_disabled: bool = False
    collector: OtlpProtocol | None = None
    interval_s: float = DEFAULT_INTERVAL_S
    to_coordinator_interval_s: float = 2.0


def metrics_export(environment: Mapping[str, str]) -> MetricsExport:
    """As the variables OTEL_* say; as OpenTelemetry wants it, a value that makes no sense is warned of and
    ignored.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return MetricsExport(is_disabled=True)
    return MetricsExport(collector=_collector(environment), interval_s=_interval_s(environment))


def _collector(environment: Mapping[str, str]) -> OtlpProtocol | None:
    if not _of_metrics(environment, "ENDPOINT"):
        return None
    exporter = environment.get("OTEL_METRICS_EXPORTER", "").strip() or "otlp"
    if exporter != "otlp":
        if exporter != "none":
            log.warning("OTEL_METRICS_EXPORTER is %r; only otlp and none are known, so it is none", exporter)
        return None
    protocol = _of_metrics(environment, "PROTOCOL") or OtlpProtocol.GRPC.value
    try:
        return OtlpProtocol(protocol)
    except ValueError:
        known = ", ".join(each.value for each in OtlpProtocol)
        log.warning("the OTLP protocol %r is none of %s; metrics go by grpc", protocol, known)
        return OtlpProtocol.GRPC


def _of_metrics(environment: Mapping[str, str], what: str) -> str:
    """The variable for metrics, or else the one for everything."""
    own = environment.get(f"OTEL_EXPORTER_OTLP_METRICS_{what}", "").strip()
    return own or environment.get(f"OTEL_EXPORTER_OTLP_{what}", "").strip()


def _interval_s(environment: Mapping[str, str]) -> float:
    text = environment.get("OTEL_METRIC_EXPORT_INTERVAL", "").strip()
    if not text:
        return DEFAULT_INTERVAL_S
    if not text.isdecimal() or int(text) < 1:
        log.warning(
            "OTEL_METRIC_EXPORT_INTERVAL is %r, but must be a whole number of milliseconds; it is %g s",
            text,
            DEFAULT_INTERVAL_S,
        )
        return DEFAULT_INTERVAL_S
    return int(text) / 1000
