"""When a stage is called slow."""

import pytest

from telemetry.slowness import STANDS_OUT, stands_out, times_the_others


@pytest.mark.parametrize(
    ("own_s", "others_s", "ratio"),
    [
        (0.04, (0.02, 0.02), 2.0),
        (0.04, (0.01, 0.02, 0.5), 2.0),
        (0.03, (0.01, 0.02), 2.0),
        (0.04, (), None),
        (0.04, (0.0, 0.0), None),
    ],
)
def test_it_is_measured_by_the_median_of_the_others(
    own_s: float, others_s: tuple[float, ...], ratio: float | None
) -> None:
    found = times_the_others(own_s, others_s)
    assert found == (None if ratio is None else pytest.approx(ratio))


def test_who_has_nobody_to_be_compared_with_is_not_slow() -> None:
    assert [stands_out(each) for each in (None, 1.0, STANDS_OUT - 0.01, STANDS_OUT)] == [
        *(False, False, False, True)
    ]
