"""The guide of docs/deploy/systemd.md, word for word, with units that a systemd of its own runs."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.deploy.pages import commands_of, file_of
from tests.deploy.systemd_machine import SystemdMachine, booted

pytestmark = pytest.mark.deploy

NAMES = ("coordinator", "gateway", "w0", "w1")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SystemdMachine]:
    with booted(tmp_path_factory.mktemp("machine")) as machine:
        machine.output(f"cat > cluster.yaml <<'END'\n{file_of('systemd')}END\n")
        yield machine


def _property(machine: SystemdMachine, name: str, value: str) -> str:
    return machine.output(f"systemctl show --value --property={value} stories-{name}").strip()


def _text(answer: str) -> str:
    text: str = json.loads(answer)["choices"][0]["text"]
    return text


def test_the_guide_serves_a_request_and_a_killed_worker_starts_again(machine: SystemdMachine) -> None:
    typed = commands_of("systemd")
    asks = next(each for each in typed if each.line.startswith("curl"))
    text = None
    for each in typed[:-1]:
        output = machine.output(each.line)
        if each.output:
            assert output.splitlines() == list(each.output)
        if each is asks:
            text = _text(output)
    assert text
    for name in NAMES:
        assert _property(machine, name, "SubState") == "running"
        status = _property(machine, name, "StatusText")
        assert status, f"{name} says nothing"
    assert int(machine.output(f"stat -c %u /proc/{_property(machine, 'w0', 'MainPID')}")) != 0

    machine.output("systemctl kill --signal=KILL stories-w0")
    machine.output("stageline status --wait serving")
    assert _text(machine.output(asks.line)) == text
    machine.output(
        "for i in $(seq 300); do systemctl is-active -q stories-w0 && exit; sleep 0.1; done; false"
    )
    assert _property(machine, "w0", "NRestarts") == "1"

    machine.output(typed[-1].line)
    for name in NAMES:
        assert _property(machine, name, "Result") == "success", machine.journal()
        assert _property(machine, name, "ActiveState") == "inactive"


def test_the_command_installs_shows_and_removes_the_units(machine: SystemdMachine) -> None:
    machine.output("rm -f /etc/systemd/system/stories-*.service && systemctl daemon-reload")
    machine.output("stageline deploy run systemd -f cluster.yaml")
    machine.output("stageline status --wait serving --timeout 120")
    shown = machine.output("stageline deploy status systemd -f cluster.yaml")
    for name in NAMES:
        assert f"stories-{name}.service" in shown
        assert _property(machine, name, "ActiveState") in ("active", "activating")
        assert machine.output(f"systemctl is-enabled stories-{name}").strip() == "enabled"
    machine.output("stageline deploy stop systemd -f cluster.yaml")
    for name in NAMES:
        assert _property(machine, name, "ActiveState") == "inactive"
        assert machine.run(f"systemctl is-enabled stories-{name}").stdout.strip() in ("disabled", "not-found")
