"""Client of the peer that generates with Hugging Face transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.harness.llama import QUIET_TRANSFORMERS
from bench.harness.peer import Peer


@dataclass(frozen=True, slots=True)
class GenerateRate:
    """Tokens per second of one `generate` call."""

    prefill: float
    decode: float


class HuggingFace(Peer):
    """One process that generates with a given number of threads."""

    def __init__(self, model: Path, *, max_threads: int = 2) -> None:
        module = "bench.harness.hugging_face"
        super().__init__(module, str(model), num_threads=max_threads, environment=QUIET_TRANSFORMERS)

    async def generate(
        self, *, num_threads: int, batch: int, prompt_tokens: int, new_tokens: int, seed: int = 0
    ) -> GenerateRate:
        """Generate the first token only, then all; decode is the difference."""
        answer = await self.ask(
            {
                "threads": num_threads,
                "batch": batch,
                "prompt_tokens": prompt_tokens,
                "new_tokens": new_tokens,
                "seed": seed,
            }
        )
        decode_s = answer["generate_s"] - answer["prefill_s"]
        return GenerateRate(batch * prompt_tokens / answer["prefill_s"], batch * (new_tokens - 1) / decode_s)
