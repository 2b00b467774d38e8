"""HTTP clients of gateways, and the proxies between them and a gateway."""

from __future__ import annotations

import urllib.request
from urllib.parse import urlsplit

from httpx2 import AsyncClient, AsyncHTTPTransport, Limits, Timeout

from wire.transport import is_loopback_host


class GatewayUnreachable(Exception):
    """No connection to the gateway, or something else is there."""


def open_gateway_client(url: str, *, timeout: Timeout | float, limits: Limits | None = None) -> AsyncClient:
    """Return a client whose base URL is `url`, with the environment's proxies unless that is this host.

    A proxy reaches its own loopback addresses, not this host's. Raises GatewayUnreachable for a proxy that
    cannot be used.
    """
    bounds = limits or Limits()
    if is_loopback_host(urlsplit(url).hostname or ""):
        return AsyncClient(base_url=url, timeout=timeout, transport=AsyncHTTPTransport(limits=bounds))
    try:
        return AsyncClient(base_url=url, timeout=timeout, limits=bounds)
    except ImportError as error:
        raise unreachable(url, "SOCKS proxies need a library: pip install socksio") from error
    except ValueError as error:
        raise unreachable(url, f"the proxy cannot be used: {error}") from error


def unreachable(url: str, problem: str) -> GatewayUnreachable:
    """The error of a connection that failed; names the proxy of the environment."""
    proxy = _proxy(url)
    way = "" if proxy is None else f" through the proxy {proxy} of the environment"
    return GatewayUnreachable(f"no connection to {url}{way}: {problem}")


def _proxy(url: str) -> str | None:
    """The proxy for a URL, without credentials; None for a direct connection."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if is_loopback_host(host) or urllib.request.proxy_bypass(host):
        return None
    proxies = urllib.request.getproxies()
    found = proxies.get(parts.scheme) or proxies.get("all")
    if not found:
        return None
    scheme, separator, rest = found.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
