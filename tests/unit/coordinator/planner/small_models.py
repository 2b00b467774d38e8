"""Model shapes and workers for planner tests. Sizes are in bytes."""

from __future__ import annotations

from checkpoint import Blueprint, DType, parse_config
from coordinator.planner.plan import StepLimits, WorkerCapacity

GIB = 1 << 30


def llama(*, num_layers: int = 8, tied: bool = False, vocab_size: int = 40, **shape: int) -> Blueprint:
    """A Llama of 8 layers, some kilobytes each by default."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return parse_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": num_layers,
            "vocab_size": vocab_size,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": tied,
            **sizes,
            **shape,
        },
        stored_dtype=DType.F32,
    )


def llama_8b(num_layers: int = 32) -> Blueprint:
    """The shape of Llama-3.1-8B."""
    return llama(
        num_layers=num_layers,
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
    )


def workers(*memory_bytes: int) -> list[WorkerCapacity]:
    """gpu-a, gpu-b, ... (numbers after the 26th) with these bytes of memory."""
    names = [f"gpu-{chr(ord('a') + i)}" if i < 26 else f"gpu-{i}" for i in range(len(memory_bytes))]
    return [
        WorkerCapacity(name=name, memory_bytes=size) for name, size in zip(names, memory_bytes, strict=True)
    ]


SMALL_STEPS = StepLimits(max_step_tokens=8, max_step_sequences=2, max_sequence_tokens=32)
USUAL_STEPS = StepLimits(max_step_tokens=512, max_step_sequences=64, max_sequence_tokens=8192)
