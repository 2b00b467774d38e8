"""docs/reference/python.md: every exported name with signature, fields and docstring."""

import ast
from collections.abc import Iterator
from typing import Any

from tools.reference_pages.markdown import GENERATED, table
from tools.reference_pages.source import ROOT, class_fields, name_of

_EXCEPTIONS = """
## Exceptions

All derive from `StagelineError`, which has `code` (the gRPC status), `reason`
([errors.md](errors.md)) and `message`; the table has their defaults.

"""
_PYTHON = f"""\
# Python API

Classes, functions and exceptions of the package `stageline`.
{GENERATED}
[python.md](../python.md) has examples.
"""


def python() -> str:
    """Every exported name: signature, fields and docstring."""
    nodes = sorted(_exported(), key=lambda node: (name_of(node) != "Client", name_of(node)))
    exceptions = [node for node in nodes if isinstance(node, ast.ClassDef) and _is_exception(node)]
    sections = (_export_section(node) for node in nodes if node not in exceptions)
    rows = [_exception_row(node) for node in exceptions]
    return (
        _PYTHON
        + "".join(sections)
        + _EXCEPTIONS
        + table(("exception", "code", "reason", "raised when"), rows)
    )


def _exported() -> Iterator[ast.stmt]:
    import stageline

    wanted = set(stageline.__all__)
    for path in sorted((ROOT / "stageline" / "client").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if name_of(node) in wanted:
                wanted.remove(name_of(node))
                yield node
    if wanted:
        raise LookupError(f"no module of stageline/client defines {sorted(wanted)}")


def _is_exception(node: ast.ClassDef) -> bool:
    return {"StagelineError", "Exception"} & {ast.unparse(base) for base in node.bases} != set()


def _exception_row(node: ast.ClassDef) -> tuple[str, ...]:
    values = {name: default for name, _, default, _ in class_fields(node)}
    meaning = (ast.get_docstring(node) or "").replace("\n", " ")
    return f"`{node.name}`", values["`code`"].replace("'", ""), values["`reason`"].replace("'", ""), meaning


def _export_section(node: ast.stmt) -> str:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return f"\n## {node.name}\n\n{_definition(node)}"
    return f"\n## {name_of(node)}\n\n{_code(ast.unparse(node))}"


def _definition(node: ast.ClassDef | ast.FunctionDef) -> str:
    if isinstance(node, ast.FunctionDef):
        return f"{_code(_signature(node))}\n{ast.get_docstring(node)}\n"
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    text = _code(f"class {node.name}" + (f"({bases})" if bases else ""))
    if docstring := ast.get_docstring(node):
        text += f"\n{docstring}\n"
    if rows := class_fields(node):
        text += "\n" + _filled_columns(("name", "type", "default", "meaning"), rows)
    return text + "".join(_method(node.name, method) for method in node.body if _is_public_method(method))


def _filled_columns(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """The table without its empty columns."""
    columns = [index for index in range(len(header)) if any(row[index] for row in rows)]
    return table(
        tuple(header[index] for index in columns), [[row[index] for index in columns] for row in rows]
    )


def _is_public_method(node: ast.stmt) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    is_constructor = node.name == "__init__"
    return is_constructor or not node.name.startswith("_")


def _method(owner: str, node: Any) -> str:
    docstring = ast.get_docstring(node)
    return f"\n### {owner}.{node.name}\n\n{_code(_signature(node))}" + (
        f"\n{docstring}\n" if docstring else ""
    )


def _signature(node: Any) -> str:
    prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    arguments = list(_arguments(node.args))
    text = f"{prefix} {node.name}({', '.join(arguments)}){returns}"
    if len(text) <= 100:
        return text
    lines = "".join(f"    {argument},\n" for argument in arguments)
    return f"{prefix} {node.name}(\n{lines}){returns}"


def _arguments(arguments: ast.arguments) -> Iterator[str]:
    """Arguments without defaults of positional ones, which no exported function has."""
    yield from map(ast.unparse, arguments.args)
    if arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield ast.unparse(argument) + (f" = {ast.unparse(default)}" if default is not None else "")
    if arguments.kwarg is not None:
        yield f"**{ast.unparse(arguments.kwarg)}"


def _code(text: str) -> str:
    return f"```python\n{text}\n```\n"
