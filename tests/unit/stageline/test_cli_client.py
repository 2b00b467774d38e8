"""Client commands against a fake coordinator in a separate process."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from stageline import Client
from stageline.cli import main
from tests.fake_processes import FAKE_COMMAND, FAKE_ENVIRONMENT, wait_until
from tests.repository import REPOSITORY

StartCoordinator = Callable[..., str]


@pytest.fixture(scope="module")
def start_coordinator() -> Iterator[StartCoordinator]:
    with ExitStack() as processes:

        def start(**variables: str) -> str:
            process = subprocess.Popen(
                [*FAKE_COMMAND, "coordinator", "--listen", "127.0.0.1:0", "--stages", "2"],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **FAKE_ENVIRONMENT, **variables},
            )
            processes.enter_context(process)
            processes.callback(process.kill)
            assert process.stdout is not None
            return process.stdout.readline().split()[-1]

        yield start


@pytest.fixture(scope="module")
def address(start_coordinator: StartCoordinator) -> str:
    return start_coordinator()


@pytest.fixture(scope="module")
def untokenized_address(start_coordinator: StartCoordinator) -> str:
    return start_coordinator(FAKE_TOKENIZER="0", FAKE_CHAT_TEMPLATE="0")


@pytest.fixture(autouse=True)
def short_connect_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_connect_timeout(monkeypatch, 5.0)


def test_generate_writes_the_text_to_stdout_and_the_speed_to_stderr(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "hello", "--max-tokens", "3", "--coordinator", address]) == 0
    output = capsys.readouterr()
    assert output.out == " 0 1 2\n"
    assert output.err.startswith("(3 tokens in ")
    assert " tokens/s; first token after " in output.err
    assert output.err.endswith("ended by length)\n")


def test_the_example_of_the_readme_writes_the_text_and_how_it_ended(address: str) -> None:
    (example,) = re.findall(
        r"^```python\n(import asyncio.*?)^```$", (REPOSITORY / "README.md").read_text(), re.M | re.S
    )
    assert "127.0.0.1:7480" in example
    command = [sys.executable, "-c", example.replace("127.0.0.1:7480", address)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    text, ending = run.stdout.rstrip().rsplit("\n", 1)
    assert text.split() == [str(number) for number in range(100)]
    assert "length, Usage(" in ending


def test_generate_prints_the_seed_when_sampling(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--temperature", "1", "--seed", "11", "--coordinator", address]) == 0
    assert capsys.readouterr().err.endswith("seed 11)\n")


def test_generate_writes_token_ids_where_there_is_no_tokenizer(
    untokenized_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["generate", "5,6", "--token-ids", "--max-tokens", "3", "--coordinator", untokenized_address]
    assert main(line) == 0
    assert capsys.readouterr().out == "0,1,2\n"


def test_text_for_a_model_without_tokenizer_is_one_clear_line(
    untokenized_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "hello", "--coordinator", untokenized_address]) == 1
    assert capsys.readouterr().err == (
        "stageline: error[NO_TOKENIZER]: model fake-stories has no tokenizer (tokenizer.json): "
        "give token ids with --token-ids, or copy the model's tokenizer.json beside its weights and "
        "restart the coordinator\n"
    )


def test_a_servers_refusal_is_one_line_and_exit_code_1(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "!after:ABORTED", "--coordinator", address]) == 1
    assert capsys.readouterr().err == "stageline: error[ABORTED]: said the server\n"


@pytest.mark.parametrize(
    "command",
    [["generate", "x"], ["chat"], ["status"], ["status", "--json"]],
)
def test_an_unreachable_coordinator_is_one_line_and_exit_code_1(
    command: list[str],
    unused_address: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _set_connect_timeout(monkeypatch, 0.2)
    assert main([*command, "--coordinator", unused_address]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == (
        f"stageline: error[UNAVAILABLE]: no coordinator at {unused_address} within 0.2 s: nothing listens "
        "there: check the port, or start the coordinator\n"
    )


def test_ctrl_c_cancels_the_request_and_is_one_line_and_exit_code_130(address: str) -> None:
    num_cancelled = _status(address)["requests"]["cancelled"]
    process = subprocess.Popen(
        [sys.executable, "-m", "stageline", "generate", "!endless", "--coordinator", address],
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
    assert process.returncode == 130
    assert errors == "\nstageline: the request was cancelled\n"
    wait_until(lambda: int(_status(address)["requests"]["cancelled"]) == int(num_cancelled) + 1)


def test_a_closed_pipe_ends_generate_without_a_traceback(address: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "stageline", "generate", "!endless", "--coordinator", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **FAKE_ENVIRONMENT},
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 1


def test_status_shows_model_state_and_requests(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--coordinator", address]) == 0
    output = capsys.readouterr().out
    assert "fake-stories in f32, 2 stages" in output
    assert "waiting for workers: 0 of 2 workers joined" in output
    assert "3 finished" in output


def test_status_as_json_is_the_documented_schema(address: str) -> None:
    status = _status(address)
    assert status["num_stages"] == 2
    assert status["state"] == "CLUSTER_STATE_WAITING_FOR_WORKERS"
    assert status["requests"]["waiting"] == 0


def test_chat_keeps_the_history_until_it_is_reset(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = "hello\n\nand\n/reset\n/what\nagain\n/exit\nnever\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert main(["chat", "--coordinator", address, "--max-tokens", "1"]) == 0
    output = capsys.readouterr()
    # The fake responds with the number of messages in the conversation.
    assert output.out == " 1 messages\n 3 messages\n 1 messages\n"
    assert "Chatting with fake-stories" in output.err
    assert "(no command /what; there are /reset and /exit)" in output.err


def test_chat_ends_with_its_input(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", "--coordinator", address]) == 0


def test_chat_refuses_a_model_without_a_chat_template(
    start_coordinator: StartCoordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--coordinator", start_coordinator(FAKE_CHAT_TEMPLATE="0")]) == 1
    assert capsys.readouterr().err == (
        "stageline: error[NO_CHAT_TEMPLATE]: model fake-stories has no chat template; "
        "use `stageline generate`\n"
    )


def test_a_chat_with_a_model_without_tokenizer_is_one_clear_line(
    untokenized_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--coordinator", untokenized_address]) == 1
    assert capsys.readouterr().err == (
        "stageline: error[NO_TOKENIZER]: model fake-stories has no tokenizer (tokenizer.json), "
        "which a chat needs: copy the model's tokenizer.json beside its weights and restart the coordinator\n"
    )


def _set_connect_timeout(monkeypatch: pytest.MonkeyPatch, timeout_s: float) -> None:
    monkeypatch.setitem(Client.__init__.__kwdefaults__, "connect_timeout_s", timeout_s)


def _status(address: str) -> dict[str, object]:
    process = subprocess.run(
        [sys.executable, "-m", "stageline", "status", "--json", "--coordinator", address],
        capture_output=True,
        check=True,
        env={**os.environ, **FAKE_ENVIRONMENT},
    )
    return json.loads(process.stdout)


def test_status_waits_until_the_cluster_serves_or_says_why_it_does_not(
    address: str, unused_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["status", "--wait", "serving", "--timeout", "0.6", "--coordinator"]
    for coordinator, words in (
        (address, "0 of 2 workers joined"),
        (unused_address, "not serving after 0.6 s: "),
    ):
        assert main([*line, coordinator]) == 1
        output, errors = capsys.readouterr()
        assert (output, words in errors) == ("", True)
        assert errors.startswith("stageline: error[NOT_SERVING]: ")
    assert main(["status", "--wait", "serving", "--timeout", "300ms", "--coordinator", unused_address]) == 1
    assert "not serving after 0.3 s: " in capsys.readouterr().err
    for wrong in ("soon", "0", "60 s", "-1s", "1e3", "60sec"):
        assert main(["status", "--wait", "serving", "--timeout", wrong]) == 2
        assert f"'{wrong}' is not a time above 0: write for example 60s" in capsys.readouterr().err
    assert main(["status", "--timeout", "3"]) == 2
    assert main(["status", "--wait", "ready"]) == 2
