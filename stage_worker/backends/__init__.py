"""What loads and computes a stage: torch or a mock."""
