"""Where a call comes from."""

from typing import Any
from urllib.parse import unquote

import grpc


def peer_host(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The host of the caller, without its port, which changes with every connection."""
    untyped: Any = context  # the stubs lack what a context can be asked
    return host_of(untyped.peer())


def host_of(peer: str) -> str:
    """The host of a gRPC peer: "ipv4:10.0.0.1:4711" is 10.0.0.1, whatever connection it comes on."""
    kind, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else peer
