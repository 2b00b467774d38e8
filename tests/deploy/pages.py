"""Pages of docs/deploy, read for the commands and files that a reader copies."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.fake_processes import ROOT


@dataclass(frozen=True, slots=True)
class Typed:
    """A command behind a prompt `$`, and the lines shown below it."""

    line: str
    output: tuple[str, ...]


def commands_of(page: str) -> list[Typed]:
    """Every command of docs/deploy/PAGE.md, in order."""
    found: list[Typed] = []
    for _, block in (each for each in _blocks(page) if not each[0]):
        for typed in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, output = re.sub(r"\\\n", "", typed).partition("\n")
            found.append(Typed(line, tuple(output.splitlines())))
    return found


def file_of(page: str, language: str = "yaml") -> str:
    """The first block of a page in a language."""
    return next(block for name, block in _blocks(page) if name == language)


def _blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of every fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", _text(page), re.DOTALL | re.MULTILINE)


def _text(page: str) -> str:
    return (ROOT / "docs" / "deploy" / f"{page}.md").read_text()
