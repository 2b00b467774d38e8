"""Files that an engine reads, and what all renderers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deploy.commands import ProcessCommand, check_ports


@dataclass(frozen=True, slots=True)
class RenderedFile:
    """A text file; `path` is relative to the output directory."""

    path: str
    text: str


def by_host(commands: tuple[ProcessCommand, ...]) -> dict[str | None, list[ProcessCommand]]:
    """The processes of each host, in order; None is the machine of a cluster without hosts.

    Raises WrongField if two of them listen on one port.
    """
    found: dict[str | None, list[ProcessCommand]] = {}
    for command in commands:
        found.setdefault(command.host, []).append(command)
    for together in found.values():
        check_ports(together)
    return found


def path_on(host: str | None, name: str) -> str:
    """The path of a rendered file: in a directory per host, if there are hosts."""
    return name if host is None else f"{host}/{name}"


def flag_lines(words: tuple[str, ...], quote: Callable[[str], str]) -> Iterator[str]:
    """The words of a command line, a flag and its value together."""
    line: list[str] = []
    for word in words:
        if word.startswith("--") and line:
            yield " ".join(line)
            line = []
        line.append(quote(word))
    yield " ".join(line)
