"""How a process ends whose device has failed. Knows no torch."""

DEVICE_FAILED_EXIT_CODE = 3
"""Exit code of a worker whose device has failed: start it again."""


class DeviceError(Exception):
    """The device cannot compute any more in this process; the text has the reason."""
