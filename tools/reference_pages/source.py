"""Reads source files for the pages: names, and fields with the docstrings below them."""

import ast
import inspect
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def name_of(node: ast.stmt) -> str:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return node.name
    return ast.unparse(node.target) if isinstance(node, ast.AnnAssign) else ""


def class_fields(node: ast.ClassDef) -> list[tuple[str, ...]]:
    """Annotated fields and enum members, with the docstrings below them."""
    rows: list[tuple[str, ...]] = []
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        meaning = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            meaning = inspect.cleandoc(str(following.value.value))
        if isinstance(statement, ast.AnnAssign):
            default = f"`{ast.unparse(statement.value)}`" if statement.value is not None else ""
            rows.append((f"`{ast.unparse(statement.target)}`", _type(statement.annotation), default, meaning))
        elif isinstance(statement, ast.Assign):
            value = f"`{ast.unparse(statement.value)}`"
            rows.append((f"`{ast.unparse(statement.targets[0])}`", "", value, meaning))
    return rows


def fields_of(path: str, name: str) -> list[tuple[str, ...]]:
    """The fields of a class that a module defines."""
    module = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    node = next(node for node in module.body if name_of(node) == name)
    assert isinstance(node, ast.ClassDef)
    return class_fields(node)


def _type(annotation: ast.expr) -> str:
    return f"`{ast.unparse(annotation)}`"
