"""Usage errors are one line and exit code 2."""

import errno
import os
import pwd
from pathlib import Path
from typing import Any

import pytest

from checkpoint.dtypes import ScaledDType
from coordinator.config import CoordinatorConfig
from coordinator.model import open_model
from stage_worker.config import WorkerConfig
from stageline.cli import _with_hint, main
from stageline.cli.config_flags import flags_of
from stageline.cli.options import default_token_directory
from stageline.version import VERSION
from telemetry.logs import LogFormat, LogLevel, LogSettings
from telemetry.settings import read_environment
from tests.error_lines import parse_error_line
from wire.transport import TransportSettings


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "No such command 'nonsense'"),
        ("serve x", "No such command 'serve'. Here it is 'stageline up'"),
        ("keys creat", "No such command 'creat'. Did you mean 'create'?"),
        ("plan --workers 1GiB --workers 2GiB", "'--workers': is given 2 times, and takes one value"),
        ("gateway --coordinator a:1 --coordinator=b:2", "'--coordinator': is given 2 times"),
        ("up --model Qwen/Qwen3-8B", "does not exist: a model of the Hugging Face Hub is hf://Qwen/Qwen3-8B"),
        ("plan --check http://nowhere", "http://nowhere"),
        ("generate", "Missing argument 'PROMPT'"),
        ("generate x --temprature 1", "No such option: --temprature"),
        ("generate x --max-tokens many", "Invalid value for '--max-tokens': 'many' is not an integer"),
        ("generate x --max-tokens -1", "Invalid value for '--max-tokens': '-1' is less than 0"),
        ("generate x --temperature nan", "Invalid value for '--temperature': 'nan' is not a finite number"),
        ("generate x --temperature warm", "Invalid value for '--temperature': 'warm' is not a number"),
        ("generate x --temperature -1", "'-1' is not in [0, 100]"),
        ("generate x --top-p nan", "Invalid value for '--top-p': 'nan' is not a finite number"),
        ("generate x --timeout nan", "Invalid value for '--timeout': 'nan' is not a finite number"),
        ("generate x --detach nan", "Invalid value for '--detach': 'nan' is not a finite number"),
        ("generate x --detach -1", "Invalid value for '--detach': '-1' is not in (0, 3600]"),
        ("generate x --detach 0", "'0' is not in (0, 3600]"),
        ("generate x --detach 3601", "'3601' is not in (0, 3600]"),
        ("generate x --n 0", "Invalid value for '--n' / '-n': '0' is less than 1"),
        ("generate x --logit-bias 5", "Invalid value for --logit-bias: '5' is not ID=BIAS, for example"),
        ("generate x --logit-bias 5=x", "'5=x' is not ID=BIAS"),
        ("generate x --allowed-token-ids 1;2", "--allowed-token-ids: '1;2' is not a list of token ids"),
        ("generate x --stop-token-ids a", "--stop-token-ids: 'a' is not a list of token ids"),
        ("generate x --bad-word-ids 1,", "--bad-word-ids: '1,' is not a list of token ids"),
        (
            "generate x --json-schema @/no/such/file",
            "--json-schema: cannot read '/no/such/file': No such file",
        ),
        ("generate x --grammar @/", "--grammar: cannot read '/': Is a directory"),
        ("generate x --priority urgent", "Invalid value for '--priority'"),
        ("generate x --detach long", "Invalid value for '--detach'"),
        ("chat --n 2", "No such option: --n"),
        ("attach", "Missing argument 'REQUEST_ID'"),
        ("attach x --from-token -1", "Invalid value for '--from-token'"),
        ("cancel", "Missing argument 'REQUEST_ID'"),
        (
            "generate x --coordinator here",
            "Invalid value for '--coordinator': address 'here' is not HOST:PORT",
        ),
        ("generate x --coordinator here:0", "address 'here:0' has port 0"),
        *(
            (f"{command} a..b:7000", f"'{command.split()[-1]}': address 'a..b:7000' has the host 'a..b'")
            for command in (
                "status --coordinator",
                "coordinator --listen",
                "coordinator --http",
                "worker --coordinator",
                "worker --listen",
                "worker --advertise",
                "worker --payload-listen",
                "worker --payload-advertise",
                "gateway --coordinator",
                "gateway --listen",
                "up --listen",
                "up --http",
                "up --gateway",
                "up --payload-listen",
            )
        ),
        ("up --payload-listen 127.0.0.1:7000", "gives port 7000 to each of 3 workers: give port 0"),
        ("generate x --coordinator here:70000", "has port 70000, the limit is 65535"),
        ("generate 1,x --token-ids", "'1,x' is not a list of token ids such as 1,15,7"),
        ("coordinator", "Missing option '--stages'"),
        ("coordinator --stages 0", "Invalid value for '--stages': '0' is less than 1"),
        ("coordinator --stages 2 --layers 3,a", "--layers '3,a' is not a list of numbers"),
        ("coordinator --stages 2 --layers 3,4,5", "layers 3,4,5 are for 3 stages, but there are 2"),
        ("coordinator --stages 2 --layers 3,0", "layers 3,0 leave a stage without layers"),
        ("coordinator --stages 3 --max-stages 2", "max_stages 2 is less than stages, 3"),
        ("coordinator --stages 2 --max-stages 3 --layers 3,3", "are for 2 stages, but there are 3"),
        ("coordinator --stages 1000000", "--stages is 1000000, must be in [1, 4096]"),
        ("coordinator --stages 1 --heartbeat nan", "--heartbeat is nan, must be in (0, inf)"),
        ("coordinator --stages 1 --reattach-timeout inf", "--reattach-timeout is inf, must be in (0, inf)"),
        ("coordinator --stages 1 --priority-age 0", "--priority-age is 0.0, must be in (0, inf)"),
        ("coordinator --stages 1 --self-check-interval -1", "is -1.0, must be in [0, inf)"),
        ("coordinator --stages 1 --trace-sample 7", "--trace-sample is 7.0, must be in [0, 1]"),
        ("coordinator --stages 1 --trace-sample nan", "--trace-sample is nan, must be in [0, 1]"),
        ("coordinator --stages 1 --max-decode-slowdown 1", "slowdown is 1.0, must be in (1, inf)"),
        ("coordinator --stages 1 --itl-target 0", "--itl-target is 0.0, must be in (0, 60]"),
        ("coordinator --stages 1 --itl-target -0.1", "--itl-target is -0.1, must be in (0, 60]"),
        ("coordinator --stages 1 --itl-target nan", "--itl-target is nan, must be in (0, 60]"),
        ("coordinator --stages 1 --itl-target inf", "--itl-target is inf, must be in (0, 60]"),
        ("coordinator --stages 1 --itl-target 100", "--itl-target is 100.0, must be in (0, 60]"),
        ("up --workers 1 --itl-target 100", "--itl-target is 100.0, must be in (0, 60]"),
        ("worker --step-timeout 0", "--step-timeout is 0.0, must be in (0, inf)"),
        ("coordinator --stages 1 --mock-model layers=1000000000", "expected a number from 1 to 4096"),
        (
            "coordinator --stages 1 --queue-size 9999999999999",
            "--queue-size is 9999999999999, must be in [1, 1000000]",
        ),
        (
            "up --workers 1 --memory 99999TiB",
            "'99999TiB' is too large, the limit is 1024.0 TiB",
        ),
        (
            "up --workers 2 --memory 999TiB",
            "--memory is 999.0 TiB for each of 2 workers on the CPU, 1998.0 TiB in all, but this host has ",
        ),
        ("up --threads 100000000", "--threads is 100000000, the limit is "),
        ("worker --threads 100000000", "--threads is 100000000, the limit is "),
        ("worker --memory 0", "'0' is zero, the minimum is 1B: write for example 20GiB"),
        ("up --memory 0GiB", "'0GiB' is zero, the minimum is 1B: write for example 20GiB"),
        ("top --interval nan", "'nan' is not a finite number"),
        ("top --interval 0", "'0' is not in [0.1, 60]"),
        ("bench serve --temperature nan", "a temperature of nan is not"),
        ("up --workers 2000", "2000 workers: the limit on one machine is 1024"),
        ("worker --memory 99999TiB", "'99999TiB' is too large"),
        ("worker --model model.gguf", "file 'model.gguf' does not exist"),
        ("plan --workers 99999TiB", "'99999TiB' is too large"),
        (
            "plan --workers 1GiB --kv-tokens 99999999999999999999",
            "--kv-tokens is 99999999999999999999, must be in [1, 1099511627776]",
        ),
        ("plan --workers 1GiB --max-model-len 9999999999", "--max-model-len is 9999999999, must be in [1, "),
        (
            "plan --workers 1GiB --block-size 100000 --max-step-tokens 100000",
            "--block-size is 100000, must be in [1, 65536]",
        ),
        ("coordinator --stages 2 --dtype f64", "dtype 'f64' is not one of bf16, f16, f32"),
        ("coordinator --stages 2 --wire-dtype int4", "wire dtype 'int4' is not one of bf16, fp8, int8"),
        ("coordinator --stages 1 --wire-dtype fp8", "wire_dtype fp8 is for hidden states between stages"),
        (
            "coordinator --stages 2 --dtype f16 --wire-dtype bf16",
            "bf16 is not smaller than hidden states in f16",
        ),
        (
            "coordinator --stages 1 --http [::1]:0 --no-http",
            "--http [::1]:0 and --no-http contradict each other",
        ),
        ("up --http 127.0.0.1:7481 --no-http", "--http 127.0.0.1:7481 and --no-http contradict each other"),
        ("up --wire-dtype f32", "wire dtype 'f32' is not one of bf16, fp8, int8"),
        ("up --workers 1 --wire-dtype bf16", "between stages, but there is one stage"),
        ("worker --wire-dtype FP8", "wire dtype 'FP8' is not one of bf16, fp8, int8"),
        (
            "coordinator --stages 2 --max-step-tokens 8",
            "max_step_tokens 8 is less than one block of 16 tokens",
        ),
        ("coordinator --stages 2 --model /nowhere/at/all", "'/nowhere/at/all' does not exist"),
        ("worker --memory 20", "'20' has no unit: write for example 20GiB"),
        ("worker --memory lots", "'lots' is not a size"),
        ("worker --memory 20GoB", "unknown unit 'GoB'"),
        ("worker --device gpu", "device 'gpu' is not one of cpu, auto"),
        ("worker --name a/b", "name 'a/b' is not 1 to 63 letters"),
        ("worker --advertise host:0", "address 'host:0' has port 0"),
        ("up --workers 2 --layers 1,1,1", "layers 1,1,1 are for 3 stages, but there are 2"),
        ("up --device cuda:0", "3 workers share cuda:0: say with --memory"),
        ("status --json --watch", "--json prints once"),
        ("bench", "Missing command"),
        ("bench serve --num-requests 0", "Invalid value for '--num-requests': '0' is less than 1"),
        ("bench serve --num-requests 5 --duration 5", "--num-requests and --duration exclude each other"),
        ("bench serve --num-requests 2000000", "number of requests 2000000 is not in [1, 1000000]"),
        ("bench serve --duration -1", "a duration of -1 s is not above 0"),
        ("bench serve --duration 5 --request-rate inf", "an infinite rate needs a number of requests"),
        ("bench serve --request-rate 0", "a request rate of 0 per second is not above 0"),
        ("bench serve --request-rate nan", "a request rate of nan per second is not above 0"),
        ("bench serve --burstiness 0", "a burstiness of 0 is not above 0"),
        ("bench serve --max-concurrency 0", "Invalid value for '--max-concurrency'"),
        ("bench serve --seed -1", "Invalid value for '--seed': '-1' is less than 0"),
        (f"bench serve --seed {2**64}", f"'--seed': '{2**64}' is more than {2**64 - 1}"),
        ("coordinator --stages " + 5000 * "9", "Invalid value for '--stages': the number is too large"),
        ("coordinator --stages 1 --lease soon", "Invalid value for '--lease': 'soon' is not a number"),
        ("coordinator --stages 1 --log-level loud", "'--log-level': 'loud' is not one of 'debug', "),
        (
            "bench serve --prompt-tokens zipf:2",
            "'zipf:2' is not a distribution of lengths; examples: 128",
        ),
        ("bench serve --output-tokens uniform:9-5", "9 to 5 tokens is not a range of lengths"),
        ("bench serve --prefix-groups 2", "2 prefix groups need a shared prefix"),
        ("bench serve --timeout 0", "a timeout of 0 s is not above 0"),
        ("bench serve --temperature inf", "a temperature of inf is not"),
        ("bench serve --slo-itl 0", "a limit of 0 ms is not above 0"),
        ("bench serve --json /no/such/folder/x.json", "cannot write '/no/such/folder/x.json'"),
        ("bench serve --plot x.pdf", "'x.pdf' does not end with one of .svg, .png"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    output = capsys.readouterr()
    assert output.out == ""
    reason, text = parse_error_line(output.err)
    assert reason == "USAGE"
    assert message in text


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"stageline {VERSION}\n"


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    output = capsys.readouterr().out
    for command in (
        "demo",
        "up",
        "coordinator",
        "worker",
        "generate",
        "chat",
        "attach",
        "cancel",
        "status",
        "top",
        "bench",
    ):
        assert f" {command} " in output


def test_the_coordinators_flags_become_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _catch_config(monkeypatch, "coordinator.server")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    line = (
        f"coordinator --model {tmp_path} --listen [::1]:0 --stages 3 --layers 10,12,10 --dtype bf16 "
        "--block-size 32 --max-step-tokens 256 --max-step-sequences 8 --max-model-len 4096 "
        "--kv-tokens 9999 --no-prefix-cache --queue-size 5 --wire-dtype int8 --self-check-interval 7 "
        "--trace-store 7 --trace-bytes 5MiB"
    )
    assert main(line.split()) == 3
    assert seen == [
        CoordinatorConfig(
            model=tmp_path,
            listen="[::1]:0",
            num_stages=3,
            layers=(10, 12, 10),
            dtype="bf16",
            block_size=32,
            max_step_tokens=256,
            max_step_sequences=8,
            max_sequence_tokens=4096,
            max_kv_tokens=9999,
            prefix_cache=False,
            queue_size=5,
            wire_dtype="int8",
            self_check_interval_s=7.0,
            cache_directory=tmp_path / "stageline",
            token_directory=default_token_directory(),
            trace_store=7,
            trace_bytes=5 * 2**20,
            telemetry=read_environment({}, version=VERSION),
        )
    ]
    assert main(["coordinator", *flags_of(seen[0])]) == 3
    assert seen[1] == seen[0]


@pytest.mark.parametrize("line", ["coordinator --stages 3", "worker"])
def test_log_settings_come_from_flags_or_the_environment(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    app = "coordinator.server" if line.startswith("coordinator") else "stage_worker.server"
    seen = _catch_config(monkeypatch, app)
    debug_json = LogSettings(format=LogFormat.JSON, level=LogLevel.DEBUG)
    assert main(line.split()) == 3
    assert main([*line.split(), "--log-format", "json", "--log-level", "debug"]) == 3
    monkeypatch.setenv("STAGELINE_LOG_FORMAT", "json")
    monkeypatch.setenv("STAGELINE_LOG_LEVEL", "debug")
    assert main(line.split()) == 3
    assert main([*line.split(), *flags_of(LogSettings())]) == 3
    assert [config.logs for config in seen] == [LogSettings(), debug_json, debug_json, LogSettings()]


def test_an_unknown_log_format_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", "--log-format", "xml"]) == 2
    assert "'xml' is not one of 'console', 'json'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "expected"), [((), None), (("--self-check",), True), (("--no-self-check",), False)]
)
def test_the_self_check_flag_reaches_the_coordinator(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], expected: bool | None
) -> None:
    seen = _catch_config(monkeypatch, "coordinator.server")
    assert main(["coordinator", "--stages", "3", *flags]) == 3
    assert seen[0].self_check is expected
    handed_on = [flag for flag in flags_of(seen[0]) if flag.endswith("self-check")]
    assert handed_on == list(flags)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("coordinator --stages 2 --mock-model layers=4 --self-check", "it cannot be used with --mock-model"),
        (
            "coordinator --stages 2 --mock-model layers=4 --kv-dtype fp8",
            "it cannot be used with --mock-model",
        ),
        ("up --mock step=1ms --self-check", "cannot be used with --mock"),
    ],
)
def test_a_mock_cannot_be_self_checked(capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_workers_flags_become_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _catch_config(monkeypatch, "stage_worker.server")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    line = (
        "worker --coordinator head:7480 --device cuda:1 --memory 1.5GiB --name gpu-a --listen 0.0.0.0:9000 "
        f"--insecure --advertise gpu-a:9000 --model {tmp_path} --threads 4 --wire-dtype fp8"
    )
    assert main(line.split()) == 3
    assert seen == [
        WorkerConfig(
            coordinator="head:7480",
            device="cuda:1",
            memory_bytes=3 * 2**29,
            name="gpu-a",
            listen="0.0.0.0:9000",
            transport=TransportSettings(insecure=True),
            advertise="gpu-a:9000",
            model_directory=tmp_path,
            num_threads=4,
            wire_dtype=ScaledDType.F8_E4M3,
            cache_directory=tmp_path / "stageline",
            state_directory=tmp_path / "state" / "stageline",
            telemetry=read_environment({}, version=VERSION),
        )
    ]


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home directory, as in containers with arbitrary user ids."""

    def no_entry(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    for variable in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.usefixtures("no_home")
def test_processes_start_without_a_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("a" * 20)
    (tmp_path / "token").chmod(0o600)
    coordinators = _catch_config(monkeypatch, "coordinator.server")
    assert main(["coordinator", "--stages", "1", "--token-file", str(tmp_path / "token")]) == 3
    assert (coordinators[0].token, coordinators[0].token_directory) == ("a" * 20, None)
    workers = _catch_config(monkeypatch, "stage_worker.server")
    assert main(["worker"]) == 3
    assert (workers[0].cache_directory, workers[0].state_directory) == (None, None)
    gateways = _catch_config(monkeypatch, "gateway.server")
    assert main(["gateway"]) == 3
    assert gateways[0].cache_directory is None


@pytest.mark.parametrize(
    ("path", "code", "variable"),
    [
        (".local/state/stageline/requests/a", errno.EROFS, "XDG_STATE_HOME"),
        (".local", errno.EACCES, "XDG_STATE_HOME"),
        (".cache/stageline/weights", errno.ENOSPC, "XDG_CACHE_HOME"),
        (".local", errno.ENOENT, None),
        ("elsewhere", errno.EACCES, None),
    ],
)
def test_a_file_of_ours_that_cannot_be_written_names_the_variable_that_moves_it(
    path: str, code: int, variable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    error = OSError(code, os.strerror(code), str(tmp_path / path))
    hint = "" if variable is None else f": set {variable} to a directory that can be written"
    assert _with_hint(error) == f"{error}{hint}"


@pytest.mark.usefixtures("no_home")
@pytest.mark.parametrize(
    "line", ["coordinator --stages 1", "drain w0", "cancel 0190a0b0-0000-7000-8000-000000000001"]
)
def test_what_needs_a_home_directory_says_which_variable_to_set(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 1
    _, text = parse_error_line(capsys.readouterr().err)
    assert text.startswith("there is no home directory: HOME is not set and user id")
    assert "set XDG_STATE_HOME to a directory that this user may write to" in text
    assert ("--token-file FILE" in text) is not line.startswith("cancel")


def test_the_cache_of_a_worker_is_its_own_unless_it_has_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = _catch_config(monkeypatch, "stage_worker.server")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["worker", "--cache-dir", str(tmp_path / "c"), "--cache-size", "3GiB"]) == 3
    assert (seen[0].weights_cache("cpu"), seen[0].weights_limit_bytes) == (tmp_path / "c", 3 * 2**30)
    assert main(["worker", "--name", "gpu-a"]) == main(["worker", "--device", "cuda:1"]) == 3
    home = tmp_path / "stageline" / "weights-of-workers"
    assert [config.weights_cache(config.device) for config in seen[1:]] == [home / "gpu-a", home / "cuda-1"]
    for others in (["--model", str(tmp_path)], ["--mock", "step=1ms"]):
        assert main(["worker", "--cache-size", "1GiB", *others]) == 2
        assert "cannot be used with --cache-size" in capsys.readouterr().err


def test_a_manifest_is_for_a_remote_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it needs --model with an address"):
        open_model(CoordinatorConfig(num_stages=1, weights_manifest=tmp_path))
    with pytest.raises(ValueError, match="it cannot be used with --mock-model"):
        CoordinatorConfig(num_stages=1, weights_manifest=tmp_path, mock_model="layers=4")


def test_a_cpu_set_reaches_the_config_and_missing_cpus_are_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = _catch_config(monkeypatch, "stage_worker.server")
    pinned: list[tuple[int, ...]] = []
    monkeypatch.setattr("os.sched_setaffinity", lambda _, cpus: pinned.append(cpus))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 8})
    assert main(["worker", "--cpu-set", "0-2,8"]) == 3
    assert pinned == [seen[0].cpu_set] == [(0, 1, 2, 8)]
    assert main(["worker", "--cpu-set", "0-4"]) == 2
    assert len(pinned) == 1
    assert "CPUs 3,4 are not among those this process may use: 0,1,2,8" in capsys.readouterr().err


def test_the_coordinator_address_can_be_set_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _catch_config(monkeypatch, "stage_worker.server")
    monkeypatch.setenv("STAGELINE_COORDINATOR", "head:1234")
    assert main(["worker"]) == 3
    assert seen[0].coordinator == "head:1234"


def _catch_config(monkeypatch: pytest.MonkeyPatch, module: str) -> list[Any]:
    """Replaces the process module with a fake whose `run` keeps the config and exits with code 3."""
    seen: list[Any] = []

    class App:
        @staticmethod
        def run(config: object) -> int:
            seen.append(config)
            return 3

    monkeypatch.setitem(__import__("sys").modules, module, App)
    return seen
