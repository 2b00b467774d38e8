"""Completions on the terminal and as JSON."""

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeAlias

from rich import box
from rich.console import Console
from rich.table import Table

from stageline.cli.options import USAGE, CommandFailed
from stageline.client.output import Completion, Completions, GenerateOutput, TokenLogprobs

Show: TypeAlias = Callable[[GenerateOutput, Completion | None], None]
"""Shows an output, and at the end of a choice its completion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Finished completions, in order; times in seconds since the call."""

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


_PIPE_WIDTH = 1000
"""Columns where nothing is a terminal: rows stay whole, for tools that read lines."""


def line_console(*, highlight: bool = True) -> Console:
    """A console for standard output that breaks lines for terminals only, or after COLUMNS."""
    is_wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=highlight, width=_PIPE_WIDTH if is_wide else None)


async def show_stream(outputs: AsyncGenerator[GenerateOutput, None], show: Show) -> Report:
    """Show each output on arrival."""
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
    """Show a single choice as it is generated, several each at its end; with JSON, nothing."""
    if is_json:
        return lambda output, completion: None
    return live(as_token_ids=as_token_ids) if num_choices == 1 else by_choice(as_token_ids=as_token_ids)


def live(*, as_token_ids: bool) -> Show:
    """Write one choice to standard output as it is generated, as text or as comma-separated ids."""
    num_shown = 0

    def show(output: GenerateOutput, completion: Completion | None) -> None:
        nonlocal num_shown
        if output.choice > 0:
            raise CommandFailed("the request has several choices; set their number with -n", reason=USAGE)
        if as_token_ids:
            _write("".join(f",{token_id}" for token_id in output.token_ids)[0 if num_shown else 1 :])
            num_shown += len(output.token_ids)
        else:
            _write(output.text)
        if completion is not None:
            _write("\n")

    return show


def by_choice(*, as_token_ids: bool) -> Show:
    """Write each choice to standard output when it has ended, below a heading."""

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


_NOTHING = "-"


def print_report(report: Report, *, is_json: bool) -> None:
    """Print log-probabilities, or everything as JSON."""
    if is_json:
        print(as_json(report.completions))
    else:
        print_logprobs(report.completions)


def as_json(completions: Sequence[Completion]) -> str:
    """One JSON object: request_id, prompt_logprobs and choices."""
    choices = [dataclasses.asdict(completion) for completion in completions]
    prompt_logprobs = [choice.pop("prompt_logprobs") for choice in choices]
    request_ids = [choice.pop("request_id") for choice in choices]
    message = {"request_id": request_ids[0], "prompt_logprobs": prompt_logprobs[0], "choices": choices}
    return json.dumps(message, ensure_ascii=False, indent=2)


def print_logprobs(completions: Sequence[Completion]) -> None:
    """Print a table of the prompt's log-probabilities and one of each choice's, if present."""
    console = Console(highlight=False)
    for completion in completions:
        if completion.prompt_logprobs is not None:
            console.print(_table("Prompt", completion.prompt_logprobs))
        if completion.logprobs is not None:
            title = f"Choice {completion.choice}" if len(completions) > 1 else "Output"
            console.print(_table(title, completion.logprobs))


def _table(title: str, entries: Sequence[TokenLogprobs]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for column in ("Token", "Id", "Logprob", "Probability", "Rank"):
        table.add_column(column, justify="right")
    table.add_column("Likeliest (id: logprob)", overflow="fold")
    for number, entry in enumerate(entries):
        top = ", ".join(f"{token.token_id}: {token.logprob:.3f}" for token in entry.top)
        table.add_row(str(number), str(entry.token_id), *_likelihood(entry), top or _NOTHING)
    return table


def _likelihood(entry: TokenLogprobs) -> tuple[str, str, str]:
    if entry.logprob is None:
        return _NOTHING, _NOTHING, _NOTHING
    return f"{entry.logprob:.4f}", f"{math.exp(entry.logprob):.4f}", str(entry.rank)
