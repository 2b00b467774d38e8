"""Stageline serves one language model from several machines, as a pipeline of stage workers over gRPC.

What this package exports is loaded when it is first used: the command has to set up its process before gRPC
is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stageline.client.client import Client
    from stageline.client.connection import new_attach_secret
    from stageline.client.errors import (
        Cancelled,
        DeadlineExceeded,
        InvalidRequest,
        Overloaded,
        PermissionDenied,
        RequestExists,
        RequestNotFound,
        ServerError,
        StagelineError,
        StepFailed,
        Superseded,
        Unavailable,
        WorkerNotFound,
    )
    from stageline.client.output import (
        Completion,
        FinishReason,
        GenerateOutput,
        TokenLogprobs,
        TopLogprob,
        Usage,
    )
    from stageline.client.request import ChatMessage, Detach, GenerateOptions, Priority, Prompt
    from stageline.client.sync_client import SyncClient
else:  # hidden from type checkers, which would take every name for one of ours
    _HOMES = {
        "Client": "client.client",
        "Completion": "client.output",
        "ChatMessage": "client.request",
        "Prompt": "client.request",
        "SyncClient": "client.sync_client",
    }
    _HOMES["new_attach_secret"] = "client.connection"
    _HOMES |= dict.fromkeys(
        ("FinishReason", "GenerateOutput", "TokenLogprobs", "TopLogprob", "Usage"), "client.output"
    )
    _HOMES |= dict.fromkeys(("Detach", "GenerateOptions", "Priority"), "client.request")

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module 'stageline' has no attribute {name!r}")
        value = getattr(import_module(f"stageline.{_HOMES.get(name, 'client.errors')}"), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__})


__all__ = [
    "Cancelled",
    "ChatMessage",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "Detach",
    "FinishReason",
    "GenerateOptions",
    "GenerateOutput",
    "InvalidRequest",
    "Overloaded",
    "PermissionDenied",
    "Priority",
    "Prompt",
    "RequestExists",
    "RequestNotFound",
    "ServerError",
    "StagelineError",
    "StepFailed",
    "Superseded",
    "SyncClient",
    "TokenLogprobs",
    "TopLogprob",
    "Unavailable",
    "Usage",
    "WorkerNotFound",
    "new_attach_secret",
]
