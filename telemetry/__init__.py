"""Spans, metrics and logs of a running cluster."""
