"""Records the built-in model's output for the self-check: `python -m tools.record_reference`.

Run it when the model was retrained or the texts have changed; a test fails until then.
"""

from pathlib import Path

from builtin_model import MODEL_DIRECTORY, SELF_CHECK_FILE
from checkpoint import Checkpoint, DType
from stage_worker.assignment import ReferenceRequest
from stage_worker.backends.backend import LoadProgress
from stage_worker.loading.reference import compute_reference
from wire.reference import NUM_TEXTS, NUM_TOP, Reference, check_text, reference_key, write_references

_FREE_BYTES = 1 << 30
_NUM_TOKENS = 36
"""Tokens of each text: enough for blocks of 32 tokens."""


def record(path: Path = SELF_CHECK_FILE) -> None:
    """Write the references of all dtypes to `path`."""
    checkpoint = Checkpoint.open(MODEL_DIRECTORY)
    references = {reference_key(dtype, dtype): _reference(checkpoint, dtype) for dtype in DType}
    write_references(path, checkpoint.fingerprint, references)
    path.chmod(0o644)


def _reference(checkpoint: Checkpoint, dtype: DType) -> Reference:
    vocab_size = checkpoint.config.vocab_size
    request = ReferenceRequest(
        directory="",
        fingerprint=checkpoint.fingerprint,
        dtype=dtype,
        texts=tuple(check_text(number, _NUM_TOKENS, vocab_size) for number in range(NUM_TEXTS)),
        num_top=NUM_TOP,
        wire_dtype=dtype,
    )
    return compute_reference(request, checkpoint.directory, free_bytes=_FREE_BYTES, progress=LoadProgress())


if __name__ == "__main__":
    record()
