"""The untrained network and its optimizer."""

import math
from typing import TypeVar

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tools.train_builtin_model.settings import ModelShape, TrainingSettings

INIT_STD = 0.04
Model = TypeVar("Model", bound=PreTrainedModel)


def llama_config(shape: ModelShape, *, end_of_text: int) -> LlamaConfig:
    """The Hugging Face configuration of `shape`; `end_of_text` is that token's id."""
    return LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=True,
        initializer_range=INIT_STD,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        pad_token_id=None,
    )


def make_network(config: LlamaConfig) -> LlamaForCausalLM:
    """Make an untrained float32 model."""
    return with_small_residuals(LlamaForCausalLM(config))


def with_small_residuals(model: Model) -> Model:
    """`model` with weights into the residual stream sqrt(2 * layers) smaller (GPT-2)."""
    scale = 1 / math.sqrt(2 * model.config.num_hidden_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")):
                parameter.mul_(scale)
    return model


def make_optimizer(model: nn.Module, settings: TrainingSettings) -> torch.optim.AdamW:
    """AdamW with weight decay for matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    norms = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.peak_learning_rate, betas=(0.9, 0.98), fused=True)


def learning_rate_factor(step: int, settings: TrainingSettings) -> float:
    """Share of the peak learning rate in `step`: linear warmup, then a cosine down to one hundredth."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, settings.num_steps - settings.warmup_steps)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress))
