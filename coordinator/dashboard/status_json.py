"""`/api/status`: the facts of `stageline status --json`, and what the page needs beside them."""

from typing import Any

from stageline_rpc.v1 import cluster_pb2, inference_pb2
from wire.status_json import status_facts


def status_fields(
    status: cluster_pb2.GetStatusResponse, model: inference_pb2.GetModelResponse, *, can_act: bool
) -> dict[str, Any]:
    """`can_act`: a reader with the token may cancel requests and drain workers."""
    return {
        **status_facts(status),
        "architecture": model.architecture,
        "max_sequence_tokens": model.max_sequence_tokens,
        "can_act": can_act,
    }
