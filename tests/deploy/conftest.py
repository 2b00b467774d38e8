"""For tests of deployments: with STRICT=1 a skipped test fails."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

IS_STRICT = os.environ.get("STRICT", "") not in ("", "0")


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
