"""Whole completions for the eye (tables of log-probabilities) and for programs (JSON)."""

import dataclasses
import json
import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from stageline.cli.stream import Report
from stageline.completion import Completion
from stageline.output import TokenLogprobs

_NOTHING = "-"


def print_report(report: Report, *, is_json: bool) -> None:
    """What is written after the text: log-probabilities, or everything as JSON."""
    if is_json:
        print(as_json(report.completions))
    else:
        print_logprobs(report.completions)


def as_json(completions: Sequence[Completion]) -> str:
    """One object: request_id, prompt_logprobs, and the choices with all that is known of them."""
    choices = [dataclasses.asdict(completion) for completion in completions]
    prompt_logprobs = [choice.pop("prompt_logprobs") for choice in choices]
    request_ids = [choice.pop("request_id") for choice in choices]
    message = {"request_id": request_ids[0], "prompt_logprobs": prompt_logprobs[0], "choices": choices}
    return json.dumps(message, ensure_ascii=False, indent=2)


def print_logprobs(completions: Sequence[Completion]) -> None:
    """A table for the prompt and one for each choice, of those that have log-probabilities."""
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
        top = ", ".join(f"{each.token_id}: {each.logprob:.3f}" for each in entry.top)
        table.add_row(str(number), str(entry.token_id), *_likelihood(entry), top or _NOTHING)
    return table


def _likelihood(entry: TokenLogprobs) -> tuple[str, str, str]:
    if entry.logprob is None:
        return _NOTHING, _NOTHING, _NOTHING
    return f"{entry.logprob:.4f}", f"{math.exp(entry.logprob):.4f}", str(entry.rank)
