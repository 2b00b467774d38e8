"""Stable reason codes of errors, and the line in which a command or process reports one."""

import re


def reason_of(error: BaseException) -> str:
    """The reason code of an error class: `CLUSTER_UNAVAILABLE` for ClusterUnavailable.

    Built-in exceptions have two codes, OS_ERROR and INVALID_CONFIGURATION (ValueError); every other one is an
    INTERNAL_ERROR. docs/errors.md lists the codes.
    """
    kind = type(error)
    if kind.__module__ != "builtins" and not issubclass(kind, OSError):
        return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", kind.__name__).upper()
    if isinstance(error, OSError):
        return "OS_ERROR"
    return "INVALID_CONFIGURATION" if isinstance(error, ValueError) else "INTERNAL_ERROR"


def error_line(reason: str, text: str) -> str:
    """The line on standard error that ends a command or a process: `stageline: error[REASON]: text`."""
    return f"stageline: error[{reason}]: {text}"
