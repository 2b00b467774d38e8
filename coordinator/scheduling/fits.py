"""Small running fits of measured times. Pure."""

from collections import deque

_DECAY = 0.97
"""Weight of what was known, each time something is measured: half of it is gone after 23 measurements."""
_LEAST_SPREAD = 0.01
"""Below it, the two features of all measurements are as good as proportional and cannot be told apart."""
_FEW = 8
_OUTLIER = 4.0


class TwoTermFit:
    """y = first * x1 + second * x2 with coefficients that are not negative, by weighted least squares.

    New measurements weigh more than old ones. As long as the features cannot be told apart, x1 explains all.
    A value far above what is expected counts as far as `_OUTLIER` times the expected: one page fault or
    stolen core is no new speed, and a new speed is believed after a few.
    """

    def __init__(self) -> None:
        self._s11 = self._s12 = self._s22 = self._s1y = self._s2y = 0.0
        self._count = 0
        self.first = 0.0
        self.second = 0.0

    @property
    def is_known(self) -> bool:
        """Something was measured."""
        return self._count > 0

    def predict(self, x1: float, x2: float) -> float:
        """What is expected; 0 before anything was measured."""
        return self.first * x1 + self.second * x2

    def add(self, x1: float, x2: float, y: float) -> None:
        """`y` was measured where the features were `x1`, which is positive, and `x2`."""
        if self._count >= _FEW:
            y = min(y, _OUTLIER * self.predict(x1, x2))
        self._count += 1
        self._s11 = _DECAY * self._s11 + x1 * x1
        self._s12 = _DECAY * self._s12 + x1 * x2
        self._s22 = _DECAY * self._s22 + x2 * x2
        self._s1y = _DECAY * self._s1y + x1 * y
        self._s2y = _DECAY * self._s2y + x2 * y
        self._solve()

    def _solve(self) -> None:
        determinant = self._s11 * self._s22 - self._s12 * self._s12
        if determinant <= _LEAST_SPREAD * self._s11 * self._s22:
            self.first, self.second = self._s1y / self._s11, 0.0
            return
        first = (self._s1y * self._s22 - self._s2y * self._s12) / determinant
        second = (self._s2y * self._s11 - self._s1y * self._s12) / determinant
        if second < 0:
            first, second = self._s1y / self._s11, 0.0
        elif first < 0:
            first, second = 0.0, self._s2y / self._s22
        self.first, self.second = first, second


class RecentMedian:
    """The median of the last `size` values; of an even number of them the lower one."""

    def __init__(self, size: int = 64) -> None:
        self._values: deque[float] = deque(maxlen=size)
        self._value: float | None = None

    @property
    def value(self) -> float:
        """0 before anything was measured."""
        if self._value is None:
            ordered = sorted(self._values)
            self._value = ordered[(len(ordered) - 1) // 2] if ordered else 0.0
        return self._value

    def add(self, value: float) -> None:
        self._values.append(value)
        self._value = None
