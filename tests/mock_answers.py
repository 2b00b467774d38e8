"""What mock stages sample, worked out without them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from stage_worker.backends.mock_compute import mock_token


def mock_tokens(
    prompt: Sequence[int], count: int, *, vocab_size: int, eos_token_ids: Collection[int] = ()
) -> list[int]:
    """The first `count` tokens that follow the prompt, for any batch and any split."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        last = len(tokens) - 1
        tokens.append(mock_token(tokens[last], last, vocab_size=vocab_size, eos_token_ids=eos_token_ids))
    return tokens[len(prompt) :]
