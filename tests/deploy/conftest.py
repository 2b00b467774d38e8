"""For tests of deployments: a network for one host; with STRICT=1 a skipped test fails."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator, Iterator

import pytest

from tests.deploy.debian import require
from tests.e2e.namespaces import run_ip

IS_STRICT = os.environ.get("STRICT", "") not in ("", "0")


@pytest.fixture
def network() -> Iterator[str]:
    """A host without a network beside its loopback: the name of its namespace."""
    require("ip", "nsenter", "unshare")
    name = f"stageline-{os.getpid()}-host"
    run_ip("netns", "add", name)
    try:
        run_ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if IS_STRICT and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped with STRICT=1: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if IS_STRICT and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} was skipped as a whole with STRICT=1"
    return report
