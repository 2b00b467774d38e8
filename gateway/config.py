"""Configuration of a gateway."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from gateway.parsers.families import (
    AUTO,
    NONE,
    REASONING_FORMATS,
    TOOL_FORMATS,
    TRANSFORMERS,
    check_parser_names,
)
from telemetry.logs import DEFAULT_LOGS, LogSettings
from telemetry.service_manager import UNSUPERVISED, NotifySettings
from telemetry.settings import NO_SETTINGS, TelemetrySettings
from wire.addresses import DEFAULT_ADDRESS, parse_peer_address
from wire.flags import Flag, check_limits, existing_file, listen_address, peer_address
from wire.sizes import MAX_BYTES, exact_size, parse_size
from wire.transport import PLAIN_SETTINGS, TransportSettings

DEFAULT_HTTP_ADDRESS = "127.0.0.1:7482"
DEFAULT_COORDINATOR_TIMEOUT_S = 30.0

_serving = partial(Flag, panel="Addresses")
_api = partial(Flag, panel="API")


def parse_names(text: str) -> tuple[str, ...]:
    """Parse names, separated by commas. Raises ValueError."""
    names = tuple(name.strip() for name in text.split(","))
    if "" in names:
        raise ValueError(f"--served-model-name {text!r} has an empty name")
    return names


ANY_ORIGIN = "*"
_DEFAULT_PORTS = {"http": 80, "https": 443}


def parse_origins(text: str) -> tuple[str, ...]:
    """Parse origins of web pages: separated by commas, or a JSON list as vLLM takes. Raises ValueError."""
    given = json.loads(text) if text.lstrip().startswith("[") else text.split(",")
    return tuple(_origin(str(origin).strip()) for origin in given)


def _origin(text: str) -> str:
    """Return an origin as browsers write it. Raises ValueError."""
    if text == ANY_ORIGIN:
        return text
    parts = urlsplit(text.lower())
    if parts.scheme not in _DEFAULT_PORTS or parts.geturl() != f"{parts.scheme}://{parts.netloc}":
        raise _no_origin(text)
    if not text.isascii() or not parts.hostname or "@" in parts.netloc:
        raise _no_origin(text)
    return parts.geturl().removesuffix(f":{_DEFAULT_PORTS[parts.scheme]}")


def _no_origin(text: str) -> ValueError:
    return ValueError(
        f"--allowed-origins has {text!r}, which is no origin: write scheme, host and port of a page, "
        f"such as https://chat.example.com, or {ANY_ORIGIN} for all"
    )


def tool_parser_name(text: str) -> str:
    """Return the name of a format of tool calls. Raises ValueError."""
    check_parser_names(text, AUTO)
    return text


def reasoning_parser_name(text: str) -> str:
    """Return the name of a format of reasoning. Raises ValueError."""
    check_parser_names(AUTO, text)
    return text


def _choices(formats: Collection[str]) -> str:
    return ", ".join((AUTO, NONE, TRANSFORMERS, *sorted(formats)))


def page_url(text: str) -> str:
    """Return the URL of a page. Raises ValueError."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"URL {text!r} is not a page: write for example http://127.0.0.1:7481/")
    return text


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayConfig:
    """Settings of a gateway, with the flags that set them. Raises ValueError with the numbers."""

    coordinator: Annotated[
        str, _serving("--coordinator", "HOST:PORT", "Coordinator address", parse=peer_address)
    ] = DEFAULT_ADDRESS
    listen: Annotated[
        str,
        _serving("--listen", "HOST:PORT", "Listen address; port 0 takes a free port", parse=listen_address),
    ] = DEFAULT_HTTP_ADDRESS
    dashboard_url: Annotated[
        str | None,
        _serving(
            "--dashboard-url",
            "URL",
            "Dashboard of the coordinator, to which the chat page links answers",
            unset="no links",
            parse=page_url,
        ),
    ] = None
    coordinator_timeout_s: Annotated[
        float,
        _serving(
            "--coordinator-timeout",
            "SECONDS",
            "Time without a coordinator after which requests fail",
            above=0,
        ),
    ] = DEFAULT_COORDINATOR_TIMEOUT_S
    drain_timeout_s: Annotated[
        float,
        _serving(
            "--drain-timeout", "SECONDS", "Maximum time to finish running requests before exit", above=0
        ),
    ] = 60.0
    keys_file: Annotated[
        Path | None,
        _api(
            "--keys-file",
            "FILE",
            "File of API keys, made with `stageline keys`; requests then need a key",
            unset="no keys",
            parse=existing_file,
        ),
    ] = None
    allowed_origins: Annotated[
        tuple[str, ...] | None,
        _api(
            "--allowed-origins",
            "ORIGIN,ORIGIN,...",
            "Origins whose pages may call the gateway (CORS), such as https://chat.example.com; * for all",
            unset="none",
            parse=parse_origins,
            format=",".join,
        ),
    ] = None
    served_model_names: Annotated[
        tuple[str, ...] | None,
        _api(
            "--served-model-name",
            "NAME,NAME,...",
            "Names of the model; the first is in responses",
            unset="the coordinator's",
            parse=parse_names,
            format=",".join,
        ),
    ] = None
    chat_template: Annotated[
        Path | None,
        _api("--chat-template", "FILE", "Jinja chat template", unset="the model's", parse=existing_file),
    ] = None
    tool_parser: Annotated[
        str,
        _api(
            "--tool-parser",
            "FORMAT",
            f"Format of the model's tool calls: {_choices(TOOL_FORMATS)}",
            parse=tool_parser_name,
        ),
    ] = AUTO
    reasoning_parser: Annotated[
        str,
        _api(
            "--reasoning-parser",
            "FORMAT",
            f"Format of the model's reasoning: {_choices(REASONING_FORMATS)}",
            parse=reasoning_parser_name,
        ),
    ] = AUTO
    response_keep_s: Annotated[
        float,
        _api(
            "--response-keep",
            "SECONDS",
            "How long /v1/responses can retrieve an ended response",
            above=0,
            max=3600,
        ),
    ] = 600.0
    strict_fields: Annotated[
        bool, _api("--strict-fields", None, "Reject requests with unknown fields instead of ignoring them")
    ] = False
    max_body_bytes: Annotated[
        int,
        _api(
            "--max-body",
            "SIZE",
            "Maximum size of a request body",
            min=1,
            max=MAX_BYTES,
            parse=parse_size,
            format=exact_size,
        ),
    ] = 16 * 2**20
    cache_directory: Path | None = None
    """Directory for the coordinator's tokenizer, if it is to be kept."""
    transport: TransportSettings = PLAIN_SETTINGS
    telemetry: TelemetrySettings = NO_SETTINGS
    notify: NotifySettings = UNSUPERVISED
    logs: LogSettings = DEFAULT_LOGS

    def __post_init__(self) -> None:
        parse_peer_address(self.coordinator)
        self.transport.check_listen("--listen", self.listen)
        check_parser_names(self.tool_parser, self.reasoning_parser)
        check_limits(self)
