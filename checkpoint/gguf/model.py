"""A GGUF model as the description of a checkpoint directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from checkpoint.config import parse_config
from checkpoint.description import Description
from checkpoint.dtypes import BlockDType, DType
from checkpoint.gguf.families import read_config
from checkpoint.gguf.files import read_gguf_file, read_gguf_files
from checkpoint.gguf.tokenizer import GgufTokenizer
from checkpoint.headers import Headers
from checkpoint.quantization import Blocks, BlockTensors


def describe_gguf(path: Path) -> Description:
    """Read the headers of a GGUF model by the path of its first file. Raises CheckpointError."""
    files = read_gguf_files(path)
    tensors = {name: entry for file in files for name, entry in file.header.tensors.items()}
    found = read_config(files[0], tensors)
    embeddings = found.tensors.get(found.row.names.embeddings)
    stored = None if embeddings is None else embeddings.dtype
    dtype = stored if isinstance(stored, DType) else DType.BF16
    config = parse_config(found.raw, stored_dtype=dtype, row=found.row)
    schemes = {
        name: Blocks(dtype=entry.dtype)
        for name, entry in found.tensors.items()
        if isinstance(entry.dtype, BlockDType)
    }
    return Description(
        raw={**found.raw, "general.architecture": files[0].metadata["general.architecture"]},
        config=replace(config, quantization=BlockTensors(schemes=schemes) if schemes else None),
        headers=Headers(tensors=found.tensors, shards=tuple(file.header for file in files)),
        generation=GgufTokenizer(files[0]).generation_config(),
    )


def gguf_tokenizer_files(path: Path) -> dict[str, bytes]:
    """The tokenizer's files by name, as a directory would have them. Raises CheckpointError."""
    return GgufTokenizer(read_gguf_file(path)).files()
