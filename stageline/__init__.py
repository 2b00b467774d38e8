"""Stageline serves one language model from several machines, as a pipeline of stage workers over gRPC."""

from stageline.client import Client
from stageline.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RequestExists,
    RequestNotFound,
    ServerError,
    StagelineError,
    StepFailed,
    Unavailable,
)
from stageline.output import FinishReason, GenerateOutput, Usage
from stageline.prompt import ChatMessage, Prompt

__all__ = [
    "Cancelled",
    "ChatMessage",
    "Client",
    "DeadlineExceeded",
    "FinishReason",
    "GenerateOutput",
    "InvalidRequest",
    "Overloaded",
    "Prompt",
    "RequestExists",
    "RequestNotFound",
    "ServerError",
    "StagelineError",
    "StepFailed",
    "Unavailable",
    "Usage",
]
