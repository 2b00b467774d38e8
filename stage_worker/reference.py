"""What the checkpoint on this worker's disk answers to short texts, for the coordinator's self-check.

Computed in float32 on the CPU, whatever the worker computes with: so it holds for every device, takes none of
a GPU's memory, and is not wrong where the device or its kernels are.
"""

from pathlib import Path

import torch
from torch import Tensor

from checkpoint import Checkpoint, CheckpointError
from stage_worker.head_summary import HeadSummary, NonFiniteLogits
from stage_worker.hidden_projections import as_array, project
from stage_worker.loading import fingerprint_mismatch
from stage_worker.reference_request import ReferenceRequest
from stage_worker.stage_load import LoadProgress, StageLoadError
from stage_worker.streamed_model import StreamedModel
from wire.errors import HandshakeMismatch, InvalidRequest, Overloaded, StaleStream
from wire.reference import LayerReference, Reference, TextReference


def compute_reference(
    request: ReferenceRequest, directory: Path, *, free_bytes: int, progress: LoadProgress
) -> Reference:
    """Of the checkpoint in `directory`, within `free_bytes`.

    Raises HandshakeMismatch where that is another or cannot be read, or its own logits are not finite,
    Overloaded where it takes more memory, InvalidRequest for a token outside the vocabulary, StaleStream when
    `progress` was cancelled.
    """
    try:
        checkpoint = Checkpoint.open(directory)
        if checkpoint.fingerprint != request.fingerprint:
            raise fingerprint_mismatch(checkpoint, expected=request.fingerprint)
        _check_size(request, checkpoint, free_bytes)
        return _compute(request, checkpoint, progress)
    except (CheckpointError, ValueError, OSError) as error:
        raise HandshakeMismatch(
            "checkpoint", expected="one to compute a reference from", got=f"{type(error).__name__}: {error}"
        ) from error
    except StageLoadError as error:
        raise StaleStream("nobody waits for the reference any more") from error


def _check_size(request: ReferenceRequest, checkpoint: Checkpoint, free_bytes: int) -> None:
    vocab_size = checkpoint.config.vocab_size
    largest = max(max(text) for text in request.texts)
    if largest >= vocab_size:
        raise InvalidRequest(f"token {largest} is outside the vocabulary [0, {vocab_size})")
    lengths = [len(text) for text in request.texts]
    needed_bytes = StreamedModel.memory_bytes(checkpoint, request.dtype, lengths)
    if needed_bytes > free_bytes:
        raise Overloaded(f"a reference takes {needed_bytes} bytes of memory, and {free_bytes} are free")


@torch.inference_mode()
def _compute(request: ReferenceRequest, checkpoint: Checkpoint, progress: LoadProgress) -> Reference:
    model = StreamedModel(
        checkpoint,
        request.dtype,
        wire_dtype=request.wire_dtype,
        on_progress=lambda _: progress.advance(0),
    )
    layers: list[LayerReference] = []
    for hidden in model.hidden_states(request.texts):
        layers.append(LayerReference(as_array(project(hidden[0])), _relative_rounding(hidden)))
    summary = HeadSummary(request.texts, num_top=request.num_top)
    try:
        for first, logits in model.logits(hidden):
            summary.add(first, logits)
    except NonFiniteLogits as error:
        raise HandshakeMismatch(
            f"logits of the checkpoint in {request.dtype.value}",
            expected="finite numbers",
            got=f"others for position {error.position} of text {error.text}",
        ) from error
    rows = iter(summary.rows())
    texts = tuple(TextReference(text, tuple(next(rows) for _ in text)) for text in request.texts)
    return Reference(texts, tuple(layers), summary.logit_spread, summary.rounding)


def _relative_rounding(hidden: Tensor) -> float:
    """What rounding changes hidden states [2, n, width] by, as a fraction of their norms."""
    exact, rounded = hidden.double()
    norms = exact.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((rounded - exact).norm(dim=1) / norms).square().mean().sqrt())
