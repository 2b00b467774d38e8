"""`stageline models`: the families and weight formats that are served."""

import dataclasses
import json
from collections.abc import Iterable
from typing import Annotated

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from checkpoint.catalog import (
    FAMILY_CHECK,
    FORMAT_CHECK,
    GGUF_ARCHITECTURES,
    GGUF_TYPES,
    OTHER_FAMILIES,
    WEIGHT_FORMATS,
    FamilyEntry,
    FormatEntry,
    families,
)
from stageline.cli.options import Json
from stageline.cli.output import line_console


def models(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="List only families with this part of a name.")
    ] = "",
    as_json: Json = False,
) -> int:
    """List the model families and weight formats that are served, and how each is verified."""
    if as_json and name:
        raise typer.BadParameter("--json lists all families", param_hint="NAME")
    if as_json:
        print(catalog_json())
        return 0
    found = [family for family in families() if _has_name(family, name.lower())]
    if not found:
        problem = f"no native family has {name!r} in its name: try `stageline plan --check` for a checkpoint"
        raise typer.BadParameter(problem, param_hint="NAME")
    line_console(highlight=False).print(catalog_view(found, WEIGHT_FORMATS))
    return 0


def _has_name(family: FamilyEntry, part: str) -> bool:
    names = (family.title, family.model_type, family.class_name, *family.wrappers)
    return any(part in name.lower() for name in names)


def catalog_json() -> str:
    """Families and formats as JSON; docs/models.md describes the keys."""
    listed = [dataclasses.asdict(family) | {"verified": FAMILY_CHECK} for family in families()]
    formats = [dataclasses.asdict(one) | {"verified": FORMAT_CHECK} for one in WEIGHT_FORMATS]
    gguf = {"architectures": [dataclasses.asdict(one) for one in GGUF_ARCHITECTURES], "types": GGUF_TYPES}
    facts = {"families": listed, "other_families": OTHER_FAMILIES, "weight_formats": formats, "gguf": gguf}
    return json.dumps(facts, indent=2)


def catalog_view(listed: Iterable[FamilyEntry], formats: Iterable[FormatEntry]) -> RenderableType:
    """Two tables, and below each how its rows are verified."""
    table = _table("Family", "model_type", "Differs from Llama in", "Layers with a window")
    for family in listed:
        names = ", ".join((family.model_type, *family.wrappers))
        table.add_row(family.title, names, "; ".join(family.differences) or "-", family.windows)
    weights = _table("quant_method", "Weight formats")
    for one in formats:
        weights.add_row(one.method, one.variants.replace("`", ""))
    return Group(
        table,
        Text(f"\nEvery family is verified with {FAMILY_CHECK}.\n\n{OTHER_FAMILIES}\n"),
        weights,
        Text(f"\nEvery format is verified: {FORMAT_CHECK}.\n"),
        Text(f"GGUF files: {', '.join(one.architecture for one in GGUF_ARCHITECTURES)}"),
        Text(f"with tensors of {', '.join(GGUF_TYPES)}"),
    )


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
