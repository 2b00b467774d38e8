"""Small facts about gRPC calls that the type stubs do not tell."""

from collections.abc import Callable
from typing import Any

import grpc

JOURNALLED_KEY = "stageline-journalled"
"""Initial metadata of a call whose request survives the coordinator: Attach finds it at the next one."""


def when_call_ends(context: grpc.aio.ServicerContext[Any, Any], callback: Callable[[], None]) -> None:
    """Calls `callback` once, however the call ends: completed, cancelled, deadline, connection lost."""
    untyped: Any = context  # the stubs ask for a class that does not exist at run time
    untyped.add_done_callback(lambda _: callback())
