"""`generate`, `attach` and `cancel`: flags that set parameters, and the printed output."""

import inspect
import io
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from stageline import Client, Detach, GenerateOptions, GenerateOutput, Priority, new_attach_secret
from stageline.cli import main
from stageline.cli.chat import chat
from stageline.cli.generate import generate
from stageline.cli.request_flags import SAMPLING_NUMBER_FLAGS, EndingFlags, SamplingFlags
from tests.error_lines import parse_error_line
from tests.fake_processes import FAKE_COMMAND, FAKE_ENVIRONMENT
from tests.repository import REPOSITORY
from tests.unit.coordinator.api.small_requests import refusal, request_of
from wire.addresses import DEFAULT_ADDRESS
from wire.ids import id_text, new_request_id, parse_request_id
from wire.user_files import token_path, write_secret

REQUEST_ID = id_text(new_request_id())
FLAGS = f"""
    --max-tokens 0 --min-tokens 2 -n 3 --echo --no-skip-special-tokens --temperature 0.5 --top-k 4 --top-p 0.9
    --min-p 0.1 --typical-p 0.8 --repetition-penalty 1.1 --frequency-penalty -0.5 --presence-penalty 0.25
    --seed 0 --logit-bias 5=-2.5 --logit-bias 6=1 --allowed-token-ids 1,2 --bad-word-ids 1,2 --bad-word-ids 3
    --stop-token-ids 9 --ignore-eos --logprobs 0 --prompt-logprobs 3 --regex a+ --choice yes --choice no
    --cache-salt salt --no-prefix-cache --priority high --detach 2.5 --request-id {REQUEST_ID} --timeout 9
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ExitStack() as processes:
        process = subprocess.Popen(
            [*FAKE_COMMAND, "coordinator", "--listen", "127.0.0.1:0", "--stages", "2"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **FAKE_ENVIRONMENT},
        )
        processes.enter_context(process)
        processes.callback(process.kill)
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Records the options of each generation instead of sending it."""
    options: list[dict[str, Any]] = []

    async def outputs() -> AsyncGenerator[GenerateOutput, None]:
        raise OSError("nothing is sent")
        yield

    def generate(self: Client, prompt: object, **given: Any) -> AsyncGenerator[GenerateOutput, None]:
        options.append(given)
        return outputs()

    monkeypatch.setattr("stageline.client.client.Client.generate", generate)
    return options


def test_every_flag_becomes_its_parameter(address: str, seen: list[dict[str, Any]], tmp_path: Path) -> None:
    grammar = tmp_path / "grammar.lark"
    grammar.write_text("start: /ä/", encoding="utf-8")
    line = [
        *FLAGS.split(),
        *["--bad-word", "two words", "--bad-word", "x", "--stop", "\n\n", "--stop", "end"],
        *["--json-schema", '{"type": "null"}', "--grammar", f"@{grammar}"],
    ]
    assert main(["generate", "x", "--coordinator", address, *line]) == 1
    expected: GenerateOptions = {
        "max_tokens": 0,
        "min_tokens": 2,
        "n": 3,
        "echo": True,
        "skip_special_tokens": False,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "typical_p": 0.8,
        "repetition_penalty": 1.1,
        "frequency_penalty": -0.5,
        "presence_penalty": 0.25,
        "seed": 0,
        "logit_bias": {5: -2.5, 6: 1.0},
        "allowed_token_ids": [1, 2],
        "bad_words": ["two words", "x"],
        "bad_word_ids": [[1, 2], [3]],
        "stop": ["\n\n", "end"],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "logprobs": 0,
        "prompt_logprobs": 3,
        "json_schema": '{"type": "null"}',
        "regex": "a+",
        "choice": ["yes", "no"],
        "grammar": "start: /ä/",
        "cache_salt": "salt",
        "prefix_cache": False,
        "priority": Priority.HIGH,
        "on_disconnect": Detach(keep_s=2.5),
        "request_id": REQUEST_ID,
        "timeout_s": 9.0,
    }
    expected["attach_secret"] = seen[0]["attach_secret"]  # the secret differs each time
    assert seen == [expected]
    assert set(expected) == set(GenerateOptions.__annotations__)


def test_omitted_flags_are_left_to_the_server(address: str, seen: list[dict[str, Any]]) -> None:
    assert main(["generate", "x", "--coordinator", address]) == 1
    (options,) = seen
    parse_request_id(options.pop("request_id"))
    assert options == {"max_tokens": 100}


def test_the_example_of_the_error_reference_is_what_a_server_returns(
    address: str, seen: list[dict[str, Any]]
) -> None:
    page = (REPOSITORY / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    ((command, line),) = re.findall(r"^\$ stageline (.*)\n(.*)$", page, re.M)
    assert main([*shlex.split(command), "--coordinator", address]) == 1
    text = refusal(request_of(1, 0, sampling={"logit_bias": seen[0]["logit_bias"]}))
    assert parse_error_line(line) == ("INVALID_REQUEST", text)


def test_chat_has_the_sampling_and_stop_flags() -> None:
    numbers = {flag.name for flag in SAMPLING_NUMBER_FLAGS}
    flags = numbers | set(get_type_hints(SamplingFlags)) | set(get_type_hints(EndingFlags))
    assert set(inspect.signature(chat).parameters) == flags | {"max_tokens", "coordinator", "tls_dir"}
    assert flags < set(inspect.signature(generate).parameters)


def test_the_flags_of_chat_reach_every_answer(
    address: str, seen: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter(["hello"])
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    main(["chat", "--coordinator", address, "--min-p", "0.5", "--stop", "x"])
    assert seen == [{"min_p": 0.5, "stop": ["x"]}]


def test_several_choices_are_written_each_when_it_has_ended(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "!uneven", "-n", "2", "--max-tokens", "3", "--coordinator", address]) == 0
    output = capsys.readouterr()
    assert output.out == (
        "--- choice 0: 2 tokens, ended by length ---\n 0 1\n"
        "--- choice 1: 3 tokens, ended by length ---\n 0 1 2\n"
    )
    assert output.err.startswith("(5 tokens in ")


def test_log_probabilities_are_a_table_after_the_text(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["generate", "a b", "--max-tokens", "2", "--logprobs", "2", "--prompt-logprobs", "1"]
    assert main([*line, "--coordinator", address]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "0 1"
    assert lines[1] == "Prompt"
    assert "0 0 - - - -" in lines
    assert "1 1 -0.5000 0.6065 1 1: -0.500" in lines
    assert "Output" in lines
    assert lines[-1] == "1 1 -0.5000 0.6065 1 1: -0.500, 2: -1.500"


def test_scoring_writes_the_table_of_the_prompt(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", "a b", "--max-tokens", "0", "--prompt-logprobs", "0", "--coordinator", address]
    assert main(line) == 0
    output = capsys.readouterr().out
    assert "Prompt" in output
    assert "Output" not in output


def test_json_is_one_object_with_everything(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = [
        "generate",
        "a b",
        "--max-tokens",
        "2",
        "-n",
        "2",
        "--logprobs",
        "1",
        "--prompt-logprobs",
        "0",
        "--json",
    ]
    assert main([*line, "--request-id", REQUEST_ID, "--coordinator", address]) == 0
    message = json.loads(capsys.readouterr().out)
    assert set(message) == {"request_id", "prompt_logprobs", "choices"}
    assert message["request_id"] == REQUEST_ID
    assert [entry["logprob"] for entry in message["prompt_logprobs"]] == [None, -0.5]
    assert [choice["text"] for choice in message["choices"]] == [" 0 1", " 0 1"]
    first = message["choices"][0]
    assert first["token_ids"] == [0, 1]
    assert first["finish_reason"] == "length"
    assert first["usage"]["completion_tokens"] == 2
    assert first["logprobs"][1] == {
        "token_id": 1,
        "logprob": -0.5,
        "rank": 1,
        "top": [{"token_id": 1, "logprob": -0.5}],
    }


def test_an_overloaded_server_is_one_line_with_its_hint(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "!overloaded", "--coordinator", address]) == 1
    assert parse_error_line(capsys.readouterr().err) == (
        "RESOURCE_EXHAUSTED",
        "said the server; try again in 1.5 s",
    )


def test_a_cancelled_request_is_one_line(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "!after:CANCELLED", "--coordinator", address]) == 1
    assert capsys.readouterr().err == "stageline: error[CANCELLED]: said the server\n"


def test_a_detached_request_prints_its_id_and_can_be_attached_to(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "x", "--detach", "60", "--max-tokens", "4", "--coordinator", address]) == 0
    output = capsys.readouterr()
    assert output.out == " 0 1 2 3\n"
    printed = re.match(r"\(request ([0-9a-f-]{36})\)\n", output.err)
    assert printed is not None

    assert main(["attach", printed[1], "--coordinator", address]) == 0
    assert capsys.readouterr().out == " 0 1 2 3\n"
    assert main(["attach", printed[1], "--from-token", "2", "--coordinator", address]) == 0
    assert capsys.readouterr().out == " 2 3\n"
    assert main(["attach", printed[1], "--json", "--coordinator", address]) == 0
    assert json.loads(capsys.readouterr().out)["choices"][0]["token_ids"] == [0, 1, 2, 3]


def test_attaching_to_several_choices_needs_to_know_how_many(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    request_id = id_text(new_request_id())
    line = ["generate", "x", "-n", "2", "--detach", "60", "--max-tokens", "1", "--request-id", request_id]
    assert main([*line, "--coordinator", address]) == 0
    capsys.readouterr()

    assert main(["attach", request_id, "--coordinator", address]) == 1
    assert capsys.readouterr().err == (
        "stageline: error[USAGE]: the request has several choices; set their number with -n\n"
    )
    assert main(["attach", request_id, "-n", "2", "--coordinator", address]) == 0
    assert capsys.readouterr().out.count("--- choice ") == 2


def test_ctrl_c_leaves_a_detached_request_running_with_a_hint(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    request_id = id_text(new_request_id())
    line = ["generate", "!endless", "--detach", "60", "--request-id", request_id, "--coordinator", address]
    returncode, errors = _interrupt(line)
    assert returncode == 130
    assert errors == (
        f"(request {request_id})\n\n"
        f"stageline: the request continues; `stageline attach {request_id}` shows it, "
        f"`stageline cancel {request_id}` ends it\n"
    )
    returncode, errors = _interrupt(["attach", request_id, "--coordinator", address])
    assert returncode == 130
    assert errors == f"\nstageline: detached from request {request_id}\n"

    assert main(["cancel", request_id, "--coordinator", address]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["attach", request_id, "--coordinator", address]) == 1


@pytest.mark.parametrize("command", ["attach", "cancel"])
def test_an_unknown_request_is_one_line(
    command: str, address: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    request_id = id_text(new_request_id())
    assert main([command, request_id, "--coordinator", address]) == 1
    assert capsys.readouterr().err == (
        f"stageline: error[NO_SECRET]: the secret of request {request_id} is not on this host: "
        "pass --secret-file PATH\n"
    )
    write_secret(tmp_path / "secret", new_attach_secret())
    line = [command, request_id, "--secret-file", str(tmp_path / "secret"), "--coordinator", address]
    assert main(line) == 1
    assert capsys.readouterr().err == f"stageline: error[NOT_FOUND]: no request {request_id}\n"


def test_the_secret_of_a_detached_request_is_private_and_deleted_with_it(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    kept = tmp_path / "stageline" / "requests"
    line = ["generate", "x", "--max-tokens", "1", "--coordinator", address]
    assert main([*line, "--detach", "0.001"]) == 0
    (first,) = kept.iterdir()
    assert (stat.S_IMODE(first.stat().st_mode), stat.S_IMODE(kept.stat().st_mode)) == (0o600, 0o700)
    assert len(first.read_text().strip()) == 43
    assert main([*line, "--detach", "60"]) == 0
    assert not first.exists(), "its output is kept no longer, and the next command removes it"
    (second,) = kept.iterdir()
    second.chmod(0o640)
    capsys.readouterr()
    assert main(["cancel", second.name, "--coordinator", address]) == 2
    assert f"{second} has mode 0640, must be 0600 or stricter" in capsys.readouterr().err
    second.chmod(0o600)
    assert main(["cancel", second.name, "--coordinator", address]) == 0
    assert list(kept.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["attach", "ID"], "--secret-file"),
        (["cancel", "ID"], "--secret-file"),
        (["cancel", "ID"], "--token-file"),
        (["drain", "worker-0"], "--token-file"),
        (["coordinator", "--stages", "1"], "--token-file"),
        (["up"], "--token-file"),
    ],
)
def test_a_secret_that_others_can_read_is_a_usage_error(
    words: list[str], flag: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "secret"
    write_secret(path, new_attach_secret())
    path.chmod(0o644)
    request_id = id_text(new_request_id())
    line = [request_id if word == "ID" else word for word in words]
    assert main([*line, flag, str(path)]) == 2
    problem = f"{path} has mode 0644, must be 0600 or stricter: run chmod 600 {path}"
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"stageline: error[USAGE]: Invalid value: {flag} cannot be used: {problem} (see ")


@pytest.mark.parametrize("words", [["drain", "worker-0"], ["cancel", "ID"]])
def test_a_kept_secret_that_others_can_read_is_a_usage_error_too(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    request_id = id_text(new_request_id())
    token = token_path(tmp_path / "stageline" / "tokens", DEFAULT_ADDRESS)
    secret = tmp_path / "stageline" / "requests" / request_id
    for path in (token, secret):
        write_secret(path, new_attach_secret())
        path.chmod(0o644)
    path, what = (token, f"the operator token of {DEFAULT_ADDRESS}")
    if words[1] == "ID":
        path, what = secret, f"the secret of request {request_id}"
    assert main([words[0], request_id if words[1] == "ID" else words[1]]) == 2
    problem = f"{path} has mode 0644, must be 0600 or stricter: run chmod 600 {path}"
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"stageline: error[USAGE]: Invalid value: {what} cannot be used: {problem} (see ")


def test_a_secret_can_be_read_from_standard_input(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{new_attach_secret()}\n"))
    request_id = id_text(new_request_id())
    assert main(["cancel", request_id, "--secret-file", "-", "--coordinator", address]) == 1
    assert "error[NOT_FOUND]" in capsys.readouterr().err


def test_an_empty_secret_is_reported_as_empty(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    request_id = id_text(new_request_id())
    assert main(["attach", request_id, "--secret-file", "-", "--coordinator", address]) == 1
    assert "error[NO_SECRET]: no secret in standard input: it is empty" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat", "attach", "cancel"])
def test_the_help_explains_every_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    words = capsys.readouterr().out
    assert "--coordinator" in words
    if command == "generate":
        assert "Structured output (at most one of these)" in words


def _interrupt(line: list[str]) -> tuple[int, str]:
    """Ctrl-C as soon as there is output; returns exit code and standard error."""
    process = subprocess.Popen(
        [sys.executable, "-m", "stageline", *line],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **FAKE_ENVIRONMENT},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.read(4) == " 0 1"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    return process.returncode, errors
