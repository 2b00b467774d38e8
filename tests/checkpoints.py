"""Makes small random-weight checkpoints with transformers, for parity tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from checkpoint import TensorEntry
from checkpoint.directory import sampled_ranges

_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}


def make_checkpoint(
    directory: Path,
    family: str,
    *,
    num_layers: int = 8,
    seed: int = 0,
    max_shard_size: str | None = None,
    dtype: str = "float32",
    **config_overrides: Any,
) -> Path:
    """Write a checkpoint of the `family` (a model_type) to `directory` and return that.

    The weights are wide enough (std 0.1) and the norm weights and biases perturbed, so that the model does
    not repeat one token and a forgotten norm or bias changes its output. There is no EOS id unless
    `config_overrides` (keys of config.json) gives one. `max_shard_size` ("100KB") makes a sharded one.
    """
    config = make_config(family, num_layers=num_layers, **config_overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = _new_model(config)
        perturb(model)
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size or "50GB")
    return directory


def make_config(family: str, *, num_layers: int, **config_overrides: Any) -> PreTrainedConfig:
    """The config of a checkpoint that `make_checkpoint` writes."""
    config: PreTrainedConfig = AutoConfig.for_model(
        family, num_hidden_layers=num_layers, **(_SHAPE | config_overrides)
    )
    return config


def _new_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A random model; transformers' auto class knows Mistral 4 within a wrapper only."""
    if isinstance(config, Mistral4Config):
        return Mistral4ForCausalLM(config)
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call, no-any-return]


def load_reference(directory: Path) -> PreTrainedModel:
    """The checkpoint as a transformers model in its own dtype, for comparison."""
    config = json.loads((directory / "config.json").read_text())
    # Of transformers' implementations, only the eager one limits scores and has sinks.
    families = ("gpt_oss", "deepseek_v4", "hy_v4")
    is_eager = config.get("attn_logit_softcapping") or config["model_type"] in families
    attention = "eager" if is_eager else "sdpa"
    family = Mistral4ForCausalLM if config["model_type"] == "mistral4" else AutoModelForCausalLM
    model: PreTrainedModel = family.from_pretrained(directory, attn_implementation=attention)
    model.train(mode=False)
    return model


def edit_config(directory: Path, **changes: Any) -> Path:
    """Set keys of `directory`/config.json; a value of `...` removes the key."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return directory


def flip_byte(file: Path, at: int) -> None:
    """Changes the byte at `at`, and the same byte back."""
    with file.open("r+b") as stream:
        stream.seek(at)
        octet = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([octet ^ 0x41]))


def byte_outside_of_samples(name: str, entry: TensorEntry) -> int:
    """Place in its file of a byte that the fingerprint does not know, near the middle of the tensor."""
    ranges = sampled_ranges(name, entry)
    middle = (entry.begin + entry.end) // 2
    free = (at for at in range(middle, entry.end) if all(not begin <= at < end for begin, end in ranges))
    return next(free)


@torch.no_grad()
def perturb(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name:
            around = round(float(parameter.mean()))  # 0 where the model adds 1
            parameter.copy_(torch.empty_like(parameter).uniform_(around - 0.4, around + 0.4))
        elif name.endswith("sinks"):
            parameter.copy_(torch.empty_like(parameter).normal_(std=2.0))
        elif name.endswith((".bias", "_proj_bias", "dt_bias")):
            parameter.copy_(torch.empty_like(parameter).normal_(std=0.3))
    for name, buffer in (*model.named_buffers(), *model.named_parameters()):
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.empty_like(buffer).normal_(std=0.3))
        elif name.endswith(("mamba.D", "mixer.D")):
            buffer.copy_(torch.empty_like(buffer).normal_(std=1.0))
        elif name.endswith("forget_gate.A_log"):  # states outlast a few tokens
            buffer.copy_(torch.empty_like(buffer).uniform_(-3.0, 0.0))
        elif name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
            buffer.copy_(torch.empty_like(buffer).uniform_(0.6, 1.4))
        elif name.endswith(("_hc.base", "_hc.scale", "hc_base", "hc_scale", "position_bias")):
            buffer.copy_(torch.empty_like(buffer).normal_(std=1.0))
        elif name.endswith("tid2eid"):
            count: int = model.config.n_routed_experts
            buffer.copy_(torch.stack([torch.randperm(count)[: buffer.shape[1]] for _ in buffer]))
