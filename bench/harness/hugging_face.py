"""A peer that generates with Hugging Face transformers in one process, as a user would.

python -m bench.harness.hugging_face MODEL_DIRECTORY

Question: {"threads": 2, "batch": 8, "prompt_tokens": 128, "new_tokens": 64, "seed": 1}. Answer: {"prefill_s":
time of `generate` for one new token, "generate_s": for all of them}. Prompts are random and of equal length,
so there is no padding; bfloat16, SDPA attention, dynamic cache, greedy, no end before `new_tokens`.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def timed(model: Any, prompts: torch.Tensor, num_tokens: int) -> float:
    """Seconds of one `generate`."""
    started = time.perf_counter()
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    took_s = time.perf_counter() - started
    assert output.shape[1] == prompts.shape[1] + num_tokens
    return took_s


def main(directory: str) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    model.eval()
    vocab_size = model.config.vocab_size
    with torch.inference_mode():
        timed(model, torch.zeros((1, 8), dtype=torch.long), 2)
        for line in sys.stdin:
            asked = json.loads(line)
            torch.set_num_threads(asked["threads"])
            generator = torch.Generator().manual_seed(asked["seed"])
            shape = (asked["batch"], asked["prompt_tokens"])
            prompts = torch.randint(3, vocab_size, shape, generator=generator)
            prefill_s = timed(model, prompts, 1)
            generate_s = timed(model, prompts, asked["new_tokens"])
            print(json.dumps({"prefill_s": prefill_s, "generate_s": generate_s}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
