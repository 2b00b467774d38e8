"""Parameters that each way of sampling a row applies: a row with any other one is for the general way."""

from dataclasses import fields
from operator import attrgetter

from wire.sampling import StepSampling

PARAMETERS = frozenset(row.name for row in fields(StepSampling) if row.compare)
_OF_EVERY_WAY = frozenset(
    (
        *("logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty"),
        *("allowed_token_ids", "bad_words", "min_tokens", "min_tokens_hold_back", "grammar"),
        *("logprobs", "prompt_logprobs"),
    )
)
"""Change the logits before a row is sampled, or are computed from them afterwards."""


class KnownParameters:
    """Parameters that one way of sampling applies.

    A parameter that is added to `StepSampling` is unknown to each way until the way names it.
    """

    def __init__(self, *names: str) -> None:
        known = _OF_EVERY_WAY.union(names)
        assert known <= PARAMETERS, f"no parameters: {known - PARAMETERS}"
        unknown = sorted(PARAMETERS - known)
        self._values = attrgetter(*unknown) if unknown else _nothing
        self._without_effect = self._values(StepSampling())

    def suffice_for(self, sampling: StepSampling) -> bool:
        """Whether the other parameters of `sampling` have no effect."""
        return bool(self._values(sampling) == self._without_effect)


def _nothing(sampling: StepSampling) -> None:
    """All parameters are known."""
