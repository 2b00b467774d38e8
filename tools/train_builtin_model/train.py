"""Trains the built-in model from scratch, or continues from a checkpoint."""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from builtin_model import MODEL_DIRECTORY
from tools.train_builtin_model.batches import Batches
from tools.train_builtin_model.chat_format import END_OF_TEXT, END_OF_TURN, SPECIAL_TOKENS
from tools.train_builtin_model.corpus import documents
from tools.train_builtin_model.model_card import model_card, training_command
from tools.train_builtin_model.network import learning_rate_factor, llama_config, make_network, make_optimizer
from tools.train_builtin_model.settings import ModelShape, TrainingSettings
from tools.train_builtin_model.tokenizer import train_tokenizer, write_tokenizer

STEPS_PER_REPORT = 50


@contextmanager
def reproducible_torch(settings: TrainingSettings) -> Iterator[None]:
    """Fixed seed and thread count and deterministic kernels; sums depend on how threads share the work."""
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(settings.num_threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(settings.seed)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])


def _loss(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Mean next-token cross-entropy in nats over `tokens` (rows, row_tokens)."""
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    assert isinstance(loss, Tensor)
    return loss


def fit(model: PreTrainedModel, batches: Batches, settings: TrainingSettings) -> None:
    """Train all steps of `settings`; prints the loss now and then."""
    optimizer = make_optimizer(model, settings)
    started = time.monotonic()
    for step in range(settings.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.peak_learning_rate * learning_rate_factor(step, settings)
        row_tokens = settings.row_length(step)
        loss = _loss(model, batches.take(settings.batch_tokens // row_tokens, row_tokens))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % STEPS_PER_REPORT == 0:
            print(f"step {step + 1}  loss {loss.item():.4f}  {time.monotonic() - started:.0f} s", flush=True)


def held_out_loss(model: PreTrainedModel, batches: Batches, settings: TrainingSettings) -> float:
    """Mean loss of 32 rows, in nats per token."""
    with torch.no_grad():
        return _loss(model, batches.take(32, settings.long_row_tokens)).item()


def write_json(path: Path, content: dict[str, object]) -> None:
    """Write `content` with sorted keys."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def write_model(model: PreTrainedModel, directory: Path) -> None:
    """Write bfloat16 weights and both configurations, without the version of the library that wrote them."""
    model.to(torch.bfloat16).save_pretrained(directory)  # type: ignore[arg-type]
    (directory / "model.safetensors").chmod(0o644)  # safetensors makes files that only their owner can read
    config = json.loads((directory / "config.json").read_text())
    config.pop("transformers_version", None)
    write_json(directory / "config.json", {**config, "torch_dtype": "bfloat16"})
    ends = [SPECIAL_TOKENS.index(token) for token in (END_OF_TEXT, END_OF_TURN)]
    write_json(
        directory / "generation_config.json",
        {"bos_token_id": ends[0], "eos_token_id": ends, "pad_token_id": ends[0]},
    )


def _new_model(shape: ModelShape, settings: TrainingSettings) -> tuple[Tokenizer, LlamaForCausalLM]:
    texts = islice(documents(settings.seed), settings.tokenizer_documents)
    tokenizer = train_tokenizer(texts, vocab_size=shape.vocab_size)
    return tokenizer, make_network(llama_config(shape, end_of_text=SPECIAL_TOKENS.index(END_OF_TEXT)))


def _trained_model(start: Path) -> tuple[Tokenizer, LlamaForCausalLM]:
    model = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    return Tokenizer.from_file(str(start / "tokenizer.json")), model.train()


def train(shape: ModelShape, settings: TrainingSettings, output: Path, *, start: Path | None = None) -> float:
    """Train and write a Hugging Face directory to `output`; returns the loss on unseen text (nats per token).

    With `start`, a directory written before, training goes on from its weights with its tokenizer and a new
    optimizer. On one machine the same arguments give the same bytes.
    """
    output.mkdir(parents=True, exist_ok=True)
    with reproducible_torch(settings):
        tokenizer, model = _new_model(shape, settings) if start is None else _trained_model(start)
        fit(model, Batches(tokenizer, seed=settings.seed + 1), settings)
        loss = held_out_loss(model, Batches(tokenizer, seed=settings.seed + 2), settings)
        write_model(model, output)
    write_tokenizer(tokenizer, output, max_length=shape.max_positions)
    before = (
        "" if start is None else f"{training_command(TrainingSettings(), goes_on=False)} --output first\n"
    )
    card = model_card(shape, settings, model.num_parameters(), loss, commands_before=before)
    (output / "README.md").write_text(card)
    return loss


def main() -> None:
    """Read the command line and train."""
    defaults = TrainingSettings()
    parser = argparse.ArgumentParser(prog="python -m tools.train_builtin_model.train", description=__doc__)
    parser.add_argument("--output", type=Path, default=MODEL_DIRECTORY)
    parser.add_argument("--steps", type=int, default=defaults.num_steps)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--from", dest="start", type=Path, help="go on from this directory")
    parser.add_argument("--learning-rate", type=float, default=defaults.peak_learning_rate)
    arguments = parser.parse_args()
    settings = replace(
        defaults,
        num_steps=arguments.steps,
        seed=arguments.seed,
        peak_learning_rate=arguments.learning_rate,
    )
    loss = train(ModelShape(), settings, arguments.output, start=arguments.start)
    print(f"loss on unseen text: {loss:.4f}; written to {arguments.output}")


if __name__ == "__main__":
    main()
