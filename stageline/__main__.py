"""Entry point of the `stageline` command; imports nothing slow."""

import os
import signal
import sys
from typing import NoReturn

from wire.exit_codes import ExitCode


def main() -> int:
    """Runs the command line of this process and returns its exit code (see `stageline.cli.main`)."""
    # gRPC reads this on import. Its own log lines are about opened and closed connections; commands report
    # the relevant ones themselves.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Its handlers of forks sometimes crash the child before exec, in a launcher that is also a client.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    # The only cipher suites that it may use in TLS 1.2, and none that fits a certificate: TLS 1.3 is left.
    os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-PSK-AES128-CBC-SHA"
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        # Nothing is started yet that needs an orderly end.
        signal.signal(signal.SIGINT, _leave)
    from stageline.cli import main as run

    signal.signal(signal.SIGINT, handler)
    return run()


def _leave(number: int, frame: object) -> NoReturn:
    # An exception could come up inside an import's own bookkeeping, where Python prints it and goes on.
    os._exit(ExitCode.INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
