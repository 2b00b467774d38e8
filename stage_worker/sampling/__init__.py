"""Tokens from logits, on the stage with the head."""
