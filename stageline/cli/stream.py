"""Writes completions to the terminal as they arrive, and tells how fast they came."""

import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeAlias

from stageline.cli.failures import USAGE, CommandFailed
from stageline.completion import Completion, Completions
from stageline.output import GenerateOutput

Show: TypeAlias = Callable[[GenerateOutput, Completion | None], None]
"""Shows an output; with the last one of a choice comes the whole choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Finished completions, in order. Times count from when they were asked for."""

    completions: list[Completion]
    first_output_s: float
    total_s: float

    def describe_speed(self) -> str:
        """One line: tokens, seconds, tokens per second, time to the first token."""
        num_tokens = sum(completion.usage.completion_tokens for completion in self.completions)
        return (
            f"{num_tokens} tokens in {self.total_s:.2f} s, {num_tokens / self.total_s:.1f} tokens/s; "
            f"first token after {self.first_output_s:.2f} s"
        )


async def show_stream(outputs: AsyncGenerator[GenerateOutput, None], show: Show) -> Report:
    """Shows every output when it comes."""
    start = time.perf_counter()
    first_output_s: float | None = None
    completions = Completions()
    async with aclosing(outputs):
        async for output in outputs:
            if first_output_s is None:
                first_output_s = time.perf_counter() - start
            show(output, completions.add(output))
    assert first_output_s is not None, "the client checks that every choice ends with a message"
    return Report(
        completions=completions.in_order(),
        first_output_s=first_output_s,
        total_s=time.perf_counter() - start,
    )


def show_for(*, num_choices: int, as_token_ids: bool, is_json: bool) -> Show:
    """How a command shows outputs: one choice as it comes, several each at its end, JSON not at all yet."""
    if is_json:
        return lambda output, completion: None
    return live(as_token_ids=as_token_ids) if num_choices == 1 else by_choice(as_token_ids=as_token_ids)


def live(*, as_token_ids: bool) -> Show:
    """Writes one choice to standard output as it comes, as text or as ids with commas, and ends the line."""
    num_shown = 0

    def show(output: GenerateOutput, completion: Completion | None) -> None:
        nonlocal num_shown
        if output.choice > 0:
            raise CommandFailed("the request has several choices; say how many with -n", reason=USAGE)
        if as_token_ids:
            _write("".join(f",{token_id}" for token_id in output.token_ids)[0 if num_shown else 1 :])
            num_shown += len(output.token_ids)
        else:
            _write(output.text)
        if completion is not None:
            _write("\n")

    return show


def by_choice(*, as_token_ids: bool) -> Show:
    """Writes every choice to standard output when it has ended, under a line that tells which one it is."""

    def show(output: GenerateOutput, completion: Completion | None) -> None:
        if completion is not None:
            usage = f"{completion.usage.completion_tokens} tokens, ended by {completion.finish_reason}"
            ids = ",".join(map(str, completion.token_ids))
            _write(
                f"--- choice {completion.choice}: {usage} ---\n{ids if as_token_ids else completion.text}\n"
            )

    return show


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
