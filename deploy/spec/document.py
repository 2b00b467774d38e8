"""YAML documents whose values know their file, line and path."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

import yaml

MAX_BYTES = 2**20
_NULL = "tag:yaml.org,2002:null"
_MERGE = "tag:yaml.org,2002:merge"
_PLAIN = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
PathPart = str | int


class SpecError(ValueError):
    """A wrong cluster file; the message begins with FILE:LINE and the path of the field."""


class WrongField(ValueError):
    """A wrong value at `path`, relative to the object that rejects it."""

    def __init__(self, path: tuple[PathPart, ...], message: str) -> None:
        super().__init__(f"{format_path(path)}: {message}")
        self.path, self.message = path, message


def format_path(path: tuple[PathPart, ...]) -> str:
    """Format a path: workers[1].memory."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            shown = part if _PLAIN.fullmatch(part) else repr(part)
            text += f".{shown}" if text else shown
    return text


@dataclass(frozen=True, slots=True)
class DocumentValue:
    """A value of a document. Every method raises SpecError."""

    file: str
    path: tuple[PathPart, ...]
    node: yaml.Node
    line: int
    """Of its key, if it has one; from 1."""

    def error(self, message: str) -> SpecError:
        """An error at this value."""
        where = f"{format_path(self.path)}: " if self.path else ""
        return SpecError(f"{self.file}:{self.line}: {where}{message}")

    def error_at(self, wrong: WrongField) -> SpecError:
        """An error of the value below this one, at the line of the last part of its path that exists."""
        found: DocumentValue = self
        for part in wrong.path:
            below = found._below(part)
            if below is None:
                break
            found = below
        found = replace(found, path=(*self.path, *wrong.path))
        return found.error(wrong.message)

    def text(self) -> str:
        """The text of a scalar, as it is written."""
        if not isinstance(self.node, yaml.ScalarNode):
            raise self.error(f"is {self._kind()}, must be a single value")
        if self.node.tag == _NULL:
            raise self.error("is empty: give a value or remove the key")
        return str(self.node.value)

    def items(self) -> list[DocumentValue]:
        """The values of a list."""
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.error(f"is {self._kind()}, must be a list")
        return [
            DocumentValue(self.file, (*self.path, index), node, _line(node))
            for index, node in enumerate(self.node.value)
        ]

    def entries(self) -> dict[str, DocumentValue]:
        """The values of a mapping by key, in order; a repeated key is an error."""
        if not isinstance(self.node, yaml.MappingNode):
            raise self.error(f"is {self._kind()}, must be a mapping of keys to values")
        found: dict[str, DocumentValue] = {}
        for key, value in self.node.value:
            place = DocumentValue(self.file, self.path, key, _line(key))
            if key.tag == _MERGE:
                raise place.error("<< is not supported: write the keys out")
            name = place.text()
            if name in found:
                raise place.error(f"key {name!r} is given twice, first in line {found[name].line}")
            found[name] = DocumentValue(self.file, (*self.path, name), value, place.line)
        return found

    def unknown(self, known: Iterator[str]) -> SpecError:
        """The error of a key that is not among the known ones."""
        names, key = sorted(known), str(self.path[-1])
        nearest = get_close_matches(key, names, n=1)
        hint = f"the nearest known one is {nearest[0]!r}" if nearest else f"known are {', '.join(names)}"
        return self.error(f"unknown key {key!r}, {hint}")

    def _below(self, part: PathPart) -> DocumentValue | None:
        if isinstance(part, int):
            return self.items()[part] if isinstance(self.node, yaml.SequenceNode) else None
        return self.entries().get(part) if isinstance(self.node, yaml.MappingNode) else None

    def _kind(self) -> str:
        if isinstance(self.node, yaml.ScalarNode):
            return "empty" if self.node.tag == _NULL else f"{self.node.value!r}"
        return "a list" if isinstance(self.node, yaml.SequenceNode) else "a mapping"


def read_document(file: Path) -> DocumentValue:
    """Read a file with one YAML document. Raises SpecError, or OSError with one line."""
    with file.open("rb") as opened:
        content = opened.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise SpecError(f"{file}: more than {MAX_BYTES} bytes, the limit of a cluster file")
    try:
        # Makes nodes and no objects. Only an alias can repeat a node, so that nothing grows beyond the file.
        node = yaml.compose(content.decode(), Loader=yaml.SafeLoader)
    except UnicodeDecodeError:
        raise SpecError(f"{file}: not UTF-8 text") from None
    except RecursionError:
        raise SpecError(f"{file}: lists and mappings are nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f":{error.problem_mark.line + 1}"
        raise SpecError(f"{file}{line}: not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{file}: not YAML: {' '.join(str(error).split())}") from None
    if node is None:
        raise SpecError(f"{file}: empty: a cluster file has at least `workers`")
    return DocumentValue(str(file), (), node, _line(node))


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
