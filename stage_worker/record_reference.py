"""Records what the built-in model answers to a short prompt: `python -m stage_worker.record_reference`.

To be run again when the model was trained anew; a test fails until then.
"""

import json
from pathlib import Path

from google.protobuf import json_format

from builtin_model import MODEL_DIRECTORY, SELF_CHECK_FILE
from checkpoint import Checkpoint, DType
from stage_worker.reference import compute_reference
from stage_worker.reference_request import ReferenceRequest
from stage_worker.stage_load import LoadProgress
from wire.reference import NUM_TOP, Reference, check_prompt, encode_reference

_FREE_BYTES = 1 << 30


def record(path: Path = SELF_CHECK_FILE) -> None:
    """Writes the references of all dtypes to `path`, one a line."""
    checkpoint = Checkpoint.open(MODEL_DIRECTORY)
    tokens = check_prompt(checkpoint.config.vocab_size)
    references = {dtype.value: _as_json(_reference(checkpoint, dtype, tokens)) for dtype in DType}
    lines = ",\n".join(f'"{name}": {text}' for name, text in references.items())
    head = f'"fingerprint": "{checkpoint.fingerprint}",\n"tokens": {list(tokens)}'
    path.write_text(f'{{{head},\n"references": {{\n{lines}\n}}}}\n')


def _reference(checkpoint: Checkpoint, dtype: DType, tokens: tuple[int, ...]) -> Reference:
    request = ReferenceRequest(
        directory="", fingerprint=checkpoint.fingerprint, dtype=dtype, tokens=tokens, num_top=NUM_TOP
    )
    return compute_reference(request, checkpoint.directory, free_bytes=_FREE_BYTES, progress=LoadProgress())


def _as_json(reference: Reference) -> str:
    message = encode_reference(reference)
    return json.dumps(json_format.MessageToDict(message, preserving_proto_field_name=True))


if __name__ == "__main__":
    record()
