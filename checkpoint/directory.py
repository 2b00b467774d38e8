"""Opens a checkpoint directory: everything is checked, nothing is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from checkpoint.config import ModelConfig, parse_config
from checkpoint.dtypes import DType
from checkpoint.errors import GGUF_ADVICE, CheckpointNotFound, UnsupportedFormat
from checkpoint.fingerprint import fingerprint
from checkpoint.generation import bos_token_id, eos_token_ids, read_generation_config
from checkpoint.headers import TensorEntry
from checkpoint.json_files import read_json_object
from checkpoint.samples import sample_digest
from checkpoint.shards import read_headers
from checkpoint.tensors import EMBEDDINGS, verify_tensors

CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A Hugging Face safetensors directory whose config and headers have been checked.

    `tensors` maps every tensor's name to its place. `fingerprint` identifies config, layout and
    sampled values. `eos_token_ids` end a sequence; it may be empty.
    """

    directory: Path
    config: ModelConfig
    tensors: Mapping[str, TensorEntry]
    fingerprint: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Read config and headers of `directory` and check all of them; of the weights, samples are read.

        Raises CheckpointError (see checkpoint.errors): a missing directory or file, broken JSON, a model or
        field that is not supported, tensors that are missing, unknown or of another shape.
        """
        path = Path(directory)
        if not path.is_dir():
            raise CheckpointNotFound(f"{path} is not a directory")
        _refuse_gguf(path)
        raw = read_json_object(path / CONFIG_FILE)
        parse_config(raw, stored_dtype=DType.F32)  # what the config refuses is told before any header is read
        headers = read_headers(path)
        config = parse_config(raw, stored_dtype=_stored_dtype(headers.tensors))
        verify_tensors(config, headers.tensors)
        generation = read_generation_config(path)
        return cls(
            directory=path,
            config=config,
            tensors=headers.tensors,
            fingerprint=fingerprint(raw, headers.shards, sample_digest(path, headers.tensors)),
            eos_token_ids=eos_token_ids(generation, raw),
            bos_token_id=bos_token_id(generation, raw),
        )


def _refuse_gguf(path: Path) -> None:
    if not (path / CONFIG_FILE).exists() and (files := sorted(path.glob("*.gguf"))):
        raise UnsupportedFormat(f"{path} has {files[0].name} and no {CONFIG_FILE}: {GGUF_ADVICE}")


def _stored_dtype(tensors: Mapping[str, TensorEntry]) -> DType | None:
    return tensors[EMBEDDINGS].dtype if EMBEDDINGS in tensors else None
