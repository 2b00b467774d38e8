"""A GGUF model as the description of a checkpoint directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from checkpoint.config import parse_config
from checkpoint.description import Description
from checkpoint.dtypes import BlockDType, DType
from checkpoint.gguf.families import MOST_TENSORS, as_named, read_config
from checkpoint.gguf.files import GgufFile, read_gguf_file, read_gguf_files
from checkpoint.gguf.tokenizer import GgufTokenizer
from checkpoint.headers import Headers, TensorEntry
from checkpoint.quantization import Blocks, BlockTensors


def describe_gguf(path: Path, *, is_sparse: bool = False) -> Description:
    """Read the headers of a GGUF model by the path of its first file. Raises CheckpointError.

    With `is_sparse`, the files have holes in the place of tensors.
    """
    files = read_gguf_files(path)
    stored = {name: entry for file in files for name, entry in file.header.tensors.items()}
    found = read_config(files[0], stored, is_sparse=is_sparse)
    headers = _headers(files)
    embeddings = headers.tensors.get(found.row.names.embeddings)
    kind = None if embeddings is None else embeddings.dtype
    dtype = kind if isinstance(kind, DType) else DType.BF16
    config = parse_config(found.raw, stored_dtype=dtype, row=found.row)
    schemes = {
        name: Blocks(dtype=entry.dtype)
        for name, entry in headers.tensors.items()
        if isinstance(entry.dtype, BlockDType)
    }
    return Description(
        raw={**found.raw, "general.architecture": files[0].metadata["general.architecture"]},
        config=replace(config, quantization=BlockTensors(schemes=schemes) if schemes else None),
        headers=headers,
        generation=GgufTokenizer(files[0]).generation_config(),
    )


def gguf_headers(path: Path) -> Headers:
    """The tensors of a GGUF model, without a look at its metadata. Raises CheckpointError."""
    return _headers(read_gguf_files(path))


def _headers(files: tuple[GgufFile, ...]) -> Headers:
    tensors: dict[str, TensorEntry] = {}
    shards = []
    for file in files:
        own = as_named(file.path, file.header.tensors, limit=MOST_TENSORS - len(tensors))
        tensors |= own
        shards.append(replace(file.header, tensors=own))
    return Headers(tensors=tensors, shards=tuple(shards))


def gguf_tokenizer_files(path: Path) -> dict[str, bytes]:
    """The tokenizer's files by name, as a directory would have them. Raises CheckpointError."""
    return GgufTokenizer(read_gguf_file(path)).files()
