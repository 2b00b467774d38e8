"""The model that stages are measured with: an 88 M-parameter Llama in bfloat16 with random weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def make_checkpoint(directory: Path) -> Path:
    """Writes config.json and one safetensors file to `directory`, which is returned.

    Matrices are normal with a deviation of 0.1: narrower ones make a model that repeats one token.
    """
    generator = torch.Generator().manual_seed(0)
    hidden, inner, kv, vocab = 768, 2048, 4 * 64, 8192

    def matrix(*size: int) -> torch.Tensor:
        return (torch.randn(size, generator=generator) * 0.1).to(torch.bfloat16)

    def ones() -> torch.Tensor:
        return torch.ones(hidden, dtype=torch.bfloat16)

    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden), "model.norm.weight": ones()}
    tensors["lm_head.weight"] = matrix(vocab, hidden)
    for layer in range(12):
        sizes = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}{name}.weight": matrix(*size) for name, size in sizes.items()}
        tensors[f"{prefix}input_layernorm.weight"] = ones()
        tensors[f"{prefix}post_attention_layernorm.weight"] = ones()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, directory / "model.safetensors")
    return directory
