"""For all tests."""

import os

from tests.temporary import end_in_order, process_directory

# Before anything imports grpc: its core writes lines of its own about connections that end, which tests do on
# purpose.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Secrets and tokens of commands under test stay out of the user's own state directory.
os.environ["XDG_STATE_HOME"] = str(process_directory("test-state"))
# What a user's cache holds must not decide whether a test passes; processes inherit this.
os.environ["XDG_CACHE_HOME"] = str(process_directory("test-cache"))


def pytest_runtest_setup() -> None:
    """Before each test: an event loop that has handled a signal leaves the default handler behind."""
    end_in_order()
