"""Command lines: the processes' own parsers accept them, and every key of a cluster file is in one."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.config import CoordinatorConfig
from deploy.commands import CONFIGS, commands, read_cluster_spec
from deploy.engines import RENDERERS
from deploy.spec.cluster_spec import (
    COORDINATOR_KEYS,
    GATEWAY_KEYS,
    NO_RESOURCES,
    WORKER_KEYS,
    ClusterSpec,
    CoordinatorSpec,
    EngineSpec,
    GatewaySpec,
    Resources,
    SecuritySpec,
    TelemetrySpec,
    TimeoutsSpec,
    WorkerSpec,
)
from deploy.spec.document import SpecError, WrongField
from deploy.spec.fields import keys_of
from gateway.config import GatewayConfig
from stage_worker.config import WorkerConfig
from stageline.cli import main
from tests.unit.deploy.cluster_files import EVERY_KEY, write
from wire.flags import key_of, settings_of, variables_of


@pytest.fixture
def every_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file with all keys, whose paths exist."""
    for config in CONFIGS.values():
        for variable in variables_of(config):
            monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for directory in ("model", "ca", "tls/head", "tls/api", "tls/gpu-a"):
        (tmp_path / directory).mkdir(parents=True)
    for file in ("denied", "keys.toml", "token", "tokens.json", "join.token"):
        (tmp_path / file).write_text("a-secret-of-32-characters-or-more")
        (tmp_path / file).chmod(0o600)
    return EVERY_KEY.replace("DIR", str(tmp_path)).replace("MODEL", str(tmp_path / "model"))


def test_the_processes_parse_their_command_lines_to_the_same_values(
    every_key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in commands(read_cluster_spec(write(tmp_path, every_key))):
        assert main([*command.argv, "--print-config"]) == 0
        printed = tomllib.loads(capsys.readouterr().out)
        values = command.values()
        assert len(values) > 5
        for flag, value in values.items():
            setting = next(found for found in settings_of(command.config_type) if found.flag.name == flag)
            assert printed[key_of(flag)] == setting.flag.format(value)
        assert command.config() is not None


def test_flags_of_a_process_replace_those_of_its_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    """Each flag is given once, as a process refuses it otherwise."""
    spec = ClusterSpec(
        stages=1,
        coordinator=CoordinatorSpec(flags=("--stages", "3", "--stages", "4", "--no-self-check")),
        workers=(WorkerSpec(name="w", flags=("--coordinator", "proxy:1", "--name", "other")),),
    )
    head, *_, worker = commands(spec)
    assert main([*head.argv, "--print-config"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["stages"] == 4
    assert "--no-self-check" in head.argv
    assert main([*worker.argv, "--print-config"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert (printed["coordinator"], printed["name"]) == ("proxy:1", "other")


_SECTIONS: dict[tuple[str | int, ...], type] = {
    (): ClusterSpec,
    ("coordinator",): CoordinatorSpec,
    ("gateways", 0): GatewaySpec,
    ("workers", 0): WorkerSpec,
    ("security",): SecuritySpec,
    ("timeouts",): TimeoutsSpec,
    ("telemetry",): TelemetrySpec,
    ("engine",): EngineSpec,
}
_RESOURCES = [
    (*path, "resources") for path in _SECTIONS if path and path[0] in ("coordinator", "gateways", "workers")
]


def _at(document: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        document = document[part]
    return document


def _leaves() -> list[tuple[str | int, ...]]:
    """Paths of all keys that have a value of their own."""
    document = yaml.safe_load(EVERY_KEY)
    sections = [*_SECTIONS, *_RESOURCES]
    return [
        (*path, name)
        for path in sections
        for name in _at(document, path)
        if not any(section[: len(path) + 1] == (*path, name) for section in sections)
    ]


def _seen(spec: ClusterSpec) -> list[Any]:
    """What a key can change: the processes and the rendered files."""
    coordinator = replace(spec.coordinator, host=None, resources=NO_RESOURCES)
    gateways = tuple(replace(gateway, resources=NO_RESOURCES) for gateway in spec.gateways)
    anywhere = replace(spec, coordinator=coordinator, gateways=gateways)
    return [
        commands(spec),
        *(
            render(anywhere if engine == "slurm" else spec)
            for engine, render in RENDERERS.items()
            if engine != "kubernetes"  # chooses hosts and addresses itself, and refuses their keys
        ),
    ]


def test_the_file_with_every_key_has_every_key() -> None:
    document = yaml.safe_load(EVERY_KEY)
    for path, section in _SECTIONS.items():
        assert set(_at(document, path)) == set(keys_of(section)), path
    assert {name for path in _RESOURCES for name in _at(document, path)} == set(keys_of(Resources))


@pytest.mark.matrix(17)
@pytest.mark.parametrize("path", _leaves(), ids=lambda path: ".".join(map(str, path)))
def test_every_key_changes_what_is_run(path: tuple[str | int, ...], every_key: str, tmp_path: Path) -> None:
    document = yaml.safe_load(every_key)
    whole = _seen(read_cluster_spec(write(tmp_path, every_key)))
    del _at(document, path[:-1])[path[-1]]
    try:
        without = _seen(read_cluster_spec(write(tmp_path, yaml.safe_dump(document))))
    except (SpecError, WrongField):
        return  # another key needs it, or the file does
    assert without != whole


def test_each_flag_of_the_processes_has_one_key() -> None:
    """Flags that the file sets by keys of its own are real, and `flags` has all others."""
    for config, taken in (
        (CoordinatorConfig, COORDINATOR_KEYS),
        (GatewayConfig, GATEWAY_KEYS),
        (WorkerConfig, WORKER_KEYS),
    ):
        assert set(taken) <= {setting.flag.name for setting in settings_of(config)}
