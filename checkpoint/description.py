"""What the files of a checkpoint state: config, headers and special tokens, before they are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from checkpoint.blueprint import Blueprint
from checkpoint.config import parse_config, parse_dtype
from checkpoint.dtypes import DType
from checkpoint.errors import CheckpointNotFound, UnsupportedFormat
from checkpoint.files import CONFIG_FILE, PARAMS_FILE, is_named, read_json_object
from checkpoint.generation_config import read_generation_config
from checkpoint.headers import Headers, TensorEntry, files_in, read_headers
from checkpoint.other_families import has_row, parse_other, refuse_other
from checkpoint.quantization import Quantization, is_unused
from checkpoint.quantization_config import FIELD as QUANTIZATION_FIELD
from checkpoint.quantization_config import modelopt_config
from checkpoint.wrappers import is_wrapper, named_as_in, text_config

MODELOPT_FILE = "hf_quant_config.json"
"""Has the quantisation of checkpoints by TensorRT Model Optimizer whose config.json has none."""


_PROJECTOR = "mmproj"
"""First word of the names of GGUF files for images, which are no models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """`raw` is config.json or stands for it, `generation` likewise for generation_config.json."""

    raw: Mapping[str, object]
    config: Blueprint
    headers: Headers
    generation: Mapping[str, object]


def describe_directory(path: Path) -> Description:
    """Read config and headers of `path`. Raises CheckpointError."""
    if not path.is_dir():
        raise CheckpointNotFound(f"{path} is not a directory")
    refuse_gguf(path)
    raw = read_config(path)
    check_config(raw)  # report config errors before reading headers
    headers = read_headers(path)
    config = parse_named(raw, headers.tensors)
    return Description(raw=raw, config=config, headers=headers, generation=read_generation_config(path))


def refuse_gguf(path: Path) -> None:
    """Raise UnsupportedFormat for a directory with GGUF files instead of a config or of safetensors."""
    files = sorted(file for file in path.glob("*.gguf") if not file.name.startswith(_PROJECTOR))
    usual = files_in(path)
    has_config = is_named(path / CONFIG_FILE)
    has_weights = is_named(path / usual.single) or is_named(path / usual.index)
    if files and not (has_config and has_weights):
        missing = usual if has_config else CONFIG_FILE
        raise UnsupportedFormat(
            f"{path} has {files[0].name} and no {missing}: give the path of the file, {files[0]}"
        )


def read_config(path: Path) -> dict[str, object]:
    """Read config.json, with the quantisation from another file that may have it.

    Raises CheckpointNotFound without the file, and like `read_json_object`.
    """
    if not is_named(path / CONFIG_FILE):
        raise CheckpointNotFound(
            f"{path} has neither {CONFIG_FILE} nor {PARAMS_FILE}: give the directory of a checkpoint"
        )
    raw = read_json_object(path / CONFIG_FILE)
    if not raw.get(QUANTIZATION_FIELD) and is_named(path / MODELOPT_FILE):
        raw[QUANTIZATION_FIELD] = modelopt_config(read_json_object(path / MODELOPT_FILE))
    return raw


def check_config(raw: Mapping[str, object]) -> None:
    """Raise the errors of a config that need no tensors to be found, see `parse_named`."""
    if has_row(raw):
        parse_config(raw, stored_dtype=DType.F32)
    else:
        refuse_other(raw)


def parse_named(raw: Mapping[str, object], tensors: Mapping[str, TensorEntry]) -> Blueprint:
    """Parse a config with the names and the dtype that `tensors` have.

    Raises like `parse_config`, or like `parse_other` for a family without a row.
    """
    if not has_row(raw):
        return parse_other(raw, tensors)
    config = parse_config(raw, stored_dtype=DType.F32)
    if is_wrapper(raw):
        config = named_as_in(config, tensors)
    config = replace(config, names=config.names.as_in(tensors, config.num_layers))
    embeddings = tensors.get(config.names.embeddings)
    # A quantised dtype is refused later.
    dtype = embeddings.dtype if embeddings is not None and isinstance(embeddings.dtype, DType) else None
    return as_stored(replace(config, dtype=parse_dtype(text_config(raw), dtype)), tensors)


def as_stored(config: Blueprint, tensors: Mapping[str, TensorEntry]) -> Blueprint:
    """`config` with what the tensors of its checkpoint decide: which matrices are quantised, and the head.

    A head that is stored is used, also where the config ties it to the embeddings: transformers ties the two
    only if they are equal, and then it is their copy.
    """
    quantization = config.quantization
    if isinstance(quantization, Quantization):
        quantization = quantization.matching(tensors)
    head = config.names.head.removesuffix("weight")
    has_head = any(name.startswith(head) and not is_unused(name) for name in tensors)
    is_tied = config.tie_word_embeddings and not has_head
    return replace(config, quantization=quantization, tie_word_embeddings=is_tied)
