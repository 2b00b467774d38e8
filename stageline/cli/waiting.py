"""Says on standard error what a request waits for until its first output arrives."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from certificates.identity import Role
from stageline.cli.tables import describe_start
from stageline.client.client import Client
from stageline.client.errors import StagelineError
from stageline.client.output import GenerateOutput
from stageline_rpc.v1 import cluster_pb2
from wire.errors import START_WORKERS
from wire.transport import client_transport

FIRST_NOTICE_S = 2.0
_BETWEEN_S = 2.0


async def with_notices(
    client: Client, outputs: AsyncGenerator[GenerateOutput, None], *, tls_dir: Path | None = None
) -> AsyncGenerator[GenerateOutput, None]:
    """Yield `outputs`; after `FIRST_NOTICE_S` without one, print each new reason on standard error.

    `tls_dir` is the one of `client`.
    """
    notices = asyncio.create_task(_say_reasons(client, tls_dir), name="say what a request waits for")
    try:
        async with aclosing(outputs):
            async for output in outputs:
                notices.cancel()
                yield output
    finally:
        notices.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await notices


async def _say_reasons(client: Client, tls_dir: Path | None) -> None:
    said = ""
    await asyncio.sleep(FIRST_NOTICE_S)
    if tls_dir is not None and _role_in(tls_dir) is Role.CLIENT:
        print("(waiting; a certificate of role operator shows for what)", file=sys.stderr, flush=True)
        return  # the coordinator would refuse the call, and note that
    while True:
        try:
            reason = waiting_text(await client.status())
        except StagelineError:
            return  # the request reports the same problem
        if reason != said:
            print(f"(waiting: {reason})", file=sys.stderr, flush=True)
            said = reason
        await asyncio.sleep(_BETWEEN_S)


def _role_in(tls_dir: Path) -> Role | None:
    files = client_transport(tls_dir).files
    return None if files is None else files.current().identity.role


def waiting_text(status: cluster_pb2.GetStatusResponse) -> str:
    """The reason for which a request has no output yet, with what to do where workers are missing."""
    if status.state == cluster_pb2.CLUSTER_STATE_SERVING:
        counts = status.requests
        running = counts.prefill + counts.decode
        return f"the cluster serves, {running} sequences run and {counts.waiting} wait"
    text = describe_start(status)
    is_missing = status.state == cluster_pb2.CLUSTER_STATE_WAITING_FOR_WORKERS
    return f"{text}; {START_WORKERS}" if is_missing else text
