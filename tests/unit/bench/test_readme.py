from __future__ import annotations

import pytest

from bench.command import README
from bench.harness.readme import BEGIN, END, with_recorded
from bench.harness.recorded import as_json
from bench.harness.run import GroupResult
from tests.unit.bench.runs import figure, latency
from tests.unit.bench.test_recorded import MACHINE


def test_the_recorded_run_replaces_the_previous_one() -> None:
    figures = (figure(measured=1234, bound=2000, target=0.8), latency(99, target=1.0))
    results = [GroupResult(name="decode", figures=figures, foreign_share=0.04)]
    run = as_json(results, MACHINE, is_quick=False)
    document = f"# Before\n\n{BEGIN}\nof last week\n{END}\n\nafter\n"
    written = with_recorded(document, run)
    assert written.startswith("# Before\n\n") and written.endswith("\n\nafter\n")
    assert "| speed | 1,234 tok/s | 2,000 tok/s | **0.62** | >= 0.8 |" in written
    assert "| latency | 99.0 tok/s | 100 tok/s | 0.99 | <= 1 |" in written
    assert "other processes used at most 4% of it" in written
    assert "of last week" not in written
    assert with_recorded(written, run) == written


def test_a_document_without_its_marker_is_rejected() -> None:
    with pytest.raises(ValueError, match="recorded run"):
        with_recorded("nothing", as_json([], MACHINE, is_quick=False))


def test_the_readme_has_the_marker() -> None:
    text = README.read_text()
    assert 0 < text.index(BEGIN) < text.index(END)
