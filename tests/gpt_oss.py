"""Writes small checkpoints of gpt-oss, whose experts are 4-bit floats."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.families import make_family
from tests.quantized import mxfp4

PUBLISHED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"),
    ],
}


def make_gpt_oss(parent: Path) -> tuple[Path, Path]:
    """A plain checkpoint, [experts, in, out], and a packed one, [experts, out, in], of the same weights."""
    plain = make_family(parent / "plain", "gpt_oss", num_layers=2)
    packed = parent / "packed"
    shutil.copytree(plain, packed)
    config = json.loads((packed / "config.json").read_text()) | {"quantization_config": PUBLISHED}
    (packed / "config.json").write_text(json.dumps(config))
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    rng = np.random.default_rng(5)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, columns, rows = tensors[name].shape
        found = [mxfp4(is_gpt_oss=True)(rng, name, rows, columns) for _ in range(num_experts)]
        weights = torch.from_numpy(np.stack([matrix for _, matrix in found]))
        tensors[name] = weights.transpose(1, 2).contiguous()
        del stored[name]
        for part in (f"{name}_blocks", f"{name}_scales"):
            given = [written[part] for written, _ in found]
            octets = np.stack([np.frombuffer(one.data, np.uint8).reshape(one.shape) for one in given])
            stored[part] = torch.from_numpy(octets)
    for directory, content in ((plain, tensors), (packed, stored)):
        save_file(content, directory / "model.safetensors", metadata={"format": "pt"})
    return plain, packed
