"""Drives a cluster with a load that was laid down before, and measures how it is served."""
