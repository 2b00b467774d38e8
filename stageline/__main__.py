"""Entry point of the `stageline` command; imports nothing slow."""

import codecs
import io
import os
import signal
import sys
from typing import NoReturn, TextIO

from wire.exit_codes import ExitCode

_UNENCODABLE = "stageline.unencodable"


def main() -> int:
    """Runs the command line of this process and returns its exit code (see `stageline.cli.main`)."""
    _decode_arguments_as_utf8()
    _accept_all_text()
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


def _decode_arguments_as_utf8() -> None:
    """Start again in Python's UTF-8 mode if the locale, such as C, cannot decode an argument.

    Paths and texts both need it: Python encodes a path as it decodes arguments.
    """
    if sys.flags.utf8_mode or not any(_has_undecoded(argument) for argument in sys.argv):
        return
    if stream := sys.stdout or sys.stderr:
        os.environ.setdefault("PYTHONIOENCODING", stream.encoding)  # the terminal's is not UTF-8
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _has_undecoded(argument: str) -> bool:
    return any("\udc80" <= character <= "\udcff" for character in argument)


def _accept_all_text() -> None:
    """Let standard streams take any text: a terminal need not be UTF-8, and a stream may be closed."""
    codecs.register_error(_UNENCODABLE, _escape_unencodable)
    sys.stdout = sys.stdout or _discarding()
    sys.stderr = sys.stderr or _discarding()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_UNENCODABLE)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="backslashreplace")


def _discarding() -> TextIO:
    return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def _escape_unencodable(error: UnicodeError) -> tuple[str, int]:
    r"""Replace characters by \uXXXX, which JSON has as well, so that JSON stays valid."""
    assert isinstance(error, UnicodeEncodeError)
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass").hex()
    escapes = (f"\\u{units[begin : begin + 4]}" for begin in range(0, len(units), 4))
    return "".join(escapes), error.end


def _leave(number: int, frame: object) -> NoReturn:
    # An exception could come up inside an import's own bookkeeping, where Python prints it and goes on.
    os._exit(ExitCode.INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
