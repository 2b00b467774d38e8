"""`stageline health`: one process, for exec probes. Imports little, as it starts every few seconds."""

import asyncio
import json
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import grpc.aio
import h11
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from certificates.identity import Role
from stageline.cli import options
from wire.addresses import parse_peer_address
from wire.flags import peer_address
from wire.foreign_text import printable_line
from wire.interceptors import CONDITION_KEY, READINESS
from wire.transport import PLAIN, Transport, client_transport, is_loopback

if TYPE_CHECKING:
    from certificates.files import TlsDirectory

ROLES = (Role.WORKER, Role.COORDINATOR, Role.GATEWAY)
DEFAULT_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 65_536
SERVICE_OF_ROLE = {
    Role.COORDINATOR: "stageline.v1.Inference",
    Role.WORKER: "stageline.internal.v1.StageService",
}
"""What only a process of the role serves."""


def _role(text: str) -> Role:
    if text not in (known := {role.value: role for role in ROLES}):
        raise ValueError(f"{text!r} is not one of {', '.join(known)}")
    return known[text]


def health(
    role: Annotated[
        Any,  # a Role; typer takes no parser of text for it
        typer.Option(
            "--for",
            metavar="|".join(role.value for role in ROLES),
            parser=options.option_parser(_role),
            help="What the process is.",
        ),
    ],
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS",
            parser=options.option_parser(peer_address),
            help="HOST:PORT on which it listens.",
            show_default=False,
        ),
    ],
    live: Annotated[
        bool, typer.Option("--live", help="Ask whether the process runs, not whether it is ready.")
    ] = False,
    timeout: Annotated[
        Any,  # a float
        typer.Option(
            metavar="TIME",
            parser=options.option_parser(options.parse_wait),
            help=f"Maximum time, such as 500ms or 5s (default: {DEFAULT_TIMEOUT_S:g}s).",
        ),
    ] = None,
    tls_dir: options.TlsDirectory = None,
) -> int:
    """Exit with 0 if a process is ready, with 1 and its state if not (docs/health.md)."""
    timeout_s = DEFAULT_TIMEOUT_S if timeout is None else timeout
    state = asyncio.run(_ask(role, address, is_live=live, tls_dir=tls_dir, timeout_s=timeout_s))
    print(f"{role.value} at {address}: {state}")
    return 0


async def _ask(role: Role, address: str, *, is_live: bool, tls_dir: Path | None, timeout_s: float) -> str:
    """Return the state of a process that is ready. Raises CommandFailed, OSError."""
    transport = PLAIN if tls_dir is None else client_transport(tls_dir)
    peer_host = _own_host(transport.files, role) if is_loopback(address) else None
    try:
        async with asyncio.timeout(timeout_s):
            if role is Role.GATEWAY:
                is_ready, state = await _ask_gateway(address, transport, peer_host, is_live=is_live)
            else:
                is_ready, state = await _ask_process(role, address, transport, peer_host, is_live=is_live)
    except TimeoutError:
        is_ready, state = False, f"no answer within {timeout_s:g} s"
    except (OSError, h11.RemoteProtocolError) as error:
        is_ready, state = False, " ".join(str(error).split())
    if not is_ready:
        wanted = "not running" if is_live else "not ready"
        raise options.CommandFailed(f"{role.value} at {address} is {wanted}: {state}", reason="NOT_READY")
    return state


def _own_host(files: "TlsDirectory | None", role: Role) -> str | None:
    """A host in the certificate, if the process asks itself on its own host.

    A process that asks itself at a loopback address cannot expect a certificate for that address.
    """
    if files is None or files.current().identity.role is not role:
        return None
    from certificates.authority import hosts_of

    return next(iter(hosts_of(files.current().leaf)), None)


async def _ask_process(
    role: Role, address: str, transport: Transport, peer_host: str | None, *, is_live: bool
) -> tuple[bool, str]:
    async with transport.channel(address, peer_host=peer_host) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        call = stub.Check(health_pb2.HealthCheckRequest(service="" if is_live else READINESS))
        try:
            await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE_OF_ROLE[role]))
            answer = await call
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return False, f"this is no {role.value}"
            return False, f"{error.code().name}: {error.details()}"
        metadata = dict(await call.trailing_metadata() or ())
    return is_live or answer.status == answer.SERVING, str(metadata.get(CONDITION_KEY, "running"))


async def _ask_gateway(
    address: str, transport: Transport, peer_host: str | None, *, is_live: bool
) -> tuple[bool, str]:
    """Raises OSError, RemoteProtocolError."""
    where, context = parse_peer_address(address), transport.client_context()
    name = None if context is None else peer_host or where.host
    reader, writer = await asyncio.open_connection(where.host, where.port, ssl=context, server_hostname=name)
    try:
        status, body = await _get("/health" if is_live else "/readyz", address, reader, writer)
    except ssl.SSLError as error:
        raise OSError(f"TLS: {error.reason}") from None
    finally:
        writer.transport.abort()  # the loop ends before a peer would confirm a close
    return status == 200, _state_in(body) or f"HTTP {status}"


async def _get(
    path: str, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[int, bytes]:
    connection, status, body = h11.Connection(h11.CLIENT), 0, b""
    request = h11.Request(method="GET", target=path, headers=[("host", host), ("connection", "close")])
    writer.write((connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b""))
    while True:
        match connection.next_event():
            case h11.NEED_DATA:
                connection.receive_data(await reader.read(MAX_ANSWER_BYTES))
            case h11.Response() as response:
                status = response.status_code
            case h11.Data() as part:
                body += part.data
                if len(body) > MAX_ANSWER_BYTES:
                    raise OSError(f"more than {MAX_ANSWER_BYTES} bytes: this is no gateway")
            case h11.EndOfMessage() | h11.ConnectionClosed():
                return status, body


def _state_in(body: bytes) -> str:
    """The state in an answer of a gateway; empty for anything else."""
    try:
        answer = json.loads(body)
        state = answer["status"] if "status" in answer else answer["error"]["message"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return printable_line(" ".join(str(state).split()))
