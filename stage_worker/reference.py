"""What the checkpoint on this worker's disk answers to a short prompt, for the coordinator's self-check.

Computed in float32 on the CPU, whatever the worker computes with: so it holds for every device, takes none of
a GPU's memory, and is not wrong where the device or its kernels are.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from checkpoint import Checkpoint, CheckpointError
from stage_worker.loading import fingerprint_mismatch
from stage_worker.reference_request import ReferenceRequest
from stage_worker.sampling.finite import non_finite_rows
from stage_worker.sampling.logprobs import token_logprobs
from stage_worker.stage_load import LoadProgress, StageLoadError
from stage_worker.streamed_model import StreamedModel
from wire.errors import HandshakeMismatch, InvalidRequest, Overloaded, StaleStream
from wire.reference import Reference
from wire.steps import TokenLogprobs


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
    if max(request.tokens) >= vocab_size:
        raise InvalidRequest(f"token {max(request.tokens)} is outside the vocabulary [0, {vocab_size})")
    needed_bytes = StreamedModel.memory_bytes(checkpoint, request.dtype, len(request.tokens))
    if needed_bytes > free_bytes:
        raise Overloaded(f"a reference takes {needed_bytes} bytes of memory, and {free_bytes} are free")


def _compute(request: ReferenceRequest, checkpoint: Checkpoint, progress: LoadProgress) -> Reference:
    model = StreamedModel(checkpoint, request.dtype, on_progress=lambda _: progress.advance(0))
    logits, rounded = model.logits(list(request.tokens))
    for row in non_finite_rows(logits):
        raise HandshakeMismatch(
            f"logits of the checkpoint in {request.dtype.value}",
            expected="finite numbers",
            got=f"others for position {row + 1}",
        )
    following = [*request.tokens[1:], int(logits[-1].argmax())]
    rows = token_logprobs(logits, following, [request.num_top] * len(following))
    spread = math.sqrt(float(logits.var(dim=-1, correction=0).mean()))
    return Reference(request.tokens, rows, spread, _rounding(rows, rounded.log_softmax(dim=-1)))


def _rounding(rows: Sequence[TokenLogprobs], rounded: Tensor) -> float:
    """Root mean square of what the listed tokens differ by; `rounded` [n, vocab_size]."""
    squares = [
        (float(values[token]) - logprob) ** 2
        for row, values in zip(rows, rounded, strict=True)
        for token, logprob in {row.token: row.logprob, **dict(row.top)}.items()
    ]
    return math.sqrt(math.fsum(squares) / len(squares))
