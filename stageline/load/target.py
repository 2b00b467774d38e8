"""The cluster that a load is for, and what a planned request is to it."""

from stageline.client import Client
from stageline.load.driver import Outputs
from stageline.load.plan import LoadSpec, PlannedRequest
from stageline.load.prompts import Prompts
from wire.ids import id_text, new_request_id

_NUM_SEEDS = 2**64


class Target:
    """Makes the requests of one run of a load.

    Their outputs have exactly the planned lengths: end-of-sequence ids end none. Cached prefixes are shared
    within the run only, so that a second run with the same seed finds the cache as the first one did.
    """

    def __init__(
        self, client: Client, spec: LoadSpec, *, vocab_size: int, temperature: float, timeout_s: float
    ) -> None:
        self._client = client
        self._prompts = Prompts(spec, vocab_size)
        self._seed = spec.seed
        self._temperature = temperature
        self._timeout_s = timeout_s
        self._cache_salt = id_text(new_request_id())

    def prepare(self, request: PlannedRequest) -> Outputs:
        """The outputs of a request, which is sent when they are read first."""
        return self._client.generate(
            self._prompts.token_ids(request),
            max_tokens=request.output_tokens,
            ignore_eos=True,
            temperature=self._temperature,
            seed=(self._seed + request.index) % _NUM_SEEDS,
            cache_salt=self._cache_salt,
            timeout_s=self._timeout_s,
        )
