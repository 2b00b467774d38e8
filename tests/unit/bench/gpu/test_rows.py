from __future__ import annotations

import json
from typing import Any

import pytest

from bench.gpu.rows import Row, Verdict, decode, encode, with_missing
from bench.gpu.targets import TARGETS, decode_name, target_of
from bench.harness.figure import Better


def row(**values: Any) -> Row:
    return Row(**{"phase": "decode", "name": "step", "unit": "ms", **values})


def test_a_time_has_the_share_of_its_least_time() -> None:
    found = row(value=4.0, bound=3.0, target=0.7, better=Better.LOWER)
    assert (found.ratio, found.verdict) == (0.75, Verdict.REACHED)
    assert row(value=5.0, bound=3.0, target=0.7, better=Better.LOWER).verdict is Verdict.MISSED


def test_a_rate_has_the_share_of_its_highest_rate() -> None:
    found = row(value=3.0, bound=4.0, target=0.8)
    assert (found.ratio, found.verdict) == (0.75, Verdict.MISSED)


@pytest.mark.parametrize(
    ("value", "better", "verdict"),
    [
        (40.0, Better.LOWER, Verdict.REACHED),
        (60.0, Better.LOWER, Verdict.MISSED),
        (60.0, Better.HIGHER, Verdict.REACHED),
        (40.0, Better.HIGHER, Verdict.MISSED),
    ],
)
def test_without_a_bound_the_target_limits_the_value(value: float, better: Better, verdict: Verdict) -> None:
    found = row(value=value, target=50.0, better=better)
    assert found.ratio is None
    assert found.verdict is verdict


def test_what_was_not_measured_never_counts_as_reached() -> None:
    found = row(target=0.0, reason="needs a CUDA device", better=Better.LOWER)
    assert found.verdict is Verdict.NOT_MEASURED
    assert found.as_json(device="cpu", versions={})["verdict"] == "not measured"


@pytest.mark.parametrize("values", [{}, {"value": 1.0, "reason": "why"}])
def test_a_row_has_either_a_value_or_a_reason(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a value or a reason"):
        row(**values)


def test_rows_travel_between_processes() -> None:
    found = row(value=4.0, bound=3.0, better=Better.LOWER, details={"host_ms": 0.2, "kernels": "plain"})
    assert decode(json.loads(json.dumps(encode(found)))) == found


def test_every_wanted_figure_has_a_row_with_the_reason_of_its_phase() -> None:
    wanted = [row(name="a", target=0.7, reason="no run"), row(name="b", phase="prompts", reason="no run")]
    found = with_missing([row(name="a", value=1.0)], wanted, {"prompts": "not done after 9 s"})
    assert [(each.name, each.value, each.reason) for each in found] == [
        ("a", 1.0, ""),
        ("b", None, "not done after 9 s"),
    ]


def test_targets_are_those_of_the_reference_shapes() -> None:
    assert target_of(decode_name(128, 2048)) == 0.78
    assert target_of(decode_name(4, 32)) is None
    assert len({target.name for target in TARGETS}) == len(TARGETS)
