"""Runs a command that the kernel kills when its launcher ends, even by `kill -9`.

Called as `python parent_death_signal.py LAUNCHER_PID COMMAND...`: sets the parent-death signal, then
executes the command; the setting survives exec. It is not set in `preexec_fn`, because Python code between
fork and exec can deadlock in a launcher with threads, such as gRPC's.

Linux sends the signal when the *thread* that started the process ends, so a launcher starts its processes
from its main thread. On other systems there is no signal.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    """Set the parent-death signal and execute the command."""
    launcher_pid = int(sys.argv[1])
    command = sys.argv[2:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != launcher_pid:
        # The launcher ended before the request was made, so no signal will come.
        sys.exit(f"launcher {launcher_pid} has exited")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
