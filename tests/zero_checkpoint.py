"""Writes large checkpoints whose weights are all zero, as sparse files: real sizes, no disk traffic."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from checkpoint import parse_config, stage_tensor_shapes

_SAFETENSORS_NAMES = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}


def write_zero_checkpoint(directory: Path, raw_config: Mapping[str, Any], *, num_shards: int) -> int:
    """Write config, index and `num_shards` shards; returns the size of all weights in bytes."""
    config = parse_config(raw_config)
    shapes = stage_tensor_shapes(config, 0, config.num_layers, has_embeddings=True, has_head=True)
    names = list(shapes)
    weight_map: dict[str, str] = {}
    total = 0
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = names[shard * len(names) // num_shards : (shard + 1) * len(names) // num_shards]
        total += write_zero_shard(directory / file, {n: shapes[n] for n in part}, raw_config["dtype"])
        weight_map |= dict.fromkeys(part, file)
    (directory / "config.json").write_text(json.dumps(raw_config))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def write_zero_shard(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> int:
    """Write one safetensors file of zeros; returns the size of its weights in bytes."""
    name, item_bytes = _SAFETENSORS_NAMES[dtype]
    header: dict[str, Any] = {}
    offset = 0
    for tensor, shape in shapes.items():
        end = offset + prod(shape) * item_bytes
        header[tensor] = {"dtype": name, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + offset)
    return offset
