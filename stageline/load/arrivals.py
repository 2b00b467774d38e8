"""When the requests of a load arrive."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_REQUESTS = 1_000_000

_DRAWN_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrivals:
    """An endless arrival process of `rate_per_s` requests per second; an infinite rate is all at once.

    Gaps are gamma-distributed with shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is
    steadier. The squared coefficient of variation of the gaps is 1 / burstiness. Raises ValueError.
    """

    rate_per_s: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if not self.rate_per_s > 0:
            raise ValueError(f"a request rate of {self.rate_per_s:g} per second is not above 0")
        if not 0 < self.burstiness < math.inf:
            raise ValueError(f"a burstiness of {self.burstiness:g} is not above 0 and finite")

    def first(self, num_requests: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        """Seconds from the first arrival to each of `num_requests`, in order; shape (num_requests,)."""
        return np.concatenate(([0.0], np.cumsum(self._gaps_s(num_requests - 1, rng))))

    def within(self, duration_s: float, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        """Seconds from the first arrival to each that comes less than `duration_s` after it, in order.

        Raises ValueError for more than MAX_REQUESTS of them.
        """
        if math.isinf(self.rate_per_s):
            raise ValueError("at an infinite rate, a duration holds no certain number of requests")
        times_s = np.zeros(1)
        while times_s[-1] < duration_s:
            if len(times_s) > MAX_REQUESTS:
                raise ValueError(
                    f"{duration_s:g} s at {self.rate_per_s:g} requests per second are more than "
                    f"{MAX_REQUESTS} requests"
                )
            later_s = times_s[-1] + np.cumsum(self._gaps_s(_DRAWN_AT_ONCE, rng))
            times_s = np.concatenate((times_s, later_s))
        return times_s[times_s < duration_s]

    def _gaps_s(self, num_gaps: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        # Two rates with the same seed have the same pattern, at two speeds.
        return rng.standard_gamma(self.burstiness, num_gaps) / (self.burstiness * self.rate_per_s)
