"""Requests for cluster tests, and their expected tokens from solo runs."""

import random
from collections.abc import Sequence
from pathlib import Path

from tests.integration.cluster import Answer, RequestCase
from tests.local_pipeline import LocalPipeline, Request
from wire.sampling import StepSampling

VOCAB_SIZE = 128


def mixed_cases(
    count: int,
    *,
    max_tokens: int = 16,
    seed: int = 0,
    prompt_lengths: Sequence[int] = (1, 8, 23, 50),
    tokens_below: int = VOCAB_SIZE,
) -> list[RequestCase]:
    """Alternate greedy and seeded requests of different lengths."""
    generator = random.Random(seed)
    return [
        RequestCase(
            prompt=tuple(
                generator.randrange(tokens_below) for _ in range(prompt_lengths[index % len(prompt_lengths)])
            ),
            max_tokens=max_tokens,
            seed=None if index % 2 == 0 else 1000 + index,
        )
        for index in range(count)
    ]


class SoloRuns:
    """Tokens of requests that run alone, in the same stages without a network."""

    def __init__(self, directory: Path, layers: tuple[int, ...] = (3,)) -> None:
        self._pipeline = LocalPipeline(directory, layers, num_blocks=64)
        self._known: dict[tuple[tuple[int, ...], int, int | None, int], list[int]] = {}

    def tokens(self, case: RequestCase, *, choice: int = 0) -> list[int]:
        """Expected tokens of one choice."""
        # Without a seed all choices are the same.
        key = (case.prompt, case.max_tokens, case.seed, choice if case.seed is not None else 0)
        if key not in self._known:
            sampling = StepSampling(
                temperature=0.0 if case.seed is None else 1.0, top_k=0, top_p=1.0, seed=case.seed or 0
            )
            request = Request(
                prompt=case.prompt, max_tokens=case.max_tokens, sampling=sampling, choice=key[-1]
            )
            (self._known[key],) = self._pipeline.serve([request]).tokens
        return self._known[key]

    def check(self, answers: Sequence[Answer]) -> None:
        """Assert that all requests succeeded with their expected tokens."""
        for answer in answers:
            assert answer.error is None, answer.error
            assert answer.succeeded
            assert answer.tokens == self.tokens(answer.case)
