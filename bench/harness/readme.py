"""Inserts the recorded run into bench/README.md between two marks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import fill
from typing import Any

from bench.harness.report import markdown

BEGIN, END = "<!-- recorded run -->", "<!-- end of the recorded run -->"
WIDTH = 110


def with_recorded(document: str, run: Mapping[str, Any]) -> str:
    """Replace the text between the marks. Raises ValueError without marks."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{_machine(run)}\n\n{markdown(run)}\n\n{END}{after}"


def _machine(run: Mapping[str, Any]) -> str:
    machine = run["machine"]
    busiest = max((group["foreign_share"] for group in run["groups"]), default=0.0)
    text = (
        f"On {machine['cores']} cores of {machine['processor']} ({machine['matrix_units']}), "
        f"{machine['memory_gib']} GiB, Python {machine['python']}, torch {machine['torch']}, "
        f"grpcio {machine['grpc']}; other processes used at most {busiest:.0%} of it. Bold: target missed."
    )
    return fill(text, WIDTH)
