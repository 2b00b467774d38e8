"""Runs a command that ends when its launcher ends, however the launcher ends (`kill -9` included).

Called as `python leash.py LAUNCHER_PID COMMAND...`: asks the kernel to kill this process when its parent is
gone, then becomes the command. The request survives exec. It is made here and not in `preexec_fn`, because
Python code between fork and exec can deadlock in a launcher that has threads (gRPC's, for one).

Linux kills the child when the *thread* that started it ends, so a launcher starts its children from a thread
that lives as long as they shall: its main thread. Elsewhere than on Linux the leash does nothing.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    """Puts this process on the leash and replaces it by the command."""
    launcher_pid = int(sys.argv[1])
    command = sys.argv[2:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != launcher_pid:
        # The launcher ended before the request was made, so no signal will come.
        sys.exit(f"launcher {launcher_pid} is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
