"""What a worker is told about the functions that it computes with; torch is not needed to say it."""

from enum import Enum


class KernelChoice(Enum):
    """AUTO takes the fastest functions that the device, dtype and model allow. PLAIN takes torch's operators
    only. COMPILED takes the compiled functions, and fails where they cannot be used.
    """

    AUTO = "auto"
    PLAIN = "plain"
    COMPILED = "compiled"


class KernelsUnavailable(ValueError):
    """The compiled kernels were asked for and cannot be used; the text has the reason."""
