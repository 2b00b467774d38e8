"""The token ids of the prompts of a load."""

from functools import cache

import numpy as np
import numpy.typing as npt

from stageline.load.plan import LoadSpec, PlannedRequest, Purpose, rng_for


class Prompts:
    """Random token ids in [0, vocab_size), a function of the specification's seed and the request's index."""

    def __init__(self, spec: LoadSpec, vocab_size: int) -> None:
        self._spec = spec
        self._vocab_size = vocab_size
        self._prefix = cache(self._make_prefix)

    def token_ids(self, request: PlannedRequest) -> list[int]:
        """The shared prefix of the request's group, and tokens of its own behind it."""
        num_own = request.prompt_tokens - self._spec.shared_prefix_tokens
        own = self._draw(num_own, Purpose.PROMPTS, request.index)
        token_ids: list[int] = np.concatenate((self._prefix(request.prefix_group), own)).tolist()
        return token_ids

    def _make_prefix(self, group: int) -> npt.NDArray[np.int64]:
        return self._draw(self._spec.shared_prefix_tokens, Purpose.PREFIXES, group)

    def _draw(self, num_tokens: int, purpose: Purpose, which: int) -> npt.NDArray[np.int64]:
        return rng_for(self._spec.seed, purpose, which).integers(0, self._vocab_size, num_tokens)
