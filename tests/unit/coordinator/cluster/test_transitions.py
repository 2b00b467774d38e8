"""The table of phases is what the code executes: complete, without rows that cannot occur, and documented."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from coordinator.cluster.actions import Action
from coordinator.cluster.state_machine import ClusterState
from coordinator.cluster.transitions import TRANSITIONS, ClusterEvent, ClusterPhase, IllegalPhase
from tests.unit.coordinator.cluster.cluster_driver import ClusterDriver
from tests.unit.coordinator.cluster.random_walk import walk

DOCUMENT = Path(__file__).parents[4] / "docs" / "architecture.md"
BEGIN, END = "<!-- transitions: begin -->\n", "<!-- transitions: end -->\n"


def test_every_row_of_the_table_is_taken_and_no_other() -> None:
    rows = {
        (before, event, after)
        for before, events in TRANSITIONS.items()
        for event, phases in events.items()
        for after in phases
    }
    assert set(walk()) == rows


def test_every_event_is_handled_in_some_phase_by_the_method_of_its_name() -> None:
    assert {event for events in TRANSITIONS.values() for event in events} == set(ClusterEvent)
    assert all(hasattr(getattr(ClusterState, event.value), "__wrapped__") for event in ClusterEvent)


def test_a_phase_that_the_table_does_not_list_is_an_error() -> None:
    def serve_at_once(self: ClusterState, reason: str = "") -> list[Action]:
        self.phase = ClusterPhase.SERVING
        return []

    cluster = ClusterDriver(num_stages=1)
    cluster.join("a")
    with (
        patch.object(ClusterState, "_begin_epoch", serve_at_once),
        pytest.raises(IllegalPhase, match="loaded in phase LOADING led to SERVING"),
    ):
        cluster.loaded("a")


def test_an_event_without_a_row_does_not_reach_its_handler() -> None:
    cluster = ClusterDriver(num_stages=1).serving()
    with patch.object(ClusterState, "_serve_if_ready", side_effect=AssertionError("handled")):
        assert cluster.get_ready() == []
    assert cluster.state.phase is ClusterPhase.SERVING


def test_the_documented_table_equals_the_code() -> None:
    text = DOCUMENT.read_text()
    assert text.split(BEGIN)[1].split(END)[0] == f"\n{documented()}\n"


def documented() -> str:
    """The table in docs/architecture.md."""
    header = "| event | " + " | ".join(phase.name for phase in ClusterPhase) + " |\n"
    rows = [f"| `{event.value}` | {' | '.join(_cells(event))} |\n" for event in ClusterEvent]
    return header + "|---" * (len(ClusterPhase) + 1) + "|\n" + "".join(rows)


def _cells(event: ClusterEvent) -> list[str]:
    return [_cell(phase, event) for phase in ClusterPhase]


def _cell(before: ClusterPhase, event: ClusterEvent) -> str:
    phases = TRANSITIONS[before].get(event, ())
    return ", ".join("=" if after is before else after.name for after in ClusterPhase if after in phases)
