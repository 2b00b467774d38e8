"""For all tests."""

import gc
import os
import signal
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.faults.figures import FIGURE, Figure, Figures
from tests.order import START_FIRST, assign_tiers
from tests.overdue import pytest_runtest_protocol as pytest_runtest_protocol
from tests.properties import register_profiles
from tests.summary import Results
from tests.temporary import end_in_order, process_directory

# Before anything imports grpc: its core writes lines of its own about connections that end, which tests do on
# purpose.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Its handlers of forks sometimes crash the processes that tests start before their exec.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
if "PYTEST_XDIST_WORKER" not in os.environ:
    # Processes of a parallel run cannot remove their directories when they are ended: their parent does.
    os.environ["TMPDIR"] = str(process_directory("tests"))
# Secrets and tokens of commands under test stay out of the user's own state directory.
os.environ["XDG_STATE_HOME"] = str(process_directory("test-state"))
# What a user's cache holds must not decide whether a test passes; processes inherit this.
os.environ["XDG_CACHE_HOME"] = str(process_directory("test-cache"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores it for jobs in the background, and commands under test would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if TYPE_CHECKING:
    from xdist.remote import Producer  # type: ignore[import-untyped]

    from tests.parallel import FileScheduling

register_profiles()
_BEGAN_S = time.monotonic()
# Not for the test runs that tests start.
_RESULTS_FILE = os.environ.pop("STAGELINE_TEST_RESULTS", None)


_SLOW_COLLECTION_S = 0.03


class _FullCollections:
    """Thread time of the last full garbage collection; each load of a stage runs some."""

    def __init__(self) -> None:
        self._began_s = 0.0
        self.last_s = 0.0
        gc.callbacks.append(self._measure)

    def _measure(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2:
            if phase == "start":
                self._began_s = time.thread_time()
            else:
                self.last_s = time.thread_time() - self._began_s


_full_collections = _FullCollections()


def _freeze() -> None:
    """Keep what is alive now out of garbage collections."""
    gc.collect()
    gc.freeze()
    _full_collections.last_s = 0.0


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep collected modules out of garbage collections: each would scan them for 0.2 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        _freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Between files, do the same with modules that tests imported meanwhile, once they are many."""
    yield
    ends_file = nextitem is not None and nextitem.path != item.path
    if ends_file and _full_collections.last_s > _SLOW_COLLECTION_S:
        _freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each case of a matrix its tier, and put files that take longest first."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("matrix"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for cases_of_test in cases.values():
        assign_tiers(cases_of_test)
    items.sort(key=lambda item: START_FIRST.get(item.nodeid.partition("::")[0], len(START_FIRST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> "FileScheduling":
    from tests.parallel import FileScheduling

    return FileScheduling(config, log)


def pytest_sessionstart() -> None:
    """Also the parent of a parallel run, which runs no test, removes its directories when it is ended."""
    end_in_order()


def pytest_runtest_setup() -> None:
    """Before each test: an event loop that has handled a signal leaves the default handler behind."""
    end_in_order()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    """Print the durations of recoveries; append them, and all results, to the files that variables name."""
    stats = terminalreporter.stats
    recorded = Figures(
        [
            Figure(**value)
            for report in stats.get("", [])
            if report.when == "teardown"
            for name, value in report.user_properties
            if name == FIGURE
        ]
    )
    if recorded.all:
        terminalreporter.section("recoveries")
        terminalreporter.write("".join(f"{line}\n" for line in recorded.lines()))
    if (file := os.environ.get("STAGELINE_TEST_RECOVERY_FIGURES")) is not None:
        with Path(file).open("a") as output:
            output.write(recorded.json_lines())
    if _RESULTS_FILE is not None:
        is_parallel = bool(terminalreporter.config.getoption("numprocesses", None))
        taken_s = time.monotonic() - _BEGAN_S
        results = Results.of_reports(stats, taken_s, is_parallel=is_parallel, exit_status=exitstatus)
        results.append_to(Path(_RESULTS_FILE))
