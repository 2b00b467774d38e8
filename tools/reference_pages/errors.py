"""docs/reference/errors.md: exit codes, and reason codes with meaning and action."""

import inspect
from collections.abc import Iterator

from tools.reference_pages.markdown import GENERATED, table
from tools.reference_pages.reasons import ACTIONS, IN_CLIENTS, IN_COMMANDS
from tools.reference_pages.source import fields_of

_ERRORS = """\
# Errors

Every gRPC error that Stageline sends carries a `google.rpc.ErrorInfo` with `domain` `stageline` and a stable
`reason`; branch on the reason, not on the text. The same codes are in `StagelineError.reason` of the client
library, in `reason` beside `error` in the dashboard's JSON, and in the line that ends a command or a process:

```
$ stageline generate "Hello" --logit-bias 5=101
stageline: error[INVALID_REQUEST]: logit_bias of token 5 is 101, must be in [-100, 100]
```

A mistake that the command finds before it calls the coordinator is `USAGE` with exit code 2, such as a number
outside the range in `--help`. A mistake that the client library or the coordinator finds is `INVALID_REQUEST`
with exit code 1.

"""
_REASONS = f"""
{GENERATED}
[runbook.md](../runbook.md) starts from symptoms.

## Reasons that servers send

"""
_LOCAL_ERRORS = """
## Reasons of clients and processes

Where gRPC itself ends a call (a lost connection, a deadline on the client, a message above 16 MiB), there is
no ErrorInfo, and the reason is the name of the status, such as `UNAVAILABLE`. An HTTP error without a more
specific reason has the name of its status, such as `NOT_FOUND`.

"""


def errors() -> str:
    """Every exit code; every reason code with status or reporter, meaning, action."""
    exits = fields_of("wire/exit_codes.py", "ExitCode")
    codes = ((value.strip("`"), name, meaning) for name, _, value, meaning in exits)
    return (
        _ERRORS
        + table(("exit code", "name", "meaning"), codes)
        + _REASONS
        + table(("reason", "status", "meaning", "what to do"), _sent_errors())
        + _LOCAL_ERRORS
        + table(("reason", "reported by", "meaning", "what to do"), _local_errors())
    )


def _sent_errors() -> Iterator[tuple[str, ...]]:
    from wire.errors import STATUS_OF_ERROR
    from wire.interceptors import sent_reason

    for kind, code in STATUS_OF_ERROR.items():
        yield _error_row(sent_reason(kind.__new__(kind)), code.name, _summary(kind))
    yield _error_row("INTERNAL_ERROR", "INTERNAL", "A defect; the log has the details.")


def _local_errors() -> Iterator[tuple[str, ...]]:
    from wire.errors import reason_of

    for reason, meaning in IN_CLIENTS.items():
        yield _error_row(reason, "client", meaning)
    for reason, meaning in IN_COMMANDS.items():
        yield _error_row(reason, "command", meaning)
    for kind, reporter in _process_errors():
        yield _error_row(reason_of(kind.__new__(kind)), reporter, _summary(kind))
    yield _error_row("OS_ERROR", "command, process", "An address, file or directory cannot be used.")
    yield _error_row("INVALID_CONFIGURATION", "process", "Settings contradict each other or the machine.")


def _process_errors() -> Iterator[tuple[type[Exception], str]]:
    from checkpoint import CheckpointError
    from coordinator.journal.records import JournalUnusable
    from coordinator.planner.plan import PlanImpossible
    from deploy import ClusterFailed
    from stage_worker.backends.contract import DeviceError
    from stage_worker.coordinator_client import JoinRefused
    from stageline.load.driver import WarmupFailed
    from text.tokenizer import UnreadableTokenizer
    from weights.errors import SourceError

    commands: list[type[Exception]] = [WarmupFailed, ClusterFailed, PlanImpossible]
    processes: list[type[Exception]] = [*CheckpointError.__subclasses__(), *SourceError.__subclasses__()]
    processes += [UnreadableTokenizer, JournalUnusable, DeviceError, JoinRefused]
    yield from ((kind, "command") for kind in commands)
    yield from ((kind, "process") for kind in processes)


def _summary(kind: type[Exception]) -> str:
    return (inspect.getdoc(kind) or "").split("\n\n", 1)[0]


def _error_row(reason: str, where: str, meaning: str) -> tuple[str, ...]:
    return f"`{reason}`", where, meaning, ACTIONS[reason]
