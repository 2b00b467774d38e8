"""Failure handling: detection, attribution, rejoin, self-checks."""
