"""Microseconds per token for turning tokens into text and looking for stop strings in it.

    python -m bench.text [--tokens 20000]

Small tokenizers of the tests, of both kinds, over their own training text. "text" is a `OutputBuffer` without
stop strings, made by one read; "+ stops" has four, one of which begins often and never comes to its end.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from coordinator.engine.output_buffer import OutputBuffer
from coordinator.scheduler.sequence import FinishReason
from tests.unit.text.trained_tokenizers import CORPUS, byte_level, load, sentencepiece_like
from text.detokenizer import IncrementalDetokenizer
from text.tokenizer import TextCodec

KINDS = {"byte level": byte_level, "SentencePiece-like": sentencepiece_like}
STOPS = ("\n\nUser:", "<|im_end|>", "Once upon a midnight", "###")
ROUNDS = 5


def token_time(codec: TextCodec, tokens: Sequence[int], *, stops: Sequence[str]) -> float:
    """Seconds per token from its arrival to its text; the median of some rounds, in processor time."""
    times = []
    for _ in range(ROUNDS):
        transcript = OutputBuffer(IncrementalDetokenizer(codec, ()), stops=stops)
        started = time.process_time()
        for token in tokens:
            transcript.append(token)
        transcript.finish(FinishReason.LENGTH)
        transcript.read(0, max_tokens=len(tokens))
        times.append((time.process_time() - started) / len(tokens))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=20_000)
    options = parser.parse_args()
    print(f"{'us per token':<20} {'text':>6} {'+ stops':>8}")
    for kind, make in KINDS.items():
        with tempfile.TemporaryDirectory() as directory:
            codec = load(Path(directory), make())
        text = codec.encode("".join(CORPUS))
        tokens = (text * (options.tokens // len(text) + 1))[: options.tokens]
        alone, stopping = (token_time(codec, tokens, stops=stops) for stops in ((), STOPS))
        print(f"{kind:<20} {alone * 1e6:>6.1f} {stopping * 1e6:>8.1f}")


if __name__ == "__main__":
    main()
