"""Trains a tiny model of Gated DeltaNet and attention for tests, and records what transformers generates."""

import argparse
import json
from itertools import islice
from pathlib import Path

from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from tools.train_builtin_model.batches import Batches
from tools.train_builtin_model.chat_format import END_OF_TEXT, SPECIAL_TOKENS
from tools.train_builtin_model.corpus import documents
from tools.train_builtin_model.mixture import MAX_POSITIONS, PROMPTS, RECORDED_FILE, record
from tools.train_builtin_model.network import with_small_residuals
from tools.train_builtin_model.settings import TrainingSettings
from tools.train_builtin_model.tokenizer import train_tokenizer, write_tokenizer
from tools.train_builtin_model.train import fit, held_out_loss, reproducible_torch, write_model

VOCAB_SIZE = 512


def recurrent_config() -> Qwen3_5TextConfig:
    """Five layers, of which one has full attention."""
    end_of_text = SPECIAL_TOKENS.index(END_OF_TEXT)
    return Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=[
            *("linear_attention", "linear_attention", "full_attention"),
            *("linear_attention", "linear_attention"),
        ],
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        pad_token_id=None,
    )


def train_recurrent(settings: TrainingSettings, output: Path) -> float:
    """Train, write and record; returns the loss on unseen text (nats per token)."""
    output.mkdir(parents=True, exist_ok=True)
    with reproducible_torch(settings):
        texts = islice(documents(settings.seed), settings.tokenizer_documents)
        tokenizer = train_tokenizer(texts, vocab_size=VOCAB_SIZE)
        model = with_small_residuals(Qwen3_5ForCausalLM(recurrent_config()))
        fit(model, Batches(tokenizer, seed=settings.seed + 1), settings)
        loss = held_out_loss(model, Batches(tokenizer, seed=settings.seed + 2), settings)
        write_model(model, output)
    write_tokenizer(tokenizer, output, max_length=MAX_POSITIONS)
    record(output)
    return loss


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.train_builtin_model.recurrent", description=__doc__
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    settings = TrainingSettings(num_steps=arguments.steps, warmup_steps=60, tokenizer_documents=2000)
    loss = train_recurrent(settings, arguments.output)
    recorded = json.loads((arguments.output / RECORDED_FILE).read_text())["recorded"]
    print(f"loss on unseen text: {loss:.4f}; {PROMPTS[0]}{recorded[0]['text']}")


if __name__ == "__main__":
    main()
