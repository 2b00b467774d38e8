"""Tokens and log-probabilities from logits, on the stage with the head; see docs/sampling.md."""

from stage_worker.sampling.plain_rows import PlainRows
from stage_worker.sampling.sampler import Sampler

__all__ = ["PlainRows", "Sampler"]
