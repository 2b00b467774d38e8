"""Metrics: one table of definitions, values that cost next to nothing, and the two forms they leave in."""
