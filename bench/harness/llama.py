"""Models of the real-compute figures: Llamas of 88 and 480 million random parameters, and their checkpoints.

python -m bench.harness.llama NAME DIRECTORY      creates the checkpoint
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INITIALIZER_RANGE = 0.1
"""With the default 0.02 a random model repeats one token."""

QUIET_TRANSFORMERS = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
}
"""Environment of a process that only loads or saves a local checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes of a Llama with untied embeddings."""

    hidden: int = 768
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int = 4
    inner: int = 2048
    vocab: int = 8192
    max_tokens: int = 8192

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads

    @property
    def layer_products(self) -> tuple[tuple[int, int], ...]:
        """(out, in) of the matrices of one layer, with query, key and value fused, and gate and up fused."""
        query_key_value = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return (
            (query_key_value, self.hidden),
            (self.hidden, self.num_heads * self.head_dim),
            (2 * self.inner, self.hidden),
            (self.hidden, self.inner),
        )

    @property
    def head_product(self) -> tuple[int, int]:
        return (self.vocab, self.hidden)


LLAMA_88M = Geometry()
LLAMA_480M = Geometry(hidden=1536, num_layers=16, num_heads=16, num_kv_heads=4, inner=4864)
NAMES = {LLAMA_88M: "llama-88m-bf16", LLAMA_480M: "llama-480m-bf16"}


def checkpoint(cache_directory: Path, geometry: Geometry = LLAMA_88M) -> Path:
    """Directory of the checkpoint; created in a child process if missing."""
    directory = cache_directory / NAMES[geometry]
    if (directory / "config.json").exists():
        return directory
    cache_directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_directory) as unfinished:
        target = Path(unfinished) / "model"
        subprocess.run(
            [sys.executable, "-m", "bench.harness.llama", NAMES[geometry], str(target)],
            check=True,
            env={**os.environ, **QUIET_TRANSFORMERS},
        )
        os.replace(target, directory)
    return directory


def make(directory: Path, geometry: Geometry) -> None:
    """Write config.json and model.safetensors in bfloat16, with reproducible random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=geometry.hidden,
        num_hidden_layers=geometry.num_layers,
        num_attention_heads=geometry.num_heads,
        num_key_value_heads=geometry.num_kv_heads,
        intermediate_size=geometry.inner,
        vocab_size=geometry.vocab,
        max_position_embeddings=geometry.max_tokens,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=False,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)


if __name__ == "__main__":
    make(Path(sys.argv[2]), next(geometry for geometry, name in NAMES.items() if name == sys.argv[1]))
