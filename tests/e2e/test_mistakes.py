"""Mistakes that new users make, one row each: the message has the cause, and nearly always what to do.

Commands run in this process; a cluster without certificates, one with, and a gateway with keys run beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from certificates.identity import DEFAULT_CLUSTER, Identity, Role
from stageline.cli import main
from stageline.client.client import Client
from tests.checkpoints import edit_config, make_checkpoint
from tests.e2e.commands import ENVIRONMENT, STAGELINE, Shell, until_logged
from tests.issued import Certificates
from tests.ports import unused_address

pytestmark = pytest.mark.full

_MOCK = ("--mock-model", "layers=4,hidden=64")
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Command:
    """A command line that ends with an error line. `{name}` stands for a place of the world.

    `cause` and `action` are regular expressions for the line; `action` is empty where there is nothing to do
    but to understand.
    """

    line: str
    cause: str
    action: str = ""


@dataclass(frozen=True, slots=True)
class Log:
    """A process that waits or serves, and what it logs."""

    line: str
    cause: str
    action: str = ""


@dataclass(frozen=True, slots=True)
class Http:
    """A request to the gateway, and the status and body of its answer."""

    status: int
    body: Any
    cause: str
    action: str = ""
    path: str = "/v1/completions"
    key: str = "{key}"
    content_type: str = "application/json"


_PROMPT: Mapping[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 2}
_GIVE_MODEL = "give the directory of a checkpoint, a GGUF file, or hf://ORG/NAME"
_PLAN = "plan --workers 1GiB --model"
_FIRST = "generate --token-ids 1,2 --coordinator"

MISTAKES: Mapping[str, Command | Log | Http] = {
    # Models
    "path": Command(f"{_PLAN} /models/qwen", "'/models/qwen' does not exist", _GIVE_MODEL),
    "name of a hub": Command(
        f"{_PLAN} Qwen/Qwen3-8B", "'Qwen/Qwen3-8B' does not exist", "is hf://Qwen/Qwen3-8B"
    ),
    "config.json": Command(f"{_PLAN} {{ok}}/config.json", "is a file", "give the directory of"),
    "no .gguf": Command(f"{_PLAN} m.gguf", "file 'm.gguf' does not exist", _GIVE_MODEL),
    "misspelt .gguf": Command(f"{_PLAN} m.guff", "'m.guff' does not exist", _GIVE_MODEL),
    "empty directory": Command(
        f"{_PLAN} {{empty}}", "has neither config.json nor params.json", "give the directory"
    ),
    "weights of torch": Command(
        f"{_PLAN} {{pickled}}", "weights as pytorch_model.bin", "convert the weights"
    ),
    "no weights": Command(
        f"{_PLAN} {{bare}}", "has neither model.safetensors nor", "copy the weights beside"
    ),
    "cut weights": Command(f"{_PLAN} {{cut}}", "bytes, its header accounts for", "copy it again"),
    "no tokenizer": Log(
        "coordinator --stages 1 --model {ok}", "no text and no chat", "copy the model's tokenizer.json"
    ),
    "text without tokenizer": Command(
        "generate hello --coordinator {plain}", "has no tokenizer", "give token ids"
    ),
    "chat without tokenizer": Command(
        "chat --coordinator {plain}", "which a chat needs", "copy the model's tokenizer"
    ),
    "unknown family, checked": Command(
        "plan --check {unknown}", "'qwen9' has no native layers, and transformers"
    ),
    "unknown family": Log(
        "coordinator --stages 1 --model {unknown}",
        "'qwen9' has no native layers",
    ),
    "unknown repository": Command(f"{_PLAN} hf://", "hf://", "hf://ORG/NAME"),
    "hub is away": Log(
        "HF_ENDPOINT=http://{nowhere} plan --workers 1GiB --model hf://org/name",
        "http://[0-9.:]+ does not respond",
        "check the network and HF_ENDPOINT, or give a directory",
    ),
    # Addresses
    "nothing listens": Command(f"{_FIRST} {{nowhere}}", "nothing listens there", "check the port, or start"),
    "unknown host": Command(f"{_FIRST} heda.invalid:7480", "no host is named heda.invalid", "check the name"),
    "no certificate": Command(f"{_FIRST} {{secure}}", "it wants certificates", "give --tls-dir DIR"),
    "needless certificate": Command(
        f"{_FIRST} {{plain}} --tls-dir {{operator}}", "it serves without certificates", "leave out --tls-dir"
    ),
    "other authority": Command(
        f"{_FIRST} {{secure}} --tls-dir {{stranger}}", "not of the authority in --tls-dir", "take the ca.crt"
    ),
    "other name": Command(
        f"{_FIRST} {{elsewhere}} --tls-dir {{operator}}", "its certificate is for", "call it by that name"
    ),
    "port of the gateway": Command(f"{_FIRST} {{gateway}}", "as gateways and dashboards do", "7480"),
    "port of the dashboard": Command(f"{_FIRST} {{dashboard}}", "as gateways and dashboards do", "7480"),
    "port alone": Command(f"{_FIRST} 24100", "is not HOST:PORT", "write for example gpu-a:7480"),
    "URL": Command(f"{_FIRST} http://head:7480", "is not HOST:PORT", "write for example gpu-a:7480"),
    "worker without TLS": Log(
        "worker --mock step=1ms --coordinator {secure} --insecure",
        "it wants certificates",
        "give --tls-dir DIR",
    ),
    "worker first": Log(
        "worker --mock step=1ms --coordinator {nowhere}", "nothing listens there", "start the coord"
    ),
    "gateway first": Log(
        "gateway --coordinator {nowhere} --listen 127.0.0.1:0", "nothing listens there", "start the"
    ),
    # Certificates and tokens
    "open worker": Command(
        "worker --listen 0.0.0.0:0", "can be reached from other hosts", "give --tls-dir DIR"
    ),
    "open coordinator": Command(
        "coordinator --stages 1 --listen 0.0.0.0:0", "can be reached from other hosts", "give --tls-dir DIR"
    ),
    "no directory": Command(
        f"{_FIRST} {{secure}} --tls-dir nope", "'nope' does not exist", "it must hold ca.crt"
    ),
    "empty TLS directory": Command(
        f"{_FIRST} {{secure}} --tls-dir {{empty}}", "ca.crt: no such file", "`stageline certs`"
    ),
    "operator as worker": Log(
        "worker --mock step=1ms --coordinator {secure} --tls-dir {operator}",
        "is of operator",
        "must be of a worker",
    ),
    "coordinator as client": Command(
        "status --coordinator {secure} --tls-dir {coordinator}",
        "may not call GetStatus",
        "of role gateway or operator",
    ),
    "worker as client": Command(
        "status --coordinator {secure} --tls-dir {worker}",
        "may not call GetStatus",
        "of role gateway or operator",
    ),
    "open secret": Log(
        "worker --mock step=1ms --coordinator {secure} --join-token-file {open_token}",
        "has mode 0644",
        "chmod 600",
    ),
    "not a token": Log(
        "worker --mock step=1ms --coordinator {secure} --join-token-file {no_token}",
        "it is not a join token",
        "`stageline token create` prints it",
    ),
    "token first": Log(
        "worker --mock step=1ms --coordinator {nowhere} --join-token-file {token}",
        "cannot enrol at .*: connection refused",
        "--enroll-listen",
    ),
    "no keys": Command(
        "keys list --keys-file {empty}/keys.toml", "no such file", "`stageline keys create` makes it"
    ),
    "drain without secret": Command(
        "drain w0 --coordinator 127.0.0.1:9", "operator token", "--token-file FILE"
    ),
    # Workers
    "name in use": Log(
        "worker --mock step=1ms --name w0 --coordinator {plain}",
        "the name 'w0' is in use by the worker at",
        "--name",
    ),
    "memory without unit": Command("worker --memory 24", "has no unit", "write for example 24GiB"),
    "much memory": Log("worker --memory 900TiB --device cpu", "device cpu has", "lower --memory or omit it"),
    "no GPU of this number": Log(
        "worker --device cuda:7", "torch sees 0 CUDA devices", "or use --device cpu"
    ),
    "no GPU": Log("worker --device auto", "torch sees no GPU", "or use --device cpu"),
    "unknown device": Command("worker --device gpu", "device 'gpu' is not one of", "cpu, auto, cuda"),
    "port in use": Log("coordinator --stages 1 --listen {plain}", "in use", "give another --listen"),
    "port of dashboard in use": Log(
        "coordinator --stages 1 --listen 127.0.0.1:0 --http {dashboard}", "in use", "--http"
    ),
    # Plans
    "no workers": Command("plan --model {ok}", "'?--workers'?: is required", "such as 24GiB,24GiB"),
    "little memory": Command("plan --workers 1MiB --model {ok}", "MiB too little", "in total on 1 stages"),
    "little memory for all": Command(
        "up --workers 2 --model {ok} --memory 1MiB", "3.9 MiB too little", "in total on 2 stages"
    ),
    "many stages": Command(
        "plan --workers 1GiB,1GiB,1GiB --model {two_layers}", "3 stages for a model of 2 layers"
    ),
    "layers for other stages": Command(
        "plan --workers 1GiB --layers 1,1 --model {two_layers}",
        "are for 2 stages, but there are 1",
        "one number for each",
    ),
    "layers of another model": Command(
        "plan --workers 1GiB --layers 9 --model {two_layers}", "sum to 9, the model has 2"
    ),
    "weight format": Command(f"{_PLAN} {{ok}} --quantize int3", "'int3' is not one of", "int8, int4"),
    "workers twice": Command(
        "plan --workers 1GiB --workers 1GiB --model {ok}", "is given 2 times", "takes one value"
    ),
    "no stages": Command(
        "coordinator --model {ok}", "Missing option '--stages'", "see stageline coordinator --help"
    ),
    # Commands and settings
    "command of another project": Command("serve {ok}", "No such command 'serve'", "'stageline up'"),
    "misspelt command": Command("genrate x", "No such command 'genrate'", "Did you mean 'generate'"),
    "unknown flag": Command(
        "bench serve --num-prompts 3", "No such option: --num-prompts", "Possible options: --num-requests"
    ),
    "misspelt variable": Command(
        "STAGELINE_STAGSE=3 coordinator", "STAGELINE_STAGSE", "known one is STAGELINE_STAGES"
    ),
    "misspelt key": Command(
        "coordinator --config {config}", "unknown key 'stagse'", "nearest known one is 'stages'"
    ),
    "drain of nobody": Command(
        "drain w9 --coordinator {plain} --token-file {operator_token}",
        "worker 'w9' not found",
        "connected are w0",
    ),
    "trace of nothing": Command(
        "trace 0190b1c4-0000-7000-8000-000000000000 --coordinator {plain}",
        "no trace of request 0190b1c4",
        "list stored traces with `stageline trace`",
    ),
    "attach to nothing": Command(
        "attach 0190b1c4-0000-7000-8000-000000000000 --coordinator {plain}",
        "the secret of request 0190b1c4-[0-9a-f-]+ is not on this host",
        "pass --secret-file PATH",
    ),
    "nobody computes": Command(
        f"{_FIRST} {{lonely}}", "0 of 1 workers joined", "start workers with `stageline worker"
    ),
    # HTTP
    "unknown model": Http(404, {**_PROMPT, "model": "gpt-4"}, "gpt-4", "mock"),
    "bad JSON": Http(400, '{"prompt": [1', "JSON"),
    "content type": Http(
        415, json.dumps(_PROMPT), "text/plain", "application/json", content_type="text/plain"
    ),
    "no key": Http(401, _PROMPT, "API key", "(?i)authorization: bearer", key=""),
    "wrong key": Http(401, _PROMPT, "key", key="sk-stageline-none-000000000000000000000000"),
    "long prompt": Http(
        400, {"prompt": [1] * 9000, "max_tokens": 2}, "the prompt has 9000", "maximum context length is 4096"
    ),
    "temperature": Http(400, {**_PROMPT, "temperature": -3}, "temperature", r"\[0"),
}


@dataclass(slots=True)
class World:
    """Places that lines name, and the logs' directory."""

    places: Mapping[str, str]
    folder: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    with asyncio.Runner() as runner:
        shell = Shell(folder)
        try:
            places = _files(folder) | runner.run(_processes(shell, folder))
            yield World(places, folder)
        finally:
            runner.run(shell.__aexit__())


def _files(folder: Path) -> dict[str, str]:
    """Checkpoints with faults, and a file of settings with another."""
    ok = make_checkpoint(folder / "ok", "llama", num_layers=4)
    for name in ("pickled", "bare", "cut", "unknown"):
        shutil.copytree(ok, folder / name)
    (folder / "pickled/model.safetensors").rename(folder / "pickled/pytorch_model.bin")
    (folder / "bare/model.safetensors").unlink()
    os.truncate(folder / "cut/model.safetensors", 50_000)
    edit_config(folder / "unknown", model_type="qwen9", architectures=["Qwen9ForCausalLM"])
    make_checkpoint(folder / "two_layers", "llama", num_layers=2)
    (folder / "empty").mkdir()
    (folder / "config").write_text("stagse = 3\n")
    named = ("ok", "pickled", "bare", "cut", "unknown", "two_layers", "empty", "config")
    return {name: str(folder / name) for name in named} | {"nowhere": unused_address()}


async def _processes(shell: Shell, folder: Path) -> dict[str, str]:
    """A cluster without certificates and its gateway, one with certificates, and one without workers."""
    token = folder / "operator_token"
    token.write_text("0123456789abcdef")
    token.chmod(0o600)
    http = ("--http", "127.0.0.1:0", "--token-file", str(token))
    plain, address = await shell.coordinator(*_MOCK, "--stages", "2", *http, name="plain")
    at = ("--coordinator", address)
    for name in ("w0", "w1"):
        await shell.start(name, "worker", *at, "--mock", "step=1ms", "--name", name)
    _, lonely = await shell.coordinator(*_MOCK, "--stages", "1", "--recovery-timeout", "0.5", name="lonely")
    keys = folder / "keys.toml"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["keys", "create", "--tenant", "ann", "--keys-file", str(keys)]) == 0
    gateway = await shell.start("gw", "gateway", *at, "--listen", "127.0.0.1:0", "--keys-file", str(keys))
    await until_logged(plain, "serving: epoch", timeout_s=_START_S)
    listening = await gateway.listening_address(timeout_s=_START_S)
    async with Client(address) as client:
        assert await client.complete([1, 2], max_tokens=1)
    dashboard = plain.dashboard_url()
    assert dashboard is not None
    return {
        "plain": address,
        "lonely": lonely,
        "gateway": listening,
        "dashboard": dashboard.removeprefix("http://").rstrip("/"),
        "key": printed.getvalue().strip(),
        "operator_token": str(token),
        **await _certified(shell, folder),
    }


async def _certified(shell: Shell, folder: Path) -> dict[str, str]:
    certificates = Certificates(folder)
    (folder / "others").mkdir()
    head = certificates.of("head", Role.COORDINATOR)
    tokens = folder / "tokens"
    tokens.mkdir()
    for name, text, mode in (
        ("open_token", "x", 0o644),
        ("no_token", "x", 0o600),
        ("token", f"sl-join.{'ab' * 32}.{'0' * 12}.{'x' * 43}", 0o600),
    ):
        (tokens / name).write_text(text)
        (tokens / name).chmod(mode)
    _, address = await shell.coordinator(*_MOCK, "--stages", "1", "--tls-dir", str(head), name="secure")
    (named := folder / "named").mkdir()
    certificates.write(
        named, Identity(cluster=DEFAULT_CLUSTER, role=Role.COORDINATOR, name="head"), hosts=["head"]
    )
    _, elsewhere = await shell.coordinator(*_MOCK, "--stages", "1", "--tls-dir", str(named), name="elsewhere")
    return {
        "secure": address,
        "elsewhere": elsewhere,
        "coordinator": str(head),
        "worker": str(certificates.of("w", Role.WORKER)),
        "operator": str(certificates.of("me", Role.OPERATOR)),
        "stranger": str(Certificates(folder / "others").of("me", Role.OPERATOR)),
        **{name: str(tokens / name) for name in ("open_token", "no_token", "token")},
    }


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_with_its_cause_and_what_to_do(
    name: str, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake = MISTAKES[name]
    match mistake:
        case Http():
            text = _answer(mistake, world)
        case Log():
            text = _logged(name, mistake, world)
        case Command():
            monkeypatch.setitem(Client.__init__.__kwdefaults__, "connect_timeout_s", 0.5)
            text = _error_line(mistake, world, monkeypatch, capsys)
    print(f"{name}: {text}")
    assert re.search(mistake.cause, text), text
    assert re.search(mistake.action, text), text


def test_most_messages_say_what_to_do() -> None:
    assert len(MISTAKES) >= 73
    assert sum(bool(mistake.action) for mistake in MISTAKES.values()) >= 60


def _error_line(
    mistake: Command, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """The only line on standard error of a command that fails; of a check, which prints a report, that."""
    variables, words = _words(mistake.line, world)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.chdir(world.folder)
    assert main(words) in (1, 2)
    output, errors = capsys.readouterr()
    lines = [line for line in errors.splitlines() if line.startswith("stageline: error[")]
    return lines[0] if lines else output


def _words(line: str, world: World) -> tuple[dict[str, str], list[str]]:
    """The variables and the words of a command line."""
    words = line.format(**world.places).split()
    variables = {}
    while "=" in words[0]:
        variable, _, value = words.pop(0).partition("=")
        variables[variable] = value
    return variables, words


def _logged(name: str, mistake: Log, world: World) -> str:
    """The log of a process until it has the cause and the action."""
    log = world.folder / f"mistake {name}.log"
    variables, words = _words(mistake.line, world)
    if words[0] == "coordinator" and "--listen" not in words:
        words += ["--listen", "127.0.0.1:0"]
    if words[0] == "coordinator" and "--http" not in words:
        words += ["--no-http"]
    command, environment = [*STAGELINE, *words], {**os.environ, **ENVIRONMENT, **variables}
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment)
        try:
            end_s = time.monotonic() + _START_S
            while time.monotonic() < end_s and process.poll() is None:
                lines = [line for line in log.read_text().splitlines() if re.search(mistake.cause, line)]
                if lines:
                    return lines[0]
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
    return log.read_text()


def _answer(mistake: Http, world: World) -> str:
    key = mistake.key.format(**world.places)
    headers = {"content-type": mistake.content_type} | ({"authorization": f"Bearer {key}"} if key else {})
    content = mistake.body if isinstance(mistake.body, str) else json.dumps(mistake.body)
    url = f"http://{world.places['gateway']}{mistake.path}"
    answer = httpx2.post(url, content=content, headers=headers, timeout=30)
    assert answer.status_code == mistake.status, answer.text
    return answer.text
