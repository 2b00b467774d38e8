"""A mock stage: real frames, real KV accounting, and simulated time in the place of computation."""
