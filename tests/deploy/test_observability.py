"""Alert rules and dashboard in a real Prometheus that scrapes a cluster as docs/observability.md says."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from httpx2 import AsyncClient, TransportError

from certificates.identity import Role
from tests.e2e.commands import Shell, run_stageline, until_logged
from tests.issued import Certificates
from tests.ports import unused_address
from tests.promql import SERIES, TARGET_LABELS
from tests.repository import REPOSITORY
from tests.unit.deploy.test_observability import DASHBOARD, OBSERVABILITY, RULES, TARGETS

pytestmark = pytest.mark.deploy
PAGE = (REPOSITORY / "docs" / "observability.md").read_text()
TIMEOUT_S = 120.0
LABELS_OF_PROMETHEUS = TARGET_LABELS | {"__name__"}
WITHOUT_AN_EVENT = {"stageline_metrics_exports_failed_total", "stageline_kv_states"}
"""Of exports that fail, and of models with recurrent states: this cluster has neither."""


def program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (package prometheus)")
    return path


def promtool(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program("promtool"), *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


def test_promtool_accepts_the_rules() -> None:
    done = promtool("check", "rules", "alerts.yaml", cwd=OBSERVABILITY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(RULES)} rules found" in done.stdout


def test_every_alert_fires_and_is_silent_when_it_should() -> None:
    directory = REPOSITORY / "tests" / "deploy"
    done = promtool("test", "rules", "alerts_test.yaml", cwd=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    names = [case["name"] for case in yaml.safe_load((directory / "alerts_test.yaml").read_text())["tests"]]
    assert {rule["alert"] for rule in RULES} == {
        name.removesuffix(" fires") for name in names if name.endswith(" fires")
    }


def test_a_broken_rule_is_found(tmp_path: Path) -> None:
    rules = (OBSERVABILITY / "alerts.yaml").read_text()
    (tmp_path / "alerts.yaml").write_text(rules.replace("> 0.95", "> 0.99"))
    cases = (REPOSITORY / "tests" / "deploy" / "alerts_test.yaml").read_text()
    (tmp_path / "cases.yaml").write_text(cases.replace("../../deploy/observability/", ""))
    assert "StagelineKvCacheFull" in promtool("test", "rules", "cases.yaml", cwd=tmp_path).stderr


async def test_prometheus_has_every_series_of_the_dashboard(tmp_path: Path) -> None:
    program("prometheus")
    certificates = Certificates(tmp_path)
    async with Shell(tmp_path) as shell:
        targets = await started_cluster(shell, certificates, tmp_path)
        async with prometheus(tmp_path, targets) as api:
            await until_scraped(api, "stageline_request_inter_token_latency_seconds_count > 0")
            await until_scraped(api, "sum(stageline_stage_step_duration_seconds_count) > 1")
            await until_scraped(api, 'stageline_gateway_key_tokens_total{kind="completion"} > 0')
            await every_sample_is_defined(api)
            await every_panel_has_data(api)
            await no_rule_fails(api)


async def started_cluster(shell: Shell, certificates: Certificates, folder: Path) -> dict[str, str]:
    """A cluster with certificates, keys and a journal, after requests and a recovery.

    Returns targets by job.
    """

    def tls(name: str, role: Role) -> tuple[str, ...]:
        return ("--tls-dir", str(certificates.of(name, role)))

    keys = ("--keys-file", str(folder / "keys.toml"))
    for role, file in (("viewer", "viewer.key"), ("user", "user.key")):
        made = await run_stageline("keys", "create", "--tenant", "me", "--role", role, *keys)
        assert made.code == 0, made.stderr
        (folder / file).write_text(made.stdout.strip())
    model = ("--mock-model", "layers=4,hidden=64", "--stages", "2", "--journal", str(folder / "journal"))
    listen = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
    head = await shell.start("head", "coordinator", *model, *listen, *keys, *tls("head", Role.COORDINATOR))
    at = ("--coordinator", await head.listening_address(timeout_s=TIMEOUT_S))
    workers = [
        await shell.start(name, "worker", *at, "--mock", "step=1ms", *tls(name, Role.WORKER))
        for name in ("a", "b")
    ]
    await until_logged(head, "serving: epoch", timeout_s=TIMEOUT_S)
    gateway = await shell.start(
        "gw", "gateway", *at, "--listen", "127.0.0.1:0", *keys, *tls("gw", Role.GATEWAY)
    )
    listening = await gateway.listening_address(timeout_s=TIMEOUT_S)
    url = head.dashboard_url()
    assert url is not None
    key = (folder / "user.key").read_text()
    trusted = certificates.of("gw", Role.GATEWAY) / "ca.crt"
    async with AsyncClient(verify=ssl.create_default_context(cafile=trusted), timeout=TIMEOUT_S) as http:
        for _ in range(3):
            answer = await http.post(
                f"https://{listening}/v1/completions",
                json={"prompt": list(range(40)), "max_tokens": 8},
                headers={"authorization": f"Bearer {key}"},
            )
            assert answer.status_code == 200, answer.text
    workers[1].send_signal(signal.SIGKILL)
    await until_logged(head, "again after", timeout_s=TIMEOUT_S)
    (folder / "ca.crt").write_bytes(trusted.read_bytes())
    return {
        "stageline": url.removeprefix("https://").rstrip("/"),
        "stageline-gateways": listening,
    }


@asynccontextmanager
async def prometheus(folder: Path, targets: dict[str, str]) -> AsyncIterator[AsyncClient]:
    """A Prometheus with the configuration of the page, at these targets; yields its API."""
    config = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0])
    config["global"] = {"scrape_interval": "250ms", "evaluation_interval": "250ms"}
    config["rule_files"] = [str(OBSERVABILITY / name) for name in config["rule_files"]]
    assert {job["job_name"] for job in config["scrape_configs"]} == targets.keys()
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
        job["scheme"] = "https"
        job["authorization"] = {"credentials_file": str(folder / "viewer.key")}
        job["tls_config"] = {"ca_file": str(folder / "ca.crt")}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = unused_address()
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            program("prometheus"),
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address={address}",
            stdout=log,
            stderr=log,
        )
    try:
        async with AsyncClient(base_url=f"http://{address}/api/v1", timeout=TIMEOUT_S) as api:
            await until_ready(api, f"http://{address}/-/ready")
            yield api
    finally:
        process.terminate()
        await process.wait()


async def until_ready(api: AsyncClient, url: str) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            with suppress(TransportError):
                if (await api.get(url)).status_code == 200:
                    return
            await asyncio.sleep(0.1)


async def query(api: AsyncClient, expression: str) -> list[Any]:
    answer = (await api.get("/query", params={"query": expression})).json()
    assert answer["status"] == "success", f"{expression}: {answer}"
    result: list[Any] = answer["data"]["result"]
    return result


async def until_scraped(api: AsyncClient, expression: str) -> None:
    """Until the expression has a result."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            if await query(api, expression):
                return
            await asyncio.sleep(0.1)


async def every_sample_is_defined(api: AsyncClient) -> None:
    """The series of Prometheus have the names and labels of the table, and the table's have all been seen."""
    seen = set()
    for result in await query(api, '{__name__=~"stageline_.+"}'):
        labels = result["metric"]
        series = SERIES.get(labels["__name__"])
        assert series is not None, labels
        assert labels.keys() <= series.labels.keys() | LABELS_OF_PROMETHEUS, labels
        seen.add(labels["__name__"])
    asked = {
        name
        for text in [target["expr"] for _, target in TARGETS] + [rule["expr"] for rule in RULES]
        for name in re.findall(r"stageline_\w+", text)
    }
    assert asked - seen <= WITHOUT_AN_EVENT


async def every_panel_has_data(api: AsyncClient) -> None:
    variables = {
        f"${variable['name']}": variable["allValue"] for variable in DASHBOARD["templating"]["list"][1:]
    }
    variables["$__rate_interval"] = "1m"
    wanted = {}
    for title, target in TARGETS:
        expression = target["expr"]
        for name, value in variables.items():
            expression = expression.replace(name, value)
        if not WITHOUT_AN_EVENT & set(re.findall(r"stageline_\w+", expression)):
            wanted[expression] = title
    deadline_s = time.monotonic() + TIMEOUT_S
    while wanted:
        wanted = {text: title for text, title in wanted.items() if not await query(api, text)}
        assert time.monotonic() < deadline_s, wanted


async def no_rule_fails(api: AsyncClient) -> None:
    """Every rule was evaluated; the certificates of an hour are the only reason for an alert at once."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            groups = (await api.get("/rules")).json()["data"]["groups"]
            rules = [rule for group in groups for rule in group["rules"]]
            if rules and all(rule["health"] != "unknown" for rule in rules):
                break
            await asyncio.sleep(0.1)
    assert {rule["name"] for rule in rules} == {rule["alert"] for rule in RULES}
    assert [rule for rule in rules if rule["health"] != "ok"] == []
    firing = {rule["name"] for rule in rules if rule["state"] == "firing"}
    assert firing == {"StagelineCertificateEnds"}, json.dumps(rules)
