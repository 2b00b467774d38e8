"""A journal's time follows the time since boot; only across boots it follows the wall clock."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from coordinator.journal.clock import ClockAnchor, HostClocks, JournalClock
from coordinator.journal.journal import Journal
from tests.unit.coordinator.journal.journals import IDENTITY

HOUR_S = 3600.0


@dataclass
class Host:
    """A host whose clocks are set by hand."""

    uptime_s: float = 50.0
    wall_s: float = 1000.0
    boot_id: str = "first"

    @property
    def clocks(self) -> HostClocks:
        return HostClocks(
            boot_id=lambda: self.boot_id, uptime_s=lambda: self.uptime_s, wall_s=lambda: self.wall_s
        )

    def pass_time(self, seconds: float) -> None:
        self.uptime_s += seconds
        self.wall_s += seconds

    def reboot(self, *, down_s: float) -> None:
        self.boot_id += "+"
        self.uptime_s = 3.0
        self.wall_s += down_s


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_a_changed_wall_clock_does_not_move_the_time_of_a_process(jump_s: float) -> None:
    host = Host()
    clock = JournalClock(host.clocks, None)
    host.wall_s += jump_s
    host.pass_time(5.0)
    assert clock.now_at() == 1005.0
    assert clock.to_journal(17.0, now_s=7.0) == 1015.0


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_a_restart_under_one_boot_ignores_the_wall_clock(tmp_path: Path, jump_s: float) -> None:
    host = Host()
    first = Journal(tmp_path / "j.db", IDENTITY, host.clocks)
    host.pass_time(10.0)
    first.close()
    host.wall_s += jump_s
    host.pass_time(20.0)
    second = Journal(tmp_path / "j.db", IDENTITY, host.clocks)
    assert second.clock.now_at() == 1030.0
    second.close()


def test_after_a_reboot_the_time_that_the_wall_clock_shows_has_passed(tmp_path: Path) -> None:
    host = Host()
    Journal(tmp_path / "j.db", IDENTITY, host.clocks).close()
    host.pass_time(5.0)
    host.reboot(down_s=100.0)
    journal = Journal(tmp_path / "j.db", IDENTITY, host.clocks)
    assert journal.clock.now_at() == 1105.0
    journal.close()


def test_after_a_reboot_with_an_earlier_wall_clock_the_time_does_not_go_back(tmp_path: Path) -> None:
    host = Host()
    Journal(tmp_path / "j.db", IDENTITY, host.clocks).close()
    host.reboot(down_s=-500.0)
    journal = Journal(tmp_path / "j.db", IDENTITY, host.clocks)
    assert journal.clock.now_at() == 1000.0
    journal.close()


def test_a_change_of_the_wall_clock_before_a_reboot_does_not_count(tmp_path: Path) -> None:
    host = Host()
    journal = Journal(tmp_path / "j.db", IDENTITY, host.clocks)
    host.wall_s += HOUR_S
    host.pass_time(5.0)
    journal.trim()
    journal.close()
    host.reboot(down_s=10.0)
    journal = Journal(tmp_path / "j.db", IDENTITY, host.clocks)
    assert journal.clock.now_at() == 1015.0
    journal.close()


def test_hosts_without_a_boot_id_follow_the_wall_clock() -> None:
    host = Host(boot_id="")
    clock = JournalClock(host.clocks, ClockAnchor(900.0, "", 40.0, 990.0))
    assert clock.now_at() == 910.0
