"""docs/reference/errors.md lists every reason code that there is, and no other."""

import re
from collections.abc import Iterator
from pathlib import Path

from checkpoint import CheckpointError
from coordinator.journal.records import JournalUnusable
from coordinator.planner.plan import PlanImpossible
from deploy import ClusterFailed
from stage_worker.backends.contract import DeviceError
from stage_worker.coordinator_client import JoinRefused
from stageline.cli.options import USAGE
from stageline.client.errors import StagelineError
from stageline.load.driver import WarmupFailed
from text.tokenizer import UnreadableTokenizer
from weights.errors import SourceError
from wire.errors import STATUS_OF_ERROR, reason_of
from wire.interceptors import sent_reason

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
WRITTEN_IN_COMMANDS = {
    USAGE,
    "NO_TOKENIZER",
    "NO_CHAT_TEMPLATE",
    "NO_SECRET",
    "NO_KEY",
    "NO_TOKEN",
    "NOT_READY",
    "NOT_SERVING",
    "NO_CACHE",
    "GATEWAY_UNREACHABLE",
    "LIBRARY_MISSING",
}
OF_PROCESSES = (
    JournalUnusable,
    PlanImpossible,
    UnreadableTokenizer,
    ClusterFailed,
    JoinRefused,
    WarmupFailed,
    DeviceError,
    SourceError,
)


def rows(heading: str) -> dict[str, str]:
    """Second column by reason of the table under a heading."""
    section = DOCUMENT.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \|", section, re.MULTILINE)
    assert len(dict(found)) == len(found)
    return dict(found)


def test_the_document_lists_server_reasons_with_their_status() -> None:
    sent = {sent_reason(kind.__new__(kind)): code.name for kind, code in STATUS_OF_ERROR.items()}
    assert rows("Reasons that servers send") == sent | {"INTERNAL_ERROR": "INTERNAL"}


def test_the_document_lists_client_and_process_reasons() -> None:
    server = rows("Reasons that servers send")
    reported = {kind.reason for kind in family(StagelineError)} - server.keys()
    reported |= {reason_of(kind()) for kind in family(CheckpointError) if kind is not CheckpointError}
    reported |= {reason_of(kind.__new__(kind)) for kind in OF_PROCESSES}
    reported |= {reason_of(OSError()), reason_of(ValueError())}
    assert rows("Reasons of clients and processes").keys() == reported | WRITTEN_IN_COMMANDS


def test_a_command_writes_only_reasons_that_are_listed() -> None:
    sources = (DOCUMENT.parents[2] / "stageline" / "cli").glob("*.py")
    written = {name for path in sources for name in re.findall(r'reason="(\w+)"', path.read_text())}
    assert written <= WRITTEN_IN_COMMANDS


def family(kind: type[Exception]) -> Iterator[type]:
    """The class and all that derive from it."""
    yield kind
    for derived in kind.__subclasses__():
        yield from family(derived)
