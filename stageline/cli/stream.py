"""Writes a completion to the terminal as it arrives, and tells how fast it came."""

import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from stageline.output import FinishReason, GenerateOutput, Usage


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A finished completion. Times count from when it was asked for."""

    text: str
    finish_reason: FinishReason
    usage: Usage
    first_token_s: float
    total_s: float

    def describe_speed(self) -> str:
        """One line: tokens, seconds, tokens per second, time to the first token."""
        num_tokens = self.usage.completion_tokens
        return (
            f"{num_tokens} tokens in {self.total_s:.2f} s, {num_tokens / self.total_s:.1f} tokens/s; "
            f"first token after {self.first_token_s:.2f} s"
        )


async def write_stream(outputs: AsyncGenerator[GenerateOutput, None], *, as_token_ids: bool) -> Completion:
    """Writes text (or token ids, separated by commas) to standard output as it comes, and ends the line."""
    start = time.perf_counter()
    first_token_s: float | None = None
    pieces: list[str] = []
    async with aclosing(outputs):
        async for output in outputs:
            if first_token_s is None:
                first_token_s = time.perf_counter() - start
            _write(_as_ids(output) if as_token_ids else output.text)
            pieces.append(output.text)
            last = output
    _write("\n")
    assert last.finish_reason is not None, "the client checks that a stream ends with a finish reason"
    assert last.usage is not None, "the client checks that usage comes with the finish reason"
    assert first_token_s is not None
    return Completion(
        text="".join(pieces),
        finish_reason=last.finish_reason,
        usage=last.usage,
        first_token_s=first_token_s,
        total_s=time.perf_counter() - start,
    )


def _as_ids(output: GenerateOutput) -> str:
    separator = "," if output.first_token_index > 0 and output.token_ids else ""
    return separator + ",".join(map(str, output.token_ids))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
