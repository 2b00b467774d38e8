"""A directory in Mistral's own format as the description of a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from checkpoint.config import parse_config
from checkpoint.description import Description, as_stored
from checkpoint.dtypes import DType
from checkpoint.files import PARAMS_FILE, read_json_object
from checkpoint.generation_config import read_generation_config
from checkpoint.headers import read_headers
from checkpoint.mistral.names import MISTRAL_NAMES, PARTS
from checkpoint.mistral.params import read_params
from checkpoint.quantization import Quantization

_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}
"""Ids of <s> and </s> in all of Mistral's tokenizers; params.json has none."""


def describe_mistral(path: Path) -> Description:
    """Read config and headers of `path`. Raises CheckpointError."""
    params = read_json_object(path / PARAMS_FILE)
    found = read_params(params)
    parse_config(found.raw, stored_dtype=DType.F32, row=found.row)  # report its errors before reading headers
    headers = read_headers(path)
    embeddings = headers.tensors.get(MISTRAL_NAMES.embeddings)
    # A quantised dtype is refused later.
    dtype = embeddings.dtype if embeddings is not None and isinstance(embeddings.dtype, DType) else None
    config = parse_config(found.raw, stored_dtype=dtype or DType.BF16, row=found.row)
    if isinstance(quantization := config.quantization, Quantization):
        config = replace(config, quantization=replace(quantization, parts=PARTS))
    config = as_stored(config, headers.tensors)
    generation = _SPECIAL | read_generation_config(path)
    return Description(raw=params, config=config, headers=headers, generation=generation)
