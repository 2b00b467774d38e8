"""Loading a stage: weights, warm-up, verification, references."""
