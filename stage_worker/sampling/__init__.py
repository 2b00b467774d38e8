"""Tokens and log-probabilities from logits, on the stage with the head; docs/sampling.md says how."""

from stage_worker.sampling.sampler import Sampler

__all__ = ["Sampler"]
