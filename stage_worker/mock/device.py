"""A device that fails as its spec says: for good, for steps that are too large, or by never ending a step."""

from stage_worker.device_errors import DeviceError
from stage_worker.mock.spec import MockSpec


class MockDevice:
    """One per process, like a real one: what it has computed outlives stages and epochs."""

    def __init__(self, spec: MockSpec) -> None:
        self._spec = spec
        self._num_steps = 0

    @property
    def is_hung(self) -> bool:
        """No step ends any more."""
        return self._spec.hang_after is not None and self._num_steps > self._spec.hang_after

    def compute(self, num_tokens: int) -> None:
        """Computes a step with slices of so many tokens. Raises DeviceError or MemoryError."""
        spec = self._spec
        if spec.oom_at is not None and num_tokens >= spec.oom_at:
            raise MemoryError(f"mock: {num_tokens} tokens, out of memory at {spec.oom_at} (oom_at)")
        self._num_steps += 1
        if spec.poison_after is not None and self._num_steps > spec.poison_after:
            raise DeviceError(f"mock: poisoned after {spec.poison_after} steps (poison_after)")
