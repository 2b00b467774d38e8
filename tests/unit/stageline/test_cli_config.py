"""Each setting of the processes comes from its flag, its variable or its key in a file."""

import os
import tomllib
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from coordinator.config import CoordinatorConfig
from gateway.config import GatewayConfig
from stage_worker.config import WorkerConfig
from stageline.cli import main
from stageline.cli.config_flags import flags_of, toml_of
from tests.error_lines import parse_error_line
from wire.flags import Setting, key_of, settings_of, variable_of, variables_of

TOKEN = "0123456789abcdef"
LINES = {
    CoordinatorConfig: ("coordinator", "--stages", "3"),
    WorkerConfig: ("worker",),
    GatewayConfig: ("gateway",),
}
SETTINGS = [(config, setting) for config in LINES for setting in settings_of(config)]
SOURCES = ("flag", "environment", "file")
SAMPLES = {
    "N": 48,
    "COUNT": 48,
    "X": 1.5,
    "RATIO": 0.25,
    "SECONDS": 1.0,
    "SIZE": "3MiB",
    "HOST:PORT": "127.0.0.9:4321",
    "ADDR:PORT": "127.0.0.9:4321",
    "ADDR:PORT|off": "127.0.0.9:4321",
    "N,N,...": "1,2,1",
    "HOST:PORT,...": "127.0.0.9:4321,head:7485",
    "ORIGIN,ORIGIN,...": "https://chat.example.com,http://127.0.0.1:3000",
    "bf16|f16|f32": "f32",
    "bf16|fp8|int8": "int8",
    "fp8|int8": "fp8",
    "int8|int4": "int4",
    "SHAPE": "layers=4",
    "KEY": "x-user",
    "NAME": "gpu-a",
    "RATE": "3350:800",
    "FORMAT": "none",
    "NAME,NAME,...": "mine,org/mine",
    "URL": "http://head:7481/",
    "DIR|FILE|URL": "hf://org/name@v1",
    "auto|native|transformers": "native",
    "DEVICE": "cuda:1",
    "LIST": str(min(os.sched_getaffinity(0))),
    "TIMES": "step=0.02s,token=0.00005s,oom_at=7",
}
"""By metavar, as a file has them. A value that is not the default of any flag."""

Run = Callable[..., Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """The config that a command line starts a process with."""
    for config in LINES:
        for variable in variables_of(config):
            monkeypatch.delenv(variable, raising=False)
    seen: list[object] = []

    class Server:
        @staticmethod
        def run(config: object) -> int:
            seen.append(config)
            return 3

    for module in ("coordinator.server", "gateway.server", "stage_worker.server"):
        monkeypatch.setitem(__import__("sys").modules, module, Server)
    monkeypatch.setattr("os.sched_setaffinity", lambda *_: None)
    monkeypatch.setattr("os.cpu_count", lambda: 64)

    def start(*line: str) -> object:
        assert main(line) == 3
        return seen.pop()

    return start


def _sample(setting: Setting, directory: Path) -> Any:
    if setting.type is bool:
        return not setting.default
    if issubclass(setting.type, Enum):
        return next(member.value for member in setting.type if member is not setting.default)
    path = directory / "x"
    match setting.flag.metavar:
        case "DIR" | "DIR|FILE":
            path.mkdir(exist_ok=True)
            return str(path)
        case "PATH" | "FILE" | "FILE,FILE,...":
            path.write_text(TOKEN)
            path.chmod(0o600)
            return str(path)
        case metavar:
            return SAMPLES[str(metavar)]


def _given(
    setting: Setting, value: Any, source: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, ...]:
    """Arguments that set a setting from this source."""
    name, text = setting.flag.name, str(value).lower() if isinstance(value, bool) else str(value)
    if source == "environment":
        monkeypatch.setenv(variable_of(name), text)
        return ()
    if source == "file":
        shown = text if isinstance(value, bool | int | float) else f'"{text}"'
        return ("--config", _file(directory, f"{key_of(name)} = {shown}"))
    if isinstance(value, bool):
        return (name if value else f"--no-{key_of(name)}",)
    return (name, text)


def _file(directory: Path, text: str) -> str:
    path = directory / "stageline.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


each_setting = pytest.mark.parametrize(
    ("config", "setting"),
    SETTINGS,
    ids=[f"{LINES[config][0]}{setting.flag.name}" for config, setting in SETTINGS],
)


def _line_without(config: type, setting: Setting) -> tuple[str, ...]:
    """A command line that does not give the setting yet."""
    return ("coordinator",) if setting.flag.name == "--stages" else LINES[config]


@pytest.mark.matrix(109)
@pytest.mark.parametrize("source", SOURCES)
@each_setting
def test_every_setting_reaches_its_field_from_every_source(
    config: type,
    setting: Setting,
    source: str,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    value = _sample(setting, tmp_path)
    line = _line_without(config, setting)
    made = run(*line, *_given(setting, value, source, tmp_path, monkeypatch))
    assert setting.flag.format(setting.value_in(made)) == value
    assert setting.value_in(made) != setting.default


@pytest.mark.matrix(36)
@each_setting
def test_a_printed_config_parses_to_the_same_config(
    config: type,
    setting: Setting,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    value = _sample(setting, tmp_path)
    line = (*_line_without(config, setting), *_given(setting, value, "flag", tmp_path, monkeypatch))
    made = run(*line)
    assert main([*line, "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert tomllib.loads(printed)[key_of(setting.flag.name)] == value
    assert TOKEN not in printed
    assert run(line[0], "--config", _file(tmp_path, printed)) == made
    assert run(line[0], *flags_of(made)) == made


def test_paths_are_printed_with_escapes(run: Run, tmp_path: Path) -> None:
    made = run("coordinator", "--stages", "1", "--journal", str(tmp_path / 'a"b\\c\n\x7f\u2028é'))
    assert run("coordinator", "--config", _file(tmp_path, toml_of(made))) == made


def test_flags_override_variables_and_variables_override_the_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _file(tmp_path, "stages = 2\nlease = 4\nprefix-cache = false\nqueue-size = 4\ndtype = 'f32'\n")
    monkeypatch.setenv("STAGELINE_LEASE", "5")
    monkeypatch.setenv("STAGELINE_PREFIX_CACHE", "true")
    monkeypatch.setenv("STAGELINE_QUEUE_SIZE", "5")
    made = run("coordinator", "--config", file, "--queue-size", "6")
    assert (made.dtype, made.lease_s, made.prefix_cache, made.queue_size) == ("f32", 5.0, True, 6)
    assert made.max_step_tokens == CoordinatorConfig(num_stages=2).max_step_tokens


@pytest.mark.parametrize(
    ("variables", "text", "flags", "expected"),
    [
        ({}, "", ["--no-http"], None),
        ({}, "no-http = true", [], None),
        ({}, "no-http = false", [], "127.0.0.1:7481"),
        ({"STAGELINE_NO_HTTP": "1"}, "http = '127.0.0.1:1'", [], None),
        ({"STAGELINE_HTTP": "127.0.0.1:2"}, "no-http = true", [], "127.0.0.1:2"),
        ({"STAGELINE_HTTP": "127.0.0.1:2"}, "", ["--no-http"], None),
        ({"STAGELINE_NO_HTTP": "1"}, "", ["--http", "127.0.0.1:3"], "127.0.0.1:3"),
    ],
)
def test_the_source_of_higher_precedence_sets_the_dashboard(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    text: str,
    flags: list[str],
    expected: str | None,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    made = run("coordinator", "--stages", "1", "--config", _file(tmp_path, text), *flags)
    assert made.http == expected
    for name in variables:
        monkeypatch.delenv(name)
    assert run("coordinator", "--config", _file(tmp_path, toml_of(made))).http == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-step-token = 1", "unknown key 'max-step-token', the nearest known one is 'max-step-tokens'"),
        ("max_step_tokens = 1", "unknown key 'max_step_tokens', the nearest known one is 'max-step-tokens'"),
        ("print-config = true", "unknown key 'print-config' (see"),
        ("[coordinator]\nstages = 1", "section 'coordinator': sections are not supported, write keys at the"),
        ("[http]\nlisten = 1", "section 'http': sections are not supported, write keys at the top level"),
        ("queue-size = '5'", 'queue-size is "5", but must be a whole number'),
        ("queue-size = 5.0", "queue-size is 5.0, but must be a whole number"),
        ("queue-size = true", "queue-size is true, but must be a whole number"),
        ("lease = '5s'", 'lease is "5s", but must be a number'),
        ("prefix-cache = 'no'", 'prefix-cache is "no", but must be true or false'),
        ("trace-bytes = 4096", "trace-bytes is 4096, but must be a string"),
        ("layers = [1, 2]", "layers is [1, 2], but must be a string"),
        ("queue-size = 0", "'0' is less than 1, from "),
        ("trace-bytes = '5'", "'5' has no unit: write for example 5GiB or 5MiB, from "),
        ("log-level = 'loud'", "'loud' is not one of 'debug', 'info', 'warning', 'error', from "),
        ("stages", "is not TOML: "),
        ("http = '127.0.0.1:1'\nno-http = true", "--http 127.0.0.1:1 and --no-http contradict each other"),
    ],
)
def test_a_wrong_file_is_a_usage_error_with_key_and_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    file = _file(tmp_path, text)
    assert main(["coordinator", "--stages", "2", "--config", file]) == 2
    reason, line = parse_error_line(capsys.readouterr().err)
    assert reason == "USAGE"
    assert message in line
    assert file in line or "contradict" in line


def test_a_file_that_cannot_be_read_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["worker", "--config", str(tmp_path / "none.toml")]) == 2
    assert "none.toml: No such file or directory" in parse_error_line(capsys.readouterr().err)[1]
    (tmp_path / "latin.toml").write_bytes("name = 'é'".encode("latin-1"))
    assert main(["worker", "--config", str(tmp_path / "latin.toml")]) == 2
    assert "latin.toml is not UTF-8 text (see" in parse_error_line(capsys.readouterr().err)[1]


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("STAGELINE_QUEUE_SIZE", "many", "'--queue-size': 'many' is not an integer"),
        ("STAGELINE_PREFIX_CACHE", "maybe", "'--prefix-cache': 'maybe' is not a boolean (true or false)"),
    ],
)
def test_a_wrong_variable_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    message: str,
) -> None:
    monkeypatch.setenv(variable, value)
    assert main(["coordinator", "--stages", "2"]) == 2
    assert f"{message}, from {variable}" in parse_error_line(capsys.readouterr().err)[1]


def test_the_printed_configuration_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coordinator", "--stages", "2", "--layers", "1,2,3", "--print-config"]) == 2
    assert capsys.readouterr().out == ""
