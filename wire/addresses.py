"""HOST:PORT addresses and peer hosts; IPv6 hosts are written in brackets."""

import ipaddress
import re
import socket
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import grpc


def peer_host(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Return the host of a call's peer, without the port, which differs per connection."""
    untyped: Any = context  # the stubs lack `peer`
    return host_of(untyped.peer())


def host_of(peer: str) -> str:
    """Return the host of a gRPC peer: 10.0.0.1 for "ipv4:10.0.0.1:4711"; other kinds unchanged."""
    kind, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else peer


@lru_cache(maxsize=4096)
def counted_host(host: str) -> str:
    """The hosts that a limit counts as one: of IPv6 the /64, whose addresses one host may all have."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address) or address.is_loopback:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))


DEFAULT_ADDRESS = "127.0.0.1:7480"
"""Where a coordinator listens, and where workers and clients look for it."""
_ADDRESS = re.compile(
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?)\]|(?P<host>[^\s:\[\]/]+)):(?P<port>\d{1,5})",
    re.ASCII,
)


_EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True)
class Address:
    """Host name or IP address (IPv6 without brackets) and TCP port; port 0 binds any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parse HOST:PORT, for example `10.0.0.7:7480`, `gpu-a:7480` or `[::1]:0`. Raises ValueError."""
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise ValueError(f"address {text!r} is not HOST:PORT: write for example gpu-a:7480 or [::1]:7480")
    port = int(match["port"])
    if port > 65535:
        raise ValueError(f"address {text!r} has port {port}, the limit is 65535")
    if match["host"] is not None:
        _check_host(text, match["host"])
    return Address(match["ipv6"] or match["host"], port)


def _check_host(text: str, host: str) -> None:
    """Raises ValueError for a name that no host can have: resolving it fails without naming it."""
    try:
        host.encode("idna")
    except UnicodeError:
        raise ValueError(
            f"address {text!r} has the host {host!r}, which is no host name: "
            "write labels of 1 to 63 characters between single dots"
        ) from None


def is_free(address: Address) -> bool:
    """Whether a server can listen on an IPv4 address now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError:
            return False
    return True


def local_address(listening: Address) -> Address:
    """The address, from this machine, of a server that listens on `listening`."""
    return Address(_EVERY_INTERFACE.get(listening.host, listening.host), listening.port)


def parse_peer_address(text: str) -> Address:
    """Parse the HOST:PORT of a peer to connect to; port 0 is an error too. Raises ValueError."""
    address = parse_address(text)
    if address.port == 0:
        raise ValueError(f"address {text!r} has port 0: give the port that the peer listens on")
    return address
