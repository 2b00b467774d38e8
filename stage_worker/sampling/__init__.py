"""Tokens and log-probabilities from logits, on the stage with the head; see docs/sampling.md."""

from stage_worker.sampling.sampler import SampledStep, Sampler

__all__ = ["SampledStep", "Sampler"]
