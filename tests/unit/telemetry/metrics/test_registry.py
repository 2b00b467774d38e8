"""Values, series and snapshots."""

import pytest
from opentelemetry.sdk.metrics.export import NumberDataPoint

from telemetry.metrics import definitions
from telemetry.metrics.definitions import Kind, Label, Metric, Process
from telemetry.metrics.registry import Registry
from tests.metric_points import Buckets, values_of

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


def test_later_changes_do_not_alter_a_snapshot() -> None:
    registry, counter = Registry(start_ns=START_NS), metric(Kind.COUNTER)
    number = registry.number(counter).of()
    number.add()
    number.add(2.5)
    snapshot = registry.snapshot(NOW_NS)
    number.add()
    assert values_of(snapshot, counter) == {(): 3.5}
    assert values_of(registry.snapshot(NOW_NS), counter) == {(): 4.5}


def test_a_point_has_the_start_of_the_registry_and_the_time_of_the_snapshot() -> None:
    registry = Registry(start_ns=START_NS)
    registry.number(metric(Kind.COUNTER)).of().add()
    point = registry.snapshot(NOW_NS).metrics[-1].data.data_points[0]
    assert isinstance(point, NumberDataPoint)
    assert (point.start_time_unix_nano, point.time_unix_nano, point.value) == (START_NS, NOW_NS, 1)


def test_a_value_on_a_bound_belongs_below_it() -> None:
    registry, histogram = Registry(start_ns=START_NS), metric(Kind.HISTOGRAM, bounds=(1.0, 2.0))
    distribution = registry.distribution(histogram).of()
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        distribution.observe(value)
    before = registry.snapshot(NOW_NS)
    assert values_of(before, histogram) == {(): Buckets((2, 2, 1), 7.5)}
    distribution.observe(3.0, 4)
    assert values_of(before, histogram) == {(): Buckets((2, 2, 1), 7.5)}
    assert values_of(registry.snapshot(NOW_NS), histogram) == {(): Buckets((2, 2, 5), 19.5)}


def test_series_are_identified_by_their_labels() -> None:
    registry, counter = Registry(start_ns=START_NS), metric(Kind.COUNTER, STATE, WHICH)
    family = registry.number(counter)
    family.of("a", "x").add(1)
    family.of("b", "x").add(2)
    family.of("a", "x").add(4)
    assert values_of(registry.snapshot(NOW_NS), counter) == {("a", "x"): 5, ("b", "x"): 2}


def test_excess_series_are_merged_and_counted() -> None:
    registry, counter = Registry(start_ns=START_NS), metric(Kind.COUNTER, WHICH)
    family = registry.number(counter)
    for which in ("0", "1", "2", "3", "4", "3", "0"):
        family.of(which).add()
    snapshot = registry.snapshot(NOW_NS)
    assert values_of(snapshot, counter) == {("0",): 2, ("1",): 1, ("2",): 1, ("other",): 3}
    assert values_of(snapshot, definitions.SERIES_OVERFLOWS) == {(): 3}


def test_labels_that_are_not_defined_are_rejected() -> None:
    family = Registry(start_ns=START_NS).number(metric(Kind.COUNTER, STATE))
    with pytest.raises(ValueError, match=r"'c' is no state of stageline\.test"):
        family.of("c")
    with pytest.raises(ValueError, match="1 labels"):
        family.of("a", "b")


def test_readers_set_values_before_each_snapshot() -> None:
    registry, gauge = Registry(start_ns=START_NS), metric(Kind.GAUGE, WHICH)
    family = registry.number(gauge)
    values = iter(["x", "y"])

    def read() -> None:
        family.clear()
        family.of(next(values)).set(7)

    registry.read_with(read)
    assert values_of(registry.snapshot(NOW_NS), gauge) == {("x",): 7}
    assert values_of(registry.snapshot(NOW_NS), gauge) == {("y",): 7}


def test_a_metric_without_series_is_left_out() -> None:
    registry = Registry(start_ns=START_NS)
    registry.number(metric(Kind.COUNTER))
    assert [data.name for data in registry.snapshot(NOW_NS).metrics] == [definitions.SERIES_OVERFLOWS.name]
