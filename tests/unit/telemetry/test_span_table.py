"""docs/reference/spans.md lists exactly the spans and attributes of the code."""

import re

from telemetry.spans import MEANINGS, SPANS, Attr, SpanName, SpanSpec
from tests.repository import REPOSITORY

DOCUMENT = (REPOSITORY / "docs" / "reference" / "spans.md").read_text()


def section(title: str) -> list[str]:
    """The rows of the table under a heading."""
    text = re.split(r"\n#+ ", DOCUMENT.split(f"\n## {title}\n", 1)[1], maxsplit=1)[0]
    return [line for line in text.splitlines() if line.startswith("| `")]


def span_row(spec: SpanSpec) -> str:
    process = spec.process.removeprefix("stageline-")
    parent = f"`{spec.parent}`" if spec.parent else "-"
    return f"| `{spec.name}` | {process} | {parent} | {spec.meaning} |"


def attribute_row(attribute: Attr) -> str:
    spans = [spec.name.removeprefix("stageline.") for spec in SPANS if attribute in spec.attributes]
    return f"| `{attribute}` | {', '.join(spans)} | {MEANINGS[attribute]} |"


def test_the_table_of_spans_equals_the_code() -> None:
    assert [spec.name for spec in SPANS] == list(SpanName)
    assert section("All spans") == [span_row(spec) for spec in SPANS]


def test_the_table_of_attributes_equals_the_code() -> None:
    assert section("All attributes") == [attribute_row(attribute) for attribute in Attr]


def test_every_attribute_belongs_to_a_span() -> None:
    used = {attribute for spec in SPANS for attribute in spec.attributes}
    assert used == set(Attr) == set(MEANINGS)
