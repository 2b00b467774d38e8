"""Stageline serves one language model from several machines, as a pipeline of stage workers over gRPC.

What this package exports is loaded when it is first used: the command has to set up its process before gRPC
is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stageline.attach_secrets import new_attach_secret
    from stageline.client import Client
    from stageline.completion import Completion
    from stageline.errors import (
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
    from stageline.output import FinishReason, GenerateOutput, TokenLogprobs, TopLogprob, Usage
    from stageline.parameters import Detach, GenerateOptions, Priority
    from stageline.prompt import ChatMessage, Prompt
else:  # hidden from type checkers, which would take every name for one of ours
    _HOMES = {"Client": "client", "Completion": "completion", "ChatMessage": "prompt", "Prompt": "prompt"}
    _HOMES["new_attach_secret"] = "attach_secrets"
    _HOMES |= dict.fromkeys(
        ("FinishReason", "GenerateOutput", "TokenLogprobs", "TopLogprob", "Usage"), "output"
    )
    _HOMES |= dict.fromkeys(("Detach", "GenerateOptions", "Priority"), "parameters")

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module 'stageline' has no attribute {name!r}")
        value = getattr(import_module(f"stageline.{_HOMES.get(name, 'errors')}"), name)
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
    "TokenLogprobs",
    "TopLogprob",
    "Unavailable",
    "Usage",
    "WorkerNotFound",
    "new_attach_secret",
]
