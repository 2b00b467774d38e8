"""The model of `python -m bench gpu`: layers of Llama-3-8B's shape with random weights, made on the device.

The first and the last layer are those of the stages beside the reference stage, which has the 16 between
them. Weights have a standard deviation of 0.02. The head's is six times that: logits then have a few tokens
well above the others, as those of trained models, instead of a flat distribution.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.harness.llama import Geometry

REFERENCE = Geometry(
    hidden=4096, num_layers=18, num_heads=32, num_kv_heads=8, inner=14336, vocab=128256, max_tokens=65536
)
TINY = Geometry(hidden=64, num_layers=4, num_heads=4, num_kv_heads=2, inner=128, vocab=512, max_tokens=512)
WEIGHTS_FILE = "model.safetensors"
DEVIATION, HEAD_DEVIATION = 0.02, 0.12
ELEMENT_BYTES = {torch.bfloat16: 2, torch.float32: 4}
_NAMES = {torch.bfloat16: ("bfloat16", "BF16"), torch.float32: ("float32", "F32")}


def geometry_of(*, is_quick: bool) -> Geometry:
    return TINY if is_quick else REFERENCE


def dtype_of(device: str) -> torch.dtype:
    """The run dtype: bfloat16 on a GPU, float32 on a CPU, which may lack bfloat16."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def shapes_of(geometry: Geometry) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of the checkpoint, by its name."""
    width, inner = geometry.hidden, geometry.inner
    queries, keys = geometry.num_heads * geometry.head_dim, geometry.num_kv_heads * geometry.head_dim
    layer = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    layers = {
        f"model.layers.{index}.{name}.weight": shape
        for index in range(geometry.num_layers)
        for name, shape in layer.items()
    }
    ends: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (geometry.vocab, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (geometry.vocab, width),
    }
    return layers | ends


def config_of(geometry: Geometry, dtype: torch.dtype) -> dict[str, Any]:
    """config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": geometry.hidden,
        "num_hidden_layers": geometry.num_layers,
        "num_attention_heads": geometry.num_heads,
        "num_key_value_heads": geometry.num_kv_heads,
        "head_dim": geometry.head_dim,
        "intermediate_size": geometry.inner,
        "vocab_size": geometry.vocab,
        "max_position_embeddings": geometry.max_tokens,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": _NAMES[dtype][0],
    }


def write_checkpoint(directory: Path, geometry: Geometry, device: torch.device, dtype: torch.dtype) -> int:
    """Write config.json and model.safetensors, and return the size of the weights in bytes.

    Source of the format: https://github.com/huggingface/safetensors#format
    """
    directory.mkdir(parents=True)
    shapes = shapes_of(geometry)
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + torch.Size(shape).numel() * ELEMENT_BYTES[dtype]
        header[name] = {"dtype": _NAMES[dtype][1], "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with (directory / WEIGHTS_FILE).open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in _tensors(shapes, device, dtype):
            file.write(tensor.cpu().flatten().view(torch.uint8).numpy().data)
    (directory / "config.json").write_text(json.dumps(config_of(geometry, dtype)))
    return end


def _tensors(
    shapes: dict[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype
) -> Iterator[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    for name, shape in shapes.items():
        if len(shape) == 1:
            yield torch.ones(shape, dtype=dtype, device=device)
        else:
            deviation = HEAD_DEVIATION if name.startswith("lm_head") else DEVIATION
            made = torch.empty(shape, dtype=dtype, device=device)
            yield made.normal_(0.0, deviation, generator=generator)
