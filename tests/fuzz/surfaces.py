"""All surfaces, by name."""

from tests.fuzz import (
    certificate_files,
    checkpoint_files,
    cluster_files,
    hop_frames,
    http_requests,
    journal_files,
    payload_connections,
    rpc_calls,
    text_files,
)
from tests.fuzz.harness import Surface

_MODULES = (
    checkpoint_files,
    text_files,
    cluster_files,
    certificate_files,
    hop_frames,
    payload_connections,
    journal_files,
    rpc_calls,
    http_requests,
)
SURFACES: dict[str, Surface] = {surface.name: surface for module in _MODULES for surface in module.SURFACES}
