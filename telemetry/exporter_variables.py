"""The variables that OpenTelemetry's exporters read by themselves, checked before they do: what they cannot
use, they answer with a traceback, a warning, or not at all.

https://opentelemetry.io/docs/specs/otel/protocol/exporter/
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

_COMPRESSIONS = ("none", "gzip", "deflate")
_FILES = ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")
_HEADER = re.compile(r"\s*[!#$%&'*+.^_`|~0-9A-Za-z-]+\s*=.*")


def check_exporter_variables(environment: Mapping[str, str], signal: str) -> None:
    """Of `signal`, "TRACES" or "METRICS". Raises ValueError that names the variable and its value."""
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
    if any(not _HEADER.fullmatch(each) for each in headers.split(",") if each.strip()):
        raise ValueError(f"{name} has something else than KEY=VALUE,KEY=VALUE")
    for kind in _FILES:
        name, path = _given(environment, signal, kind)
        if path and not Path(path).is_file():
            raise ValueError(f"{name} is {path!r}, and there is no such file")


def _given(environment: Mapping[str, str], signal: str, kind: str) -> tuple[str, str]:
    """The variable that counts, and its value; that of the signal goes before that of all."""
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
