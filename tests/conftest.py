"""For all tests."""

import os

# Before anything imports grpc: its core writes lines of its own about connections that end, which tests do on
# purpose.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
