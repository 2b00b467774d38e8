"""Every feature that README.md names is driven by a test of `make test`, `test-full` or `test-clients`.

A row names a file of tests and texts: one of its tests is in these tiers and has all the texts in its source,
or in functions and constants of the file that it uses. A feature without a row fails, as does a row without a
feature, or whose test is gone, no longer drives it, or moved to another tier.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from stageline.cli import make_app
from tests.repository import REPOSITORY
from tests.unit.test_tiers import chosen_by
from tools.reference_pages.flags import leaves

README = (REPOSITORY / "README.md").read_text()
PROTOS = REPOSITORY / "proto" / "stageline_rpc" / "v1"
_BY_HAND = "e2e/test_by_hand.py"
_CERTIFICATES = "integration/test_certificates.py"
_CERTS = "unit/stageline/test_cli_certs.py"
_CONFIG = "unit/stageline/test_cli_config.py"
_GATEWAY = "e2e/test_gateway.py"
_KEYS = "unit/stageline/test_cli_keys.py"
_LOAD = "e2e/served/test_bench_serve.py"
_REQUESTS = "unit/stageline/test_cli_requests.py"
_STRANGER = "e2e/served/test_any_grpc_client.py"
_TLS = "e2e/test_certified_processes.py"
_TOKENS = "unit/stageline/test_cli_token.py"
_UP = "e2e/test_up.py"
_UP_FLAGS = "unit/stageline/test_cli_local.py"
_USAGE = "unit/stageline/test_cli_usage.py"
_WEIGHTS = "unit/stageline/test_cli_weights.py"

Row = tuple[str, ...]
COMMANDS: dict[str, Row] = {
    "demo": (_UP, 'Terminal("demo"'),
    "up": (_UP, 'Terminal("up"'),
    "coordinator": (_BY_HAND, "shell.coordinator("),
    "worker": (_BY_HAND, '"worker", "--coordinator"'),
    "gateway": (_GATEWAY, '"gateway", "--coordinator"'),
    "deploy render": ("unit/deploy/test_engines.py", 'main(["deploy", "render"'),
    "deploy run": (_UP_FLAGS, '"deploy", "run", "local"'),
    "deploy status": (_UP_FLAGS, 'main(["deploy", "status"'),
    "deploy stop": (_UP_FLAGS, 'main(["deploy", "stop"'),
    "plan": (_UP, 'run_stageline("plan"'),
    "models": ("unit/checkpoint/test_catalog.py", 'main(["models"'),
    "weights index": (_WEIGHTS, 'main(["weights", "index"'),
    "weights pull": (_WEIGHTS, 'main(["weights", "pull"'),
    "weights ls": (_WEIGHTS, 'main(["weights", "ls"'),
    "weights verify": (_WEIGHTS, 'main(["weights", "verify"'),
    "weights rm": (_WEIGHTS, 'main(["weights", "rm"'),
    "generate": (_UP, 'run_stageline("generate"'),
    "chat": (_UP, 'Terminal("chat"'),
    "batch": ("unit/stageline/test_cli_batch.py", '"batch"'),
    "attach": (_REQUESTS, 'main(["attach"'),
    "cancel": (_REQUESTS, '"cancel"'),
    "health": ("integration/test_health_command.py", "health --for"),
    "doctor": ("integration/test_doctor.py", '"doctor", "-f"'),
    "support-bundle": ("integration/test_support_bundle.py", '"support-bundle", "-f"'),
    "drain": ("integration/test_drain.py", '"drain"'),
    "status": (_UP, 'run_stageline("status"'),
    "top": ("e2e/test_watching.py", 'Terminal("top"'),
    "trace": ("unit/stageline/test_cli_trace.py", 'main(["trace", REQUEST_ID'),
    "bench serve": (_LOAD, '"bench serve '),
    "keys create": (_KEYS, '"keys"', '"create"'),
    "keys revoke": (_KEYS, '"keys"', '"revoke"'),
    "keys list": (_KEYS, '"keys"', '"list"'),
    "certs ca": (_CERTS, '"certs"', '"ca", "--issue"'),
    "certs issue": (_CERTS, '"certs"', '"issue"'),
    "certs renew": (_CERTS, '"certs"', '"renew"'),
    "certs show": (_CERTS, '"certs"', '"show"'),
    "token create": (_TOKENS, '"token", "create"'),
    "token list": (_TOKENS, '"token", "list"'),
    "token revoke": (_TOKENS, '"token", "revoke"'),
}
_FILE = "Configuration: flags override STAGELINE_* variables, which override --config"
FLAG_GROUPS: dict[str, Row] = {
    "up: Workers on this machine": (_UP, "--workers"),
    "up: Compute": (_UP, "--threads"),
    "up: Model and stages": ("e2e/test_mock_cluster.py", "--mock-model"),
    "up: Batching and KV cache": (_UP, "--kv-tokens"),
    "up: Admission": (_UP_FLAGS, "--queue-size"),
    "up: Failures and restarts": (_UP_FLAGS, "--recovery-timeout"),
    "up: Addresses and access": (_UP, "--listen"),
    "up: API": (_UP, "--gateway"),
    "up: Cluster and addresses": (_UP_FLAGS, "--payload-min"),
    "up: Certificates": (_TLS, "--insecure"),
    "up: Traces": (_UP_FLAGS, "--trace-store"),
    "up: Logs": (_UP_FLAGS, "--log-format"),
    "coordinator: Model and stages": (_USAGE, "--dtype"),
    "coordinator: Batching and KV cache": (_USAGE, "--max-step-sequences"),
    "coordinator: Admission": (_USAGE, "--queue-size"),
    "coordinator: Failures and restarts": (_CONFIG, "--journal"),
    "coordinator: Addresses and access": ("e2e/test_watching.py", "--token-file"),
    "coordinator: Certificates": (_TLS, "--deny-list"),
    "coordinator: Traces": (_USAGE, "--trace-bytes"),
    "coordinator: Logs": (_USAGE, "--log-format"),
    f"coordinator: {_FILE}": (_CONFIG, "--config"),
    "worker: Cluster and addresses": (_BY_HAND, "--advertise"),
    "worker: Compute": (_BY_HAND, "--memory"),
    "worker: Weights of remote models": (_USAGE, "--cache-size"),
    "worker: Certificates": (_TLS, "--tls-dir"),
    "worker: Logs": (_USAGE, "--log-format"),
    f"worker: {_FILE}": (_CONFIG, "--print-config"),
    "gateway: Addresses": (_GATEWAY, "--listen"),
    "gateway: Certificates": (_TLS, "--tls-dir"),
    "gateway: API": (_GATEWAY, "--served-model-name"),
    "gateway: Logs": (_GATEWAY, "--log-format"),
    f"gateway: {_FILE}": (_CONFIG, "--print-config"),
    "plan: Model and stages": ("unit/stageline/test_plan_command.py", "--layers"),
    "plan: Batching and KV cache": ("unit/stageline/test_plan_command.py", "--kv-tokens"),
    "generate: Length and stopping": (_REQUESTS, "--min-tokens"),
    "generate: Sampling": (_REQUESTS, "--min-p"),
    "generate: Structured output (at most one of these)": (_REQUESTS, "--json-schema"),
    "generate: Output": (_REQUESTS, "--prompt-logprobs"),
    "generate: Scheduling and lifetime": (_REQUESTS, "--detach"),
    "chat: Length and stopping": ("unit/stageline/test_cli_client.py", "--max-tokens"),
    "chat: Sampling": (_REQUESTS, "--min-p"),
    "bench serve: Arrivals": (_LOAD, "--request-rate"),
    "bench serve: Requests": (_LOAD, "--prompt-tokens"),
    "bench serve: Latency limits for goodput": (_LOAD, "--slo-e2e"),
}
"""A flag of the group, which the test uses with the command."""
RPCS: dict[str, Row] = {
    "Generate": (_STRANGER, "stub.Generate("),
    "Attach": ("integration/test_attach_secrets.py", "client.attach("),
    "Serve": ("integration/test_serve.py", "gateway.submit("),
    "GetTokenizer": ("integration/test_link.py", "link.tokenizer_directory"),
    "Tokenize": ("integration/test_link.py", "stub.Tokenize("),
    "Detokenize": ("integration/test_link.py", "stub.Detokenize("),
    "Cancel": ("e2e/served/test_early_ends.py", "client.cancel("),
    "GetModel": (_STRANGER, "stub.GetModel("),
    "Drain": ("integration/test_drain.py", "client.drain("),
    "GetStatus": (_STRANGER, "cluster.GetStatus("),
    "WatchKvEvents": (_STRANGER, "cluster.WatchKvEvents("),
    "ListTraces": (_STRANGER, "traces.ListTraces("),
    "GetTrace": ("integration/test_trace_services.py", "client.trace("),
    "GetActivity": ("integration/test_dashboard.py", "client.activity("),
}
README_CLAIMS: dict[str, Row] = {
    "A lost worker does not fail requests": ("integration/test_cluster_recovery.py", ".stop()", "check("),
    "Lost, cut, repeated and damaged messages": ("integration/test_cluster_faults.py", "faulty", "check("),
    "Status, traces, metrics and a dashboard": ("integration/test_dashboard_page.py", "slow"),
}
"""Bullets, by their beginning."""
README_BLOCKS: dict[str, Row] = {
    "  gateway <--gRPC--> coordinator": (_UP, '("FIRST", "worker-0"), ("MIDDLE", "worker-1")'),
    "make demo": ("unit/test_features.py", "(BIN)/stageline demo"),
    "Starting a coordinator, 3 stage workers and a gateway": (_UP, 'Terminal("demo"', "first token after"),
    "from openai import OpenAI": ("clients/test_openai.py", "README.md"),
    "stageline up --model hf://ORG/NAME": ("integration/test_remote_weights.py", 'cluster_of("hf://'),
    "$ stageline up --workers 3": (_UP, 'Terminal("up", "--workers", "3"', '"Once upon a time"'),
    "head$  stageline coordinator --model /models/m": (
        _BY_HAND,
        "shell.coordinator(",
        "--model",
        "--stages",
    ),
    "import asyncio": ("unit/stageline/test_cli_client.py", "README.md"),
}
"""Code blocks, by the beginning of their first line."""
PAGES: dict[str, Row] = {
    "architecture": ("unit/test_documents.py", "ARCHITECTURE"),
    "batch": ("unit/stageline/test_cli_batch.py", "process.kill()"),
    "benchmarking": (_LOAD, "--slo-e2e", "--plot"),
    "clients": ("clients/test_llm.py", "clients.md"),
    "dashboard": ("integration/test_dashboard_page.py", "keyboard"),
    "gateway": (_GATEWAY, '"/v1/completions"', "usage"),
    "health": ("e2e/test_health_ports.py", "--health-listen"),
    "doctor": ("integration/test_doctor.py", "problems_of_survey"),
    "failures": ("integration/test_cluster_recovery.py", ".stop()"),
    "gguf": ("integration/test_gguf.py", "self_check=True"),
    "hosts": (_BY_HAND, "--listen", "--advertise"),
    "installing": ("e2e/test_without_torch.py", "LIBRARY_MISSING"),
    "journal": ("integration/test_journal.py", "positions="),
    "keys": ("integration/test_tenants.py", "cached(", "bob"),
    "mock-stages": ("integration/test_mock_cluster.py", "step="),
    "models": ("unit/checkpoint/test_catalog.py", "families()"),
    "observability": ("unit/deploy/test_observability.py", "alerts.yaml"),
    "operations": ("integration/test_drain.py", "under_load"),
    "protocol": ("integration/test_stage_handshake.py", "HopHello"),
    "python": ("unit/stageline/client/test_client.py", "client.generate("),
    "requests": ("integration/test_limits.py", "RESOURCE_EXHAUSTED"),
    "runbook": ("unit/test_error_reasons.py", "Reasons that servers send"),
    "sampling": ("integration/test_sampling_everywhere.py", "sampling"),
    "security": (_CERTIFICATES, "certificates=", "rewrite()"),
    "self-check": ("integration/test_self_check.py", "faulty"),
    "status": ("unit/stageline/test_cli_client.py", '"--json"', "status"),
    "structured-output": ("integration/test_structured_output.py", "json_schema", "regex"),
    "telemetry": ("integration/test_metrics.py", "openmetrics-text"),
    "weights": ("integration/test_remote_weights.py", "range_server(", "NOT_VERIFIED"),
    "weight-formats": ("integration/test_quantized_parity.py", "pipeline.generate("),
}
"""Pages of docs/ about features; limitations.md has none."""


@cache
def sources_of_tests(path: Path) -> dict[str, str]:
    """Source of each test that every change runs, with what it uses of its file."""
    text = path.read_text()
    module = ast.parse(text)
    defined = dict(_definitions(module))
    marks = _marks(defined["pytestmark"]) if "pytestmark" in defined else set()
    return {
        name: _with_uses(name, defined, text)
        for name, node in defined.items()
        if name.startswith("test_") and chosen_by(marks | _marks(node)) & {"test", "test-full"}
    }


def _definitions(module: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            yield ast.unparse(target), node


def _marks(node: ast.stmt) -> set[str]:
    """Names of the markers in decorators, or in the value of `pytestmark`."""
    parts = getattr(node, "decorator_list", None) or [node]
    return {name for part in parts for name in re.findall(r"pytest\.mark\.(\w+)", ast.unparse(part))}


def _with_uses(name: str, defined: dict[str, ast.stmt], text: str) -> str:
    seen, waiting = set[str](), [name]
    while waiting:
        if (used_name := waiting.pop()) not in seen and used_name in defined:
            seen.add(used_name)
            waiting += [node.id for node in ast.walk(defined[used_name]) if isinstance(node, ast.Name)]
    return "\n".join(ast.get_source_segment(text, defined[used_name]) or "" for used_name in sorted(seen))


def commands() -> dict[str, Any]:
    return dict(leaves(typer.main.get_command(make_app())))


def flag_groups() -> dict[str, set[str]]:
    """The flags of every panel of every command."""
    groups: dict[str, set[str]] = {}
    for name, command in commands().items():
        for option in command.params:
            if option.param_type_name == "option" and option.rich_help_panel:
                groups.setdefault(f"{name}: {option.rich_help_panel}", set()).update(option.opts)
    return groups


def rpcs() -> set[str]:
    return {
        name
        for path in PROTOS.glob("*.proto")
        for name in re.findall(r"^  rpc (\w+)", path.read_text(), re.M)
    }


def _missing(rows: Mapping[str, Row]) -> list[str]:
    """The features whose row names no test that drives them."""
    return [
        f"{feature}: no test of make test or test-full in tests/{path} has {' and '.join(texts)}"
        for feature, (path, *texts) in rows.items()
        if not any(
            all(text in source for text in texts)
            for source in sources_of_tests(REPOSITORY / "tests" / path).values()
        )
    ]


def test_every_command_is_driven() -> None:
    assert set(COMMANDS) == set(commands())
    assert _missing(COMMANDS) == []


def test_every_group_of_flags_is_driven() -> None:
    groups = flag_groups()
    assert set(FLAG_GROUPS) == set(groups)
    assert [name for name, (_, flag) in FLAG_GROUPS.items() if flag not in groups[name]] == []
    rows = {
        name: (path, f'"{name.split()[0].rstrip(":")}', flag) for name, (path, flag) in FLAG_GROUPS.items()
    }
    assert _missing(rows) == []


def test_every_public_rpc_is_driven() -> None:
    assert set(RPCS) == rpcs()
    assert _missing(RPCS) == []


def test_every_part_of_the_readme_is_driven() -> None:
    bullets = re.findall(r"^\* (.*)$", README, re.MULTILINE)
    blocks = re.findall(r"^```\w*\n(.*)\n(?:(?!```).*\n)*```$", README, re.MULTILINE)
    for rows, parts in ((README_CLAIMS, bullets), (README_BLOCKS, blocks)):
        assert len(rows) == len(parts)
        assert [part for part in parts if not part.startswith(tuple(rows))] == []
        assert _missing(rows) == []
    named = set(re.findall(r"`stageline (bench serve|[a-z-]+)", README))
    assert named == {name if name == "bench serve" else name.split()[0] for name in COMMANDS}


def test_every_page_about_features_is_driven() -> None:
    assert set(PAGES) == {page.stem for page in (REPOSITORY / "docs").glob("*.md")} - {
        "limitations",
        "README",
    }
    assert _missing(PAGES) == []


def test_make_demo_runs_the_demo() -> None:
    assert "\ndemo: runtime\n\t@$(BIN)/stageline demo\n" in (REPOSITORY / "Makefile").read_text()


@pytest.mark.parametrize("marker", ["nightly", "chaos", "gpu"])
def test_a_test_of_another_tier_drives_nothing(tmp_path: Path, marker: str) -> None:
    file = tmp_path / f"test_{marker}.py"
    file.write_text("import pytest\n\nWORD = 'chat'\n\ndef test_a():\n    assert WORD\n")
    rows = {"chat": (str(file), "chat")}
    assert _missing(rows) == []
    marked = tmp_path / f"test_marked_{marker}.py"
    marked.write_text(file.read_text().replace("def test_a", f"@pytest.mark.{marker}\ndef test_a"))
    assert len(_missing({"chat": (str(marked), "chat")})) == 1
    marked_whole = tmp_path / f"test_module_{marker}.py"
    marked_whole.write_text(f"{file.read_text()}\npytestmark = pytest.mark.{marker}\n")
    assert len(_missing({"chat": (str(marked_whole), "chat")})) == 1
