"""Trains the built-in model: corpus, network, model card. Not part of the wheel."""
