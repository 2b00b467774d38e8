"""Small facts about gRPC calls that the type stubs do not tell."""

from collections.abc import Callable
from typing import Any

import grpc

ATTACH_SECRET_KEY = "stageline-attach-secret"
"""Metadata of the secret that Attach and Cancel of a request need. A client may send one of its own with
Generate, whose initial metadata has it."""
AUTHORIZATION_KEY = "authorization"
"""Metadata of the operator token, as `Bearer TOKEN`."""
JOURNALLED_KEY = "stageline-journalled"
"""Initial metadata of a call whose request survives the coordinator: Attach finds it at the next one."""


def when_call_ends(context: grpc.aio.ServicerContext[Any, Any], callback: Callable[[], None]) -> None:
    """Calls `callback` once, however the call ends: completed, cancelled, deadline, connection lost."""
    untyped: Any = context  # the stubs ask for a class that does not exist at run time
    untyped.add_done_callback(lambda _: callback())
