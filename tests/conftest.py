"""For all tests."""

import os
import tempfile

# Before anything imports grpc: its core writes lines of its own about connections that end, which tests do on
# purpose.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Secrets and tokens of commands under test stay out of the user's own state directory.
_STATE = tempfile.TemporaryDirectory(prefix="stageline-test-state-")
os.environ["XDG_STATE_HOME"] = _STATE.name
# What a user's cache holds must not decide whether a test passes; processes inherit this.
_CACHE = tempfile.TemporaryDirectory(prefix="stageline-test-cache-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name
