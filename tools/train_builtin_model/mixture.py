"""Trains a tiny mixture of experts for tests, and records what transformers generates from it."""

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tools.train_builtin_model.batches import Batches
from tools.train_builtin_model.chat_format import END_OF_TEXT, SPECIAL_TOKENS
from tools.train_builtin_model.corpus import documents
from tools.train_builtin_model.network import with_small_residuals
from tools.train_builtin_model.settings import TrainingSettings
from tools.train_builtin_model.tokenizer import train_tokenizer, write_tokenizer
from tools.train_builtin_model.train import fit, held_out_loss, reproducible_torch, write_json, write_model

MAX_POSITIONS = 1024
RECORDED_FILE = "recorded.json"
PROMPTS = ("Once upon a time", "<|user|>What colour is the sky?<|end|><|assistant|>", "The little dog")
NUM_NEW_TOKENS = 96


def mixture_config(vocab_size: int) -> Qwen3MoeConfig:
    """A mixture of 8 experts, of which 2 are used, in four of five layers."""
    end_of_text = SPECIAL_TOKENS.index(END_OF_TEXT)
    return Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=160,
        moe_intermediate_size=80,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        pad_token_id=None,
        output_router_logits=False,
    )


def record(directory: Path) -> None:
    """Write the greedy continuations of `PROMPTS`, of the stored weights in float32."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    recorded = []
    for prompt in PROMPTS:
        tokens = tokenizer.encode(prompt).ids
        ids = torch.tensor([tokens])
        model.generation_config.eos_token_id = None
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        new = output[0, len(tokens) :].tolist()
        text = tokenizer.decode(new, skip_special_tokens=False)
        recorded.append({"prompt": prompt, "prompt_tokens": tokens, "tokens": new, "text": text})
    write_json(directory / RECORDED_FILE, {"recorded": recorded})


def train_mixture(settings: TrainingSettings, output: Path) -> float:
    """Train, write and record; returns the loss on unseen text (nats per token)."""
    output.mkdir(parents=True, exist_ok=True)
    with reproducible_torch(settings):
        texts = islice(documents(settings.seed), settings.tokenizer_documents)
        tokenizer = train_tokenizer(texts, vocab_size=512)
        model = with_small_residuals(Qwen3MoeForCausalLM(mixture_config(512)))
        fit(model, Batches(tokenizer, seed=settings.seed + 1), settings)
        loss = held_out_loss(model, Batches(tokenizer, seed=settings.seed + 2), settings)
        write_model(model, output)
    write_tokenizer(tokenizer, output, max_length=MAX_POSITIONS)
    record(output)
    return loss


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(prog="python -m tools.train_builtin_model.mixture", description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1200)
    arguments = parser.parse_args()
    settings = TrainingSettings(num_steps=arguments.steps, warmup_steps=60, tokenizer_documents=2000)
    loss = train_mixture(settings, arguments.output)
    recorded = json.loads((arguments.output / RECORDED_FILE).read_text())["recorded"]
    print(f"loss on unseen text: {loss:.4f}; {PROMPTS[0]}{recorded[0]['text']}")


if __name__ == "__main__":
    main()
