"""Prints a run as a table with notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.harness.figure import Better, Figure, Verdict
from bench.harness.recorded import Change, Compared
from bench.harness.run import GroupResult

MUCH_FOREIGN_LOAD = 0.05
MOST_NAMED = 4

_VERDICT_STYLES = {
    Verdict.REACHED: "green",
    Verdict.MISSED: "yellow",
    Verdict.NO_TARGET: "",
    Verdict.IMPOSSIBLE: "bold red",
}
_CHANGE_STYLES = {Change.BETTER: "green", Change.WORSE: "bold red"}


def show(results: Iterable[GroupResult], compared: Iterable[Compared], console: Console) -> None:
    """Print one row per figure, then notes: not measured, worse, doubtful."""
    results, changes = list(results), {change.name: change for change in compared}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("figure", overflow="fold")
    for title in ("measured", "bound", "ratio", "target"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("recorded", no_wrap=True)
    table.add_column("others", justify="right", no_wrap=True)
    for result in results:
        for figure in result.figures:
            table.add_row(*_row(figure, changes.get(figure.name)), f"{result.foreign_share:.0%}")
        if result.figures:
            table.add_section()
    console.print(table)
    for line in remarks(results, changes.values()):
        console.print(line, highlight=False)


def _row(figure: Figure, change: Compared | None) -> tuple[str, ...]:
    style = _VERDICT_STYLES[figure.verdict]
    ratio = f"{figure.ratio:.3f}" if figure.spread is None else f"{figure.ratio:.3f} ±{figure.spread / 2:.0%}"
    verdict = figure.verdict.value
    return (
        figure.name,
        f"{_number(figure.measured)} {figure.unit}",
        f"{_number(figure.bound)} {figure.unit}",
        ratio,
        _target(figure),
        f"[{style}]{verdict}[/]" if style else verdict,
        _change(change),
    )


def _target(figure: Figure) -> str:
    if figure.target is None:
        return "-"
    return f"{'>=' if figure.better is Better.HIGHER else '<='} {figure.target:g}"


def _change(compared: Compared | None) -> str:
    if compared is None:
        return "-"
    if compared.relative is None:
        return compared.change.value
    style = _CHANGE_STYLES.get(compared.change)
    text = f"{compared.change.value} {compared.relative:+.0%}"
    return f"[{style}]{text}[/]" if style else text


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def markdown(run: Mapping[str, Any]) -> str:
    """A recorded run as a Markdown table."""
    lines = ["| figure | measured | bound | ratio | target |", "|---|---|---|---|---|"]
    for figure in run.get("figures", ()):
        unit, sign = figure["unit"], ">=" if figure["better"] == Better.HIGHER else "<="
        target = "-" if figure["target"] is None else f"{sign} {figure['target']:g}"
        ratio = f"{figure['ratio']:.2f}"
        if figure["verdict"] == Verdict.MISSED:
            ratio = f"**{ratio}**"
        numbers = f"{_number(figure['measured'])} {unit} | {_number(figure['bound'])} {unit}"
        lines.append(f"| {figure['name']} | {numbers} | {ratio} | {target} |")
    return "\n".join(lines)


def remarks(results: Iterable[GroupResult], compared: Iterable[Compared]) -> list[str]:
    """Warnings, one line each."""
    results = list(results)
    lines = [
        f"[bold red]not measured[/] {result.name}: {escape(result.problem)}"
        for result in results
        if result.problem
    ]
    lines += [
        f"[bold red]impossible[/] {figure.name}: ratio {figure.ratio:.3f}, the limit is {figure.limit:g}; "
        "the measurement is wrong"
        for result in results
        for figure in result.figures
        if figure.verdict is Verdict.IMPOSSIBLE
    ]
    lines += [
        f"[bold red]worse[/] {change.name}: {change.relative:+.0%}, noise is up to {change.margin:.0%}"
        for change in compared
        if change.change is Change.WORSE and change.relative is not None
    ]
    lines += [f"[bold red]gone[/] {change.name}" for change in compared if change.change is Change.GONE]
    lines += [
        f"[yellow]doubtful[/] {result.name}: {_others(result)}"
        for result in results
        if result.foreign_share > MUCH_FOREIGN_LOAD
    ]
    return lines


def _others(result: GroupResult) -> str:
    """Load of other processes, with the busiest ones that still run."""
    text = f"other processes used {result.foreign_share:.0%} of the machine"
    if not result.neighbours:
        return text
    named = [f"{escape(busy.name)} {busy.share:.0%}" for busy in result.neighbours[:MOST_NAMED]]
    ended = result.foreign_share - sum(busy.share for busy in result.neighbours)
    if ended > MUCH_FOREIGN_LOAD:
        named.append(f"ended ones {ended:.0%}")
    return f"{text}; busy: {', '.join(named)}"
