"""Writes large checkpoints with random weights and the tokenizer of the built-in model."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from builtin_model import MODEL_DIRECTORY
from checkpoint import Checkpoint
from tests.zero_checkpoint import write_zero_checkpoint


def write_random_checkpoint(directory: Path, raw_config: Mapping[str, Any], *, num_shards: int) -> int:
    """Write a checkpoint in bfloat16 to `directory`; returns the size of all weights in bytes."""
    directory.mkdir(exist_ok=True)
    size_bytes = write_zero_checkpoint(directory, raw_config, num_shards=num_shards)
    entries = Checkpoint.open(directory).tensors
    for file in {entry.file for entry in entries.values()}:
        shapes = {name: entry.shape for name, entry in entries.items() if entry.file == file}
        weights = {name: 0.05 * torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        save_file(weights, directory / file)
    for path in MODEL_DIRECTORY.glob("tokenizer*"):
        shutil.copy(path, directory)
    return size_bytes
