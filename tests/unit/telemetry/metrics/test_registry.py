"""Values, series and snapshots."""

import pytest

from telemetry.metrics import definitions
from telemetry.metrics.definitions import Kind, Label, Metric, Process
from telemetry.metrics.registry import Buckets, Point, Registry, Snapshot

START_NS, NOW_NS = 1_000, 2_000
STATE = Label("state", "test.state", values=("a", "b"))
WHICH = Label("which", "test.which", most=3)


def metric(kind: Kind, *labels: Label, bounds: tuple[float, ...] = ()) -> Metric:
    return Metric(
        name="stageline.test",
        kind=kind,
        unit="s",
        processes=(Process.WORKER,),
        description="A test.",
        labels=labels,
        bounds=bounds,
    )


def points(snapshot: Snapshot, name: str = "stageline.test") -> dict[tuple[str, ...], float | Buckets]:
    (found,) = (each for each in snapshot.metrics if each.metric.name == name)
    return {point.labels: point.value for point in found.points}


def test_a_snapshot_is_not_changed_by_what_comes_later() -> None:
    registry = Registry(start_ns=START_NS)
    number = registry.number(metric(Kind.COUNTER)).of()
    number.add()
    number.add(2.5)
    snapshot = registry.snapshot(NOW_NS)
    number.add()
    assert points(snapshot) == {(): 3.5}
    assert (snapshot.start_ns, snapshot.time_ns) == (START_NS, NOW_NS)
    assert points(registry.snapshot(NOW_NS)) == {(): 4.5}


def test_a_value_on_a_bound_belongs_below_it() -> None:
    registry = Registry(start_ns=START_NS)
    distribution = registry.distribution(metric(Kind.HISTOGRAM, bounds=(1.0, 2.0))).of()
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        distribution.observe(value)
    before = registry.snapshot(NOW_NS)
    assert points(before) == {(): Buckets((2, 2, 1), 7.5)}
    distribution.observe(3.0, 4)
    assert points(before) == {(): Buckets((2, 2, 1), 7.5)}
    assert points(registry.snapshot(NOW_NS)) == {(): Buckets((2, 2, 5), 19.5)}


def test_series_are_told_apart_by_their_labels() -> None:
    registry = Registry(start_ns=START_NS)
    family = registry.number(metric(Kind.COUNTER, STATE, WHICH))
    family.of("a", "x").add(1)
    family.of("b", "x").add(2)
    family.of("a", "x").add(4)
    assert points(registry.snapshot(NOW_NS)) == {("a", "x"): 5, ("b", "x"): 2}


def test_more_series_than_a_label_may_have_become_one_and_are_counted() -> None:
    registry = Registry(start_ns=START_NS)
    family = registry.number(metric(Kind.COUNTER, WHICH))
    for which in ("0", "1", "2", "3", "4", "3", "0"):
        family.of(which).add()
    snapshot = registry.snapshot(NOW_NS)
    assert points(snapshot) == {("0",): 2, ("1",): 1, ("2",): 1, ("other",): 3}
    assert points(snapshot, definitions.SERIES_OVERFLOWS.name) == {(): 3}


def test_labels_that_are_not_defined_are_refused() -> None:
    family = Registry(start_ns=START_NS).number(metric(Kind.COUNTER, STATE))
    with pytest.raises(ValueError, match=r"'c' is no state of stageline\.test"):
        family.of("c")
    with pytest.raises(ValueError, match="1 labels"):
        family.of("a", "b")


def test_what_is_read_off_is_read_before_each_snapshot() -> None:
    registry = Registry(start_ns=START_NS)
    family = registry.number(metric(Kind.GAUGE, WHICH))
    values = iter(["x", "y"])

    def read() -> None:
        family.clear()
        family.of(next(values)).set(7)

    registry.read_with(read)
    assert points(registry.snapshot(NOW_NS)) == {("x",): 7}
    assert points(registry.snapshot(NOW_NS)) == {("y",): 7}


def test_points_carry_their_labels_in_the_order_of_the_definition() -> None:
    registry = Registry(start_ns=START_NS)
    registry.number(metric(Kind.COUNTER, STATE, WHICH)).of("a", "x").add()
    (found,) = (each for each in registry.snapshot(NOW_NS).metrics if each.points[0].labels)
    assert found.points == (Point(("a", "x"), 1),)
