"""All surfaces, by name."""

from tests.fuzz import checkpoint_files, hop_frames, http_requests, journal_files, rpc_calls, text_files
from tests.fuzz.harness import Surface

SURFACES: dict[str, Surface] = {
    surface.name: surface
    for module in (checkpoint_files, text_files, hop_frames, journal_files, rpc_calls, http_requests)
    for surface in module.SURFACES
}
