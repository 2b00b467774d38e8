"""Writes large checkpoints whose weights are all zero, as sparse files: real sizes, no disk traffic."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from checkpoint import DType, parse_config, stage_tensor_shapes
from checkpoint.dtypes import StoredDType
from checkpoint.tensors import stored_tensors

Zeros = tuple[StoredDType, tuple[int, ...]]


def write_zero_checkpoint(directory: Path, raw_config: Mapping[str, Any], *, num_shards: int) -> int:
    """Write config, index and `num_shards` shards; returns the size of all weights in bytes.

    Of a config with `quantization_config`, matrices are stored in the first layout that it allows.
    """
    config = parse_config(raw_config)
    shapes = stage_tensor_shapes(config, 0, config.num_layers, has_embeddings=True, has_head=True)
    zeros: dict[str, Zeros] = {}
    for name, tensor in stored_tensors(config, shapes).items():
        is_plain = name in shapes and DType.from_name(raw_config["dtype"]) in tensor.dtypes
        zeros[name] = (config.dtype if is_plain else tensor.dtypes[0], (tensor.shapes or ((1,),))[0])
    names = list(zeros)
    weight_map: dict[str, str] = {}
    total = 0
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = names[shard * len(names) // num_shards : (shard + 1) * len(names) // num_shards]
        total += write_zeros(directory / file, {name: zeros[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    (directory / "config.json").write_text(json.dumps(raw_config))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def write_zero_shard(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> int:
    """Write one safetensors file of zeros in `dtype`; returns the size of its weights in bytes."""
    return write_zeros(path, {name: (DType.from_name(dtype), shape) for name, shape in shapes.items()})


def write_zeros(path: Path, tensors: Mapping[str, Zeros]) -> int:
    """Write one safetensors file of zeros; returns the size of its tensors in bytes."""
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + prod(shape) * dtype.size_bytes
        header[name] = {"dtype": dtype.value.upper(), "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + offset)
    return offset
