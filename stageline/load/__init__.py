"""Load generator: plans, drives and reports a benchmark load."""
