"""Records which functions run in a process while a window is open.

`tools/house_trace.py` copies this file as `sitecustomize.py` into a directory on PYTHONPATH, so that Python
runs it at the start of every process. The file `control` in that directory names the open window; it is empty
between windows. A process acknowledges a change in `state.PID` and writes its functions to `WINDOW.PID`.
"""

import contextlib
import os
import sys
import threading
import time
from types import CodeType, FrameType

_POLL_INTERVAL_S = 0.02
_CO_OPTIMIZED = (
    0x1  # set for functions, lambdas and comprehensions, not for the bodies of modules and classes
)


class Probe:
    """Profile hook and window switch of one process."""

    def __init__(self, directory: str, root: str) -> None:
        self._directory = directory
        self._root = root
        self._window = ""
        self._codes: set[CodeType] = set()
        self._num_written = 0

    def on_profile_event(self, frame: FrameType, event: str, argument: object) -> None:
        """Hook for `sys.setprofile`; a resumed coroutine counts as a call."""
        if event == "call" and self._window:
            self._codes.add(frame.f_code)

    def follow_control_file(self) -> None:
        """Switch windows per the control file, until the process ends."""
        self._write_file("state", "")
        # The directory disappears before the process when the measurement is over.
        with contextlib.suppress(FileNotFoundError):
            while True:
                self._poll()
                time.sleep(_POLL_INTERVAL_S)

    def _poll(self) -> None:
        with open(os.path.join(self._directory, "control"), encoding="utf-8") as file:
            window = file.read()
        if window != self._window:
            self._switch_window(window)
        elif len(self._codes) != self._num_written:
            self._write_functions()

    def _switch_window(self, window: str) -> None:
        if self._window:
            closed = self._window
            self._window = ""
            self._write_functions(closed)
        self._codes.clear()
        self._num_written = 0
        self._window = window
        self._write_file("state", window)

    def _write_functions(self, window: str = "") -> None:
        codes = tuple(self._codes)
        lines = {
            f"{code.co_filename}\t{code.co_qualname}\n"
            for code in codes
            if code.co_flags & _CO_OPTIMIZED and code.co_filename.startswith(self._root)
        }
        self._write_file(window or self._window, "".join(sorted(lines)))
        self._num_written = len(codes)

    def _write_file(self, stem: str, text: str) -> None:
        path = os.path.join(self._directory, f"{stem}.{os.getpid()}")
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(f"{path}.new", path)


def install_probe(directory: str, root: str) -> None:
    """Hook all Python threads of this process, and follow the control file."""
    probe = Probe(directory, root)
    threading.Thread(target=probe.follow_control_file, name="house-probe", daemon=True).start()
    threading.setprofile(probe.on_profile_event)
    sys.setprofile(probe.on_profile_event)


if "STAGELINE_TEST_HOUSE_PROBE" in os.environ:
    install_probe(os.environ["STAGELINE_TEST_HOUSE_PROBE"], os.environ["STAGELINE_TEST_HOUSE_ROOT"])
